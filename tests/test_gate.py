"""Gates: the network against plain loops, and their files, ours and the published ones."""

from __future__ import annotations

import os
import pickle
import sys
import types

import numpy
import pytest
import torch
from cache.models import model
from gates import loop, random_gate, random_layer

from kvretain import RetentionCache, artefacts, gate


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "cache"))


def publish(path, layers, old=False, **extra):
    """What the authors' training writes: the layers' state dicts beside NumPy curves."""
    curves = {name: numpy.linspace(1, 0, 6).reshape(2, 3) for name in ("loss", "acc", "loss_train", "acc_train")}
    torch.save(
        {"module": [layer.state_dict() for layer in layers], **curves, **extra},
        path,
        _use_new_zipfile_serialization=not old,
    )
    return str(path)


@pytest.mark.parametrize(("heads", "group", "size", "sinks"), [(2, 3, 16, 16), (1, 1, 16, 16), (3, 2, 4, 5)])
def test_a_gate_is_its_formula(heads, group, size, sinks):
    layer = random_layer(heads, 10, heads, group, size, sinks)
    hidden = 3 * torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(1))
    scores = layer(hidden)
    assert scores.shape == (2, heads, 7) and scores.dtype == torch.float32
    expected = torch.stack([torch.stack([loop(layer, x) for x in row], 1) for row in hidden])
    assert torch.allclose(scores, expected, atol=1e-5)
    assert bool(((scores >= 0) & (scores <= 1)).all())
    assert torch.allclose(layer(hidden, block=3), scores, atol=1e-6)
    assert torch.allclose(layer(hidden.to(torch.bfloat16)), layer(hidden.to(torch.bfloat16).float()))


def test_extreme_logits_stay_finite():
    layer = random_layer(0, 8, 2, 2)
    for parameter in (layer.b, layer.k_base, layer.q_norm.weight):
        parameter.mul_(1e4)
    assert layer(torch.randn(1, 5, 8)).isfinite().all()


def test_our_own_file_round_trips_and_is_remembered(tmp_path):
    made = random_gate(model("llama"), tokens="123")
    path = made.save(tmp_path / "g.safetensors")
    read = gate.load(path)
    assert read.metadata["tokens"] == "123" and read.shape == made.shape
    hidden = torch.randn(1, 4, 32)
    for a, b in zip(made.layers, read.layers, strict=True):
        assert torch.equal(a(hidden), b(hidden)) and not any(p.requires_grad for p in b.parameters())
    assert gate.load(path) is read
    random_gate(model("llama"), seed=5).save(path)
    os.utime(path, ns=(1, 1))
    assert not torch.equal(gate.load(path).layers[0](hidden), read.layers[0](hidden))


