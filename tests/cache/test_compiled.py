"""Decoding with a compiled model: the same tokens and entries as without, one graph whatever the length."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from kvretain import CompiledDecoding, RetentionCache, artefacts
from kvretain.calibrate import calibrate

from .models import build

POLICIES = ("keydiff", "knorm@layer", "keydiff/diverse@model", "streaming")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def both(model, policy, tokens, **budget):
    """Two caches that have read ``tokens``, and the next token of each row."""
    caches = [RetentionCache.for_model(model, policy, **budget) for _ in range(2)]
    with torch.no_grad():
        logits = [model(tokens, past_key_values=cache).logits[:, -1:] for cache in caches]
    assert torch.equal(*logits)
    return *caches, logits[0].argmax(-1)


@torch.no_grad()
def decode(model, plain, step, token, count):
    """Feeds both the same tokens; returns the largest difference of logits."""
    worst = 0.0
    for _ in range(count):
        expected = model(token, past_key_values=plain).logits
        worst = max(worst, (step(token) - expected).abs().max().item())
        token = expected.argmax(-1)
    return worst


def same(plain, fixed):
    fixed.check_integrity()
    assert fixed.trace.evictions == plain.trace.evictions
    assert list(fixed.trace) == list(plain.trace)
    for ours, theirs in zip(fixed.layers, plain.layers, strict=True):
        assert torch.equal(ours.positions, theirs.positions)
        assert torch.allclose(ours.keys, theirs.keys, atol=1e-5)
        assert torch.allclose(ours.values, theirs.values, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_equals_the_plain_model_with_one_graph(kind, policy):
    model = build(kind)
    plain, fixed, token = both(model, policy, torch.randint(3, 60, (2, 20)), budget=12, every=4)
    step = CompiledDecoding(model, fixed, backend="eager")
    assert decode(model, plain, step, token, 30) < 1e-5
    assert plain.trace.evictions > 5
    same(plain, fixed)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["frames"] == {"total": 1, "ok": 1}


def test_from_a_short_prompt_up_to_the_budget_and_on_the_shapes_never_change():
    model = build("llama")
    plain, fixed, token = both(model, "keydiff", torch.randint(3, 60, (1, 3)), budget=12, every=4)
    step = CompiledDecoding(model, fixed, backend="aot_eager")
    assert decode(model, plain, step, token, 40) < 1e-5
    same(plain, fixed)
    assert counters["stats"]["unique_graphs"] == 1


def test_plain_passes_may_come_between():
    """A second turn through the plain model takes other storage; what stood in it before cannot leak, not even NaN."""
    model = build("llama")
    plain, fixed, token = both(model, "keydiff", torch.randint(3, 60, (1, 20)), budget=12, every=4)
    step = CompiledDecoding(model, fixed, backend="eager")
    assert decode(model, plain, step, token, 5) < 1e-5
    with torch.no_grad():
        for cache in (plain, fixed):
            model(torch.arange(3, 12)[None], past_key_values=cache)
            model(torch.tensor([[7]]), past_key_values=cache)
        for storage in fixed.layers[0].storage:
            storage[:, :, fixed.layers[0].kept :] = torch.nan
    assert decode(model, plain, step, token, 10) < 1e-5
    same(plain, fixed)


def test_a_copy_of_the_cache_is_not_touched():
    model = build("llama")
    _, cache, token = both(model, "keydiff", torch.randint(3, 60, (1, 20)), budget=12, every=4)
    step = CompiledDecoding(model, cache, backend="eager")
    step(token)
    kept = copy.deepcopy(cache)
    before = kept.layers[0].keys.clone()
    step(token)
    assert torch.equal(kept.layers[0].keys, before) and kept.layers[0].seen + 1 == cache.layers[0].seen


@pytest.mark.parametrize("policy", ["alpha", "triattention"])
def test_policies_with_a_calibration_are_served(policy, monkeypatch, tmp_path):
    """It was measured beforehand; while decoding nothing is observed."""
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path))
    model = build("llama")
    calibrate(model, torch.randint(3, 60, (40,))).save(artefacts.own_path("calibration", model))
    plain, fixed, token = both(model, policy, torch.randint(3, 60, (2, 20)), budget=12, every=4)
    step = CompiledDecoding(model, fixed, backend="eager")
    assert decode(model, plain, step, token, 30) < 1e-5
    assert plain.trace.evictions > 5
    same(plain, fixed)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize(
    "kind, policy, options, message",
    [
        ("llama", "keydiff", {"ratio": 0.5}, "give RetentionCache.for_model a budget"),
        ("llama", "full", {}, "give RetentionCache.for_model a budget"),
        ("llama", "snapkv", {"budget": 12}, "observes every pass"),
        ("llama", "keydiff@shared(floor=0.2)", {"budget": 12}, "unequal heads"),
        ("gemma3", "keydiff", {"budget": 12}, "DynamicSlidingWindowLayer"),
    ],
)
def test_refusals(kind, policy, options, message):
    model = build(kind)
    cache = RetentionCache.for_model(model, policy, **options)
    with torch.no_grad():
        model(torch.arange(3, 23)[None], past_key_values=cache)
    with pytest.raises(ValueError, match=message):
        CompiledDecoding(model, cache)


def test_empty_padded_foreign_and_ill_shaped():
    model = build("llama")
    cache = RetentionCache.for_model(model, "keydiff", budget=12)
    with pytest.raises(ValueError, match="it is empty"):
        CompiledDecoding(model, cache)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad():
        model(torch.randint(3, 60, (2, 20)), attention_mask=mask, past_key_values=cache)
    with pytest.raises(ValueError, match="padding"):
        CompiledDecoding(model, cache)
    with pytest.raises(ValueError, match="the model that the cache was made for"):
        CompiledDecoding(build("llama"), cache)
    _, other, token = both(model, "keydiff", torch.randint(3, 60, (1, 20)), budget=12)
    with pytest.raises(ValueError, match="one token for each of 1 rows"):
        CompiledDecoding(model, other)(token.expand(2, 1))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    model = build("llama")
    plain, fixed, token = both(model, "keydiff", torch.randint(3, 60, (1, 20)), budget=12, every=4)
    assert decode(model, plain, CompiledDecoding(model, fixed), token, 20) < 1e-4
    same(plain, fixed)
    assert counters["stats"]["unique_graphs"] == 1
