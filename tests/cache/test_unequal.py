"""Heads and layers that keep different numbers of entries: the oracle, the budget, and memory that really shrinks."""

from __future__ import annotations

import copy

import pytest
import torch

from kvretain import Policy, RetentionCache

from .models import MODELS, forward, model, tokens
from .oracle import Oracle, compare, held, play
from .test_oracle import SCRIPTS, agrees, agrees_in_beams, tolerance

SHARED = (
    "snapkv@shared(floor=0.2)",
    "knorm@shared",
    "snapkv+hub@shared",
    "random@model-heads",
    "snapkv+hub@model-heads(floor=0.2)",
)
PYRAMID = (
    "knorm@head(layers='pyramid', beta=4)",
    "keydiff@layer(layers='pyramid')",
    "snapkv+hub@shared(layers='pyramid')",
)
CELLS = [
    *((policy, "llama", situation, None) for policy in SHARED + PYRAMID for situation in SCRIPTS),
    *(
        (policy, name, situation, attention)
        for policy in (SHARED[2], SHARED[4], PYRAMID[0])
        for name in MODELS
        for attention in MODELS[name][3]
        for situation in ("single", "turns left-padded")
        if (name, attention) != ("llama", "sdpa")
    ),
]


@pytest.mark.parametrize(("policy", "name", "situation", "attention"), CELLS)
def test_cell(policy, name, situation, attention):
    _, steps = agrees(policy, name, situation, attention)
    options, _ = SCRIPTS[situation]
    counts = [{layer: (p >= 0).sum(-1) for layer, p in step.after.items()} for step in steps if step.evicts]
    if "head" not in policy.partition("@")[2].partition("(")[0] and policy not in PYRAMID:
        assert any(len(set(c.flatten().tolist())) > 1 for step in counts for c in step.values()), "no head differs"
    if "budget" in options:
        for step in counts:
            kept = torch.stack([c.float() for c in step.values()])  # (layers, rows, heads)
            assert bool((kept.mean((0, 2)) <= options["budget"] + 1e-5).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", [SHARED[0], PYRAMID[0]])
def test_half_precision(policy, dtype):
    options, script = SCRIPTS["single"]
    net = model("llama", dtype=dtype)
    steps = play(net, RetentionCache.for_model(net, policy, **options), script)
    assert compare(Oracle("llama", dtype), steps, atol=tolerance(dtype)).evictions >= 2


@pytest.mark.parametrize("policy", [SHARED[0], SHARED[3], PYRAMID[0]])
def test_beams(policy):
    agrees_in_beams(policy)


@pytest.mark.parametrize("policy", SHARED + PYRAMID)
def test_memory_is_what_is_kept(policy):
    net = model("llama")
    cache = RetentionCache.for_model(net, policy, ratio=0.8, every=8)
    forward(net, tokens(0, 2, 100), cache)
    entry = 2 * cache.layers[0].keys.shape[-1] * 4
    real = sum(int((layer.positions >= 0).sum()) for layer in cache.layers)
    assert real * entry <= cache.nbytes <= 1.15 * real * entry
    assert real <= 20 * 2 * 2 * len(cache.layers)
    slack = 8 * 2 * 2 * len(cache.layers) * entry
    for _ in range(20):
        forward(net, tokens(1, 2, 1), cache)
        real = sum(int((layer.positions >= 0).sum()) for layer in cache.layers)
        assert cache.nbytes <= 1.15 * real * entry + slack
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for layer in cache.layers
            for t in (layer._keys, layer._values, *layer._flat)
        }
        assert cache.nbytes == sum(storages.values())


def test_every_head_is_sure_of_the_floor():
    net = model("llama")
    for floor, least in ((0.5, 10), (1.0, 20)):
        cache = RetentionCache.for_model(net, f"knorm@shared(floor={floor})", budget=20, sinks=0)
        forward(net, tokens(0, 1, 100), cache)
        assert min(int((layer.positions >= 0).sum(-1).min()) for layer in cache.layers) >= least