def test_many_layers_keep_their_order(tmp_path):
    layers = tuple(random_layer(i, 4, 1, 1, 2, 2) for i in range(12))
    read = gate.load(gate.Gate(layers).save(tmp_path / "g.safetensors"))
    assert all(torch.equal(a.b, b.b) for a, b in zip(layers, read.layers, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_published_file_is_read(tmp_path, dtype):
    layers = random_gate(model("llama")).layers
    for layer in layers:
        for part in (layer.q_proj, layer.k_proj):
            part.to(dtype)
        layer.b.data = layer.b.to(dtype)
    path = publish(tmp_path / "q2_dim16_sink16.pt", layers)
    read = gate.load(path)
    for a, b in zip(layers, read.layers, strict=True):
        assert torch.equal(a.q_proj.weight.float(), b.q_proj.weight) and torch.equal(a.k_base, b.k_base)
        assert b.b.dtype == torch.float32
    assert gate.gate_for(model("llama"), path, 2) is read


@pytest.mark.parametrize("name", ["g.pt", "g.PT", "g.pth", "g.bin", "g.safetensors", "g"])
def test_the_content_decides_what_a_file_is(tmp_path, name):
    made = random_gate(model("llama"), tokens="123")
    assert gate.load(made.save(tmp_path / name)).metadata["tokens"] == "123"
    for old in (False, True):  # torch's zip files, and the pickles before them
        path = publish(tmp_path / name, made.layers, old=old)
        os.utime(path, ns=(old, old))
        read = gate.load(path)
        assert not read.metadata and torch.equal(read.layers[1].k_base, made.layers[1].k_base)


def test_loading_draws_no_random_numbers(tmp_path):
    path = publish(tmp_path / "g.pt", random_gate(model("llama")).layers)
    before = torch.get_rng_state()
    gate.load(path)
    assert torch.equal(torch.get_rng_state(), before)


class Evil:
    """Would write a file when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["pt", "bin", "safetensors"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, kind):
    layers = random_gate(model("llama")).layers
    path = publish(tmp_path / f"evil.{kind}", layers, extra=Evil(tmp_path / "ran"))
    with pytest.raises(ValueError, match=r"refused, nothing in it was run: it asks for \S*mkdir"):
        gate.load(path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        plain = tmp_path / f"plain{protocol}.{kind}"
        plain.write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol))
        with pytest.raises(ValueError, match=r"refused|is not a gate"):
            gate.load(plain)
    assert not (tmp_path / "ran").exists()
    with open(path, "rb") as file:
        torch.load(file, weights_only=False)  # the trap is a real one
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a gate|refused"),
        (b"PK nonsense", "is not a gate|refused"),
        (b"Once upon a time", "neither safetensors nor a pickle of weights"),
        (b"12345678{ and so on", "is not a safetensors file"),
        ({"modules": []}, "no list 'module'"),
        ({"module": [{"q_proj.weight": 3}]}, "no list 'module'"),
        ({"module": [{"q_proj.weight": numpy.ones(3)}]}, "no list 'module'"),
        ({"module": []}, "holds no layer"),
        ({"module": [{"q_proj.weight": torch.ones(64, 32)}]}, "does not hold a gate's parameters: no 'q_norm.weight'"),
        ([1, 2], "no list 'module'"),
    ],
)
def test_files_that_are_no_gates(tmp_path, content, words):
    path = tmp_path / "g.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ValueError, match=words):
        gate.load(path)


def test_damaged_parameters(tmp_path):
    layers = random_gate(model("llama")).layers
    layers[1].b[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        gate.load(publish(tmp_path / "nan.pt", layers))
    state = dict(layers[0].state_dict())
    state["extra"] = torch.ones(1)
    torch.save({"module": [state]}, tmp_path / "extra.pt")
    with pytest.raises(ValueError, match=r"does not hold a gate's parameters: .*extra"):
        gate.load(tmp_path / "extra.pt")
    path = artefacts.write(tmp_path / "other.safetensors", {"0.b": torch.ones(1)}, {"kind": "calibration"})
    with pytest.raises(ValueError, match="is not a gate: its metadata says 'calibration'"):
        gate.load(path)
    with pytest.raises(FileNotFoundError, match="there is no gate"):
        gate.load(tmp_path / "none.pt")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"1.": "foo"}, "its tensor 'foo' is not named <layer>.<parameter>"),
        ({"1.": "x.1."}, "its tensor 'x.1.* is not named <layer>.<parameter>"),
        ({"1.": "01."}, "its tensor '01.* is not named <layer>.<parameter>"),
        ({"1.": "-1."}, "its tensor '-1.* is not named <layer>.<parameter>"),
        ({"1.": "2."}, "is not whole: it holds parameters of layer 2, but none of layer 1"),
        ({"0.": "3."}, "is not whole: it holds parameters of layer 1, but none of layer 0"),
    ],
)
def test_names_that_are_no_layers(tmp_path, names, words):
    tensors, metadata = artefacts.read(random_gate(model("llama")).save(tmp_path / "g.safetensors"))
    ((old, new),) = names.items()
    renamed = {}
    for name, tensor in tensors.items():
        renamed[(new if new == "foo" else new + name[2:]) if name.startswith(old) else name] = tensor
    path = artefacts.write(tmp_path / "renamed.safetensors", renamed, metadata)
    with pytest.raises(ValueError, match=rf"the gate '\S*renamed.safetensors' .*{words}"):
        gate.load(path)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((48, 2, 2), r"hidden size 48 \(layer 0: 32\)"),
        ((32, 1, 2), r"KV heads 1 \(layer 0: 2\)"),
        ((32, 2, 4), r"query heads per KV head 4 \(layer 0: 2\)"),
    ],
)
def test_layers_of_different_shapes(tmp_path, second, words):
    layers = (random_layer(0, 32, 2, 2), random_layer(1, *second))
    with pytest.raises(ValueError, match=f"the gate is of no model: its layer 1 has {words}"):
        gate.Gate(layers)
    path = publish(tmp_path / "g.pt", layers)
    with pytest.raises(ValueError, match=rf"the gate '\S*g.pt' is of no model: its layer 1 has {words}"):
        RetentionCache.for_model(model("llama"), f"fastkvzip(gate={path!r})", budget=8)


# Which gate belongs to a model


def test_no_gate_is_one_clear_error():
    with pytest.raises(ValueError, match=r"needs a gate for this model \(llama\).*kvretain train-gate --model"):
        RetentionCache.for_model(model("llama"), "fastkvzip", budget=8)


def test_a_gate_of_another_model_is_refused_with_what_differs(tmp_path):
    net = model("llama")
    layers = tuple(random_layer(i, 48, 1, 4) for i in range(3))
    path = publish(tmp_path / "g.pt", layers)
    words = r"full-attention layers 3 \(the model: 2\), hidden size 48 \(the model: 32\), KV heads 1 \(the model: 2\)"
    with pytest.raises(ValueError, match=words + r", query heads per KV head 4 \(the model: 2\)"):
        RetentionCache.for_model(net, f"fastkvzip(gate={path!r})", budget=8)
    path = str(random_gate(model("qwen2")).save(tmp_path / "q.safetensors"))
    with pytest.raises(ValueError, match=r"trained on other weights \(fingerprint \w{16}, this model's is \w{16}\)"):
        RetentionCache.for_model(net, f"fastkvzip(gate={path!r})", budget=8)
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_the_user_s_own_gate_is_found_first(tmp_path, monkeypatch):
    net = model("llama")
    own = random_gate(net).save(artefacts.own_path("gate", net))
    monkeypatch.setattr(net.config, "_name_or_path", "Qwen/Qwen3-8B")
    assert gate.gate_for(net, "", 2) is gate.load(own)


def test_a_published_gate_is_fetched_by_the_model_s_name(tmp_path, monkeypatch):
    """With a stand-in for the hub's client."""
    net = model("llama")
    path, asked = publish(tmp_path / "g.pt", random_gate(net).layers), []

    def hf_hub_download(repository, file):
        asked.append((repository, file))
        if len(asked) > 1:
            raise OSError("no network\nlong story")
        return path

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=hf_hub_download))
    monkeypatch.setattr(net.config, "_name_or_path", "Qwen/Qwen3-8B")
    assert gate.gate_for(net, "", 2) is gate.load(path)
    assert asked == [("Jang-Hyun/Fast-KVzip", "qwen3-8b/q2_dim16_sink16.pt")]
    with pytest.raises(
        RuntimeError, match=r"cannot fetch the published gate of Qwen/Qwen3-8B .*: no network; .*train-gate"
    ):
        gate.gate_for(net, "", 2)
    monkeypatch.setattr(net.config, "_name_or_path", "someone/Qwen3-8B")
    with pytest.raises(ValueError, match="finds none"):
        gate.gate_for(net, "", 2)
