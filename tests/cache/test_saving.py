"""A saved cache goes on exactly as the one that was not: logits, positions, evictions and trace."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch

from kvretain import Policy, RetentionCache, artefacts, scorers
from kvretain.calibrate import calibrate
from kvretain.integrations.kvpress import from_press

from .models import build, distinct, forward, left_padded, model, tokens

POLICIES = [
    "full", "snapkv+hub", "h2o", "keydiff@model", "knorm/diverse@model", "expected", "kvzip@head", "kvzip",
    "snapkv@shared", "tova", "knorm~nearest", "alpha", "random", "snapkv int8", "keydiff@model fp8",
]  # fmt: skip


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRETAIN_CACHE", str(tmp_path_factory.mktemp("calibrations")))
        for name in ("llama", "gemma3"):
            calibrate(model(name), tokens(77, 200)).save(artefacts.own_path("calibration", model(name)))
        yield


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_it_goes_on_bit_for_bit(policy, name, padded, tmp_path):
    net = model(name)
    ids, mask = left_padded([distinct(1, 30), distinct(2, 22)]) if padded else (tokens(1, 2, 30), None)
    policy, _, storage = policy.partition(" ")
    limit = {"storage": storage or None} if policy == "full" else {"budget": 12, "every": 4, "storage": storage or None}
    cache = RetentionCache.for_model(net, policy, **limit)
    kept = cache

    def more(*caches, columns, seed):
        nonlocal mask
        new = tokens(seed, 2, columns)
        mask = None if mask is None else torch.cat([mask, torch.ones_like(new)], 1)
        return [forward(net, new, one, mask=mask) for one in caches]

    forward(net, ids, cache, mask=mask)
    for step in range(6):  # past an eviction, then two tokens into the next stretch
        more(cache, columns=1, seed=step)
    path = cache.save(tmp_path / "cache.safetensors")
    other = RetentionCache.load(path, net)
    assert (other.policy, other.storage) == (cache.policy, cache.storage) and repr(other.trace) == repr(cache.trace)
    for step, columns in enumerate([1, 1, 1, 5, 1, 1, 1, 1, 1, 1]):
        wanted, got = more(kept, other, columns=columns, seed=50 + step)
        assert torch.equal(wanted, got), f"step {step}"
    other.check_integrity()
    for a, b in zip(kept.layers, other.layers, strict=True):
        if not a.is_sliding:
            assert torch.equal(a.positions, b.positions)
    assert [s.kept for s in kept.trace] == [s.kept for s in other.trace]


def test_an_empty_cache_and_an_unfinished_pass(llama, tmp_path):
    cache = RetentionCache.for_model(llama, "snapkv", budget=8)
    other = RetentionCache.load(cache.save(tmp_path / "empty.safetensors"), llama)
    assert torch.equal(forward(llama, tokens(1, 1, 20), cache), forward(llama, tokens(1, 1, 20), other))
    cache._session.plan = object()
    with pytest.raises(ValueError, match="did not finish"):
        cache.save(tmp_path / "never.safetensors")
    assert not (tmp_path / "never.safetensors").exists()


def test_other_weights_other_files_and_damage(llama, tmp_path):
    cache = RetentionCache.for_model(llama, "knorm", budget=8)
    forward(llama, tokens(1, 1, 20), cache)
    path = cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="a model of other weights"):
        RetentionCache.load(path, build("qwen2"))
    with pytest.raises(FileNotFoundError, match="there is no file"):
        RetentionCache.load(tmp_path / "nothing", llama)
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(ValueError, match="not a safetensors file"):
        RetentionCache.load(text, llama)
    tensors, about = artefacts.read(path)
    with pytest.raises(ValueError, match="is not a saved cache"):
        RetentionCache.load(artefacts.write(tmp_path / "other", tensors, {**about, "format": "gate"}), llama)
    for state in (
        about["state"].replace('"kept"', '"keep"'),
        "{}",
        about["state"].replace('"_filled": 8', '"_filled": 9'),
    ):
        with pytest.raises(ValueError, match="is damaged"):
            RetentionCache.load(artefacts.write(tmp_path / "damaged", tensors, {**about, "state": state}), llama)
    del tensors["layers.0.parts.0"]
    with pytest.raises(ValueError, match="is damaged"):
        RetentionCache.load(artefacts.write(tmp_path / "damaged", tensors, about), llama)


class Press:
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


@dataclass(frozen=True)
class Own(scorers["knorm"]):
    """Not registered, unless a test does it."""

    weights: tuple = ()


def test_a_policy_that_cannot_be_read_back_is_refused_before_anything_is_written(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(scorers, "_items", dict(scorers._items))

    def saved(scorer):
        cache = RetentionCache.for_model(llama, Policy(scorer), budget=8)
        forward(llama, tokens(1, 1, 20), cache)
        return cache.save(tmp_path / "cache.safetensors")

    for scorer in (Own(), from_press(Press())):
        with pytest.raises(ValueError, match=rf"{type(scorer).__name__}.* cannot be written .* registered"):
            saved(scorer)
    scorers.register("own")(Own)
    with pytest.raises(ValueError, match=r"cannot be written .* plain values"):
        saved(Own(weights=(1j,)))
    assert not list(tmp_path.iterdir())
    path = saved(Own(weights=(1, 2)))
    assert RetentionCache.load(path, llama).policy == Policy(Own(weights=(1, 2)))


def test_a_model_in_another_dtype_is_refused(llama, tmp_path):
    cache = RetentionCache.for_model(llama, "knorm", budget=8)
    forward(llama, tokens(1, 1, 20), cache)
    path = cache.save(tmp_path / "cache.safetensors")
    half = copy.deepcopy(llama).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"with a model in float32, and this one is in bfloat16.*dtype='float32'"):
        RetentionCache.load(path, half)