def test_a_pyramid_falls_and_keeps_its_mean():
    net = model("llama")
    cache = RetentionCache.for_model(net, "knorm@head(layers='pyramid', beta=4)", budget=20)
    forward(net, tokens(0, 1, 100), cache)
    kept = [layer.kept for layer in cache.layers]
    assert kept[0] > kept[-1] and sum(kept) == 20 * len(kept)
    assert kept[-1] == 5


def test_nothing_evicted_is_bitwise_the_base_attention():
    net = model("llama")
    ids = tokens(3, 2, 20)
    plain = RetentionCache.for_model(net, "full")
    shared = RetentionCache.for_model(net, "knorm@shared", budget=100)
    for chunk in (ids, ids[:, :1], ids[:, 1:2]):
        assert torch.equal(forward(net, chunk, plain), forward(net, chunk, shared))


def test_copies_rows_and_reset():
    net = model("llama")
    cache = RetentionCache.for_model(net, "knorm@shared", budget=10, every=4)
    ids = tokens(5, 3, 30)
    forward(net, ids, cache)
    twin = copy.deepcopy(cache)
    following = tokens(6, 3, 1)
    expected = forward(net, following, cache)
    assert torch.equal(forward(net, following, twin), expected)
    rows = torch.tensor([2, 0])
    twin.batch_select_indices(rows)
    for ours, theirs in zip(held(cache).values(), held(twin).values(), strict=True):
        for a, b in zip(ours[rows].flatten(0, 1), theirs.flatten(0, 1), strict=True):
            assert torch.equal(a[a >= 0], b[b >= 0])
    twin.check_integrity()
    twin.batch_repeat_interleave(2)
    assert torch.equal(held(twin)[0][0], held(twin)[0][1])
    forward(net, following[[2, 2, 0, 0]], twin)
    twin.check_integrity()
    before = held(cache)
    cache.crop(-1)
    assert forward(net, following, cache).allclose(expected, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), held(cache).values(), strict=True))
    cache.reset()
    assert cache.nbytes == 0
    assert torch.equal(forward(net, ids, cache), forward(net, ids, RetentionCache.for_model(net, "full")))


def test_compress_needs_a_cache_that_can_store_it():
    net = model("llama")
    cache = RetentionCache.for_model(net, "full")
    forward(net, tokens(0, 1, 30), cache)
    with pytest.raises(ValueError, match=r"unequal numbers of entries.*ratio=0"):
        cache.compress("knorm@shared", budget=10)
    ready = RetentionCache.for_model(net, "knorm@shared", ratio=0)
    forward(net, tokens(0, 1, 30), ready)
    direct = RetentionCache.for_model(net, "knorm@shared", budget=10)
    forward(net, tokens(0, 1, 30), direct)
    for policy in ("knorm@shared", "knorm"):
        twin = copy.deepcopy(ready)
        twin.compress(policy, budget=10)
        twin.check_integrity()
        if policy == "knorm@shared":
            following = tokens(9, 1, 1)
            assert torch.equal(forward(net, following, twin), forward(net, following, direct))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h2o@shared", "accumulates attention"),
        ("h2o@head(layers='pyramid')", "with a pyramid"),
        ("knorm/greedy@shared", "only the selector 'topk'"),
        ("knorm@shared(floor=2)", "floor is a number from 0 to 1"),
        ("knorm@head(layers='cone')", "unknown layers 'cone'; valid: equal, pyramid"),
        ("knorm@head(layers='pyramid', beta=0)", "beta is a number from 1"),
        ("knorm@head(layers='pyramid', beta=inf)", "beta is a number from 1 up, and finite, not inf"),
        ("knorm@model(floor=0.1)", "takes no 'floor'; valid: combine"),
        ("knorm@shared(combine='mean')", "takes no 'combine'; valid: floor, layers, beta"),
    ],
)
def test_what_does_not_fit_is_refused(text, words):
    with pytest.raises(ValueError, match="(?s)" + words.replace("(", r"\(")):
        Policy.parse(text)


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_other_attention_is_refused_by_name(attention):
    net = copy.deepcopy(model("llama"))
    net.config._attn_implementation = attention  # the setter asks for the package
    with pytest.raises(ValueError, match=f"sdpa and eager attention, not {attention}"):
        RetentionCache.for_model(net, "knorm@shared", budget=10)
