"""Mergers in the cache: a plain cache whose entries are merged by loops says the same at every step."""

from __future__ import annotations

import pytest
import torch
from merging import loops
from transformers import DynamicCache

from kvretain import Policy, RetentionCache, artefacts
from kvretain.calibrate import calibrate

from .models import distinct, forward, left_padded, model, tokens
from .test_oracle import agrees, agrees_in_beams

POLICIES = [
    "knorm~nearest(threshold=0.2)",
    "keydiff~nearest(threshold=-1.0)@layer",
    "knorm/segments(length=4, share=0.5)~segment(length=4)@model",
    "snapkv(window=2)+hub~segment(length=2)@aligned",
]


def merged(layer, cache_layer, positions, merger) -> torch.Tensor:
    """Merges a plain layer's entries at the eviction that ``cache_layer`` has just made; their positions."""
    after = cache_layer.positions
    same = (positions[:, :, None] == after[..., None]) & (after >= 0)[..., None]
    index = torch.where(same.any(-1), same.to(torch.int8).argmax(-1), -1)
    keys, values = (t.new_zeros(*index.shape, t.shape[-1]) for t in (layer.keys, layer.values))
    for at, (key, value) in loops(merger, layer.keys, layer.values, index, positions).items():
        keys[at], values[at] = key.float(), value.float()
    real = index >= 0
    unmerged = layer.values.gather(2, index.clamp_min(0)[..., None].expand_as(values))
    assert bool((values[real] != unmerged[real]).any()), "nothing is merged here"
    torch.testing.assert_close(cache_layer.keys[real], keys[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache_layer.values[real], values[real], atol=1e-5, rtol=1e-5)
    layer.keys, layer.values = keys, values
    return after


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plain_cache_merged_by_loops_gives_the_same_logits(policy, name):
    net, merger = model(name), Policy.parse(policy).merger
    ids, mask = left_padded([distinct(1, 23), distinct(2, 17)])
    cache = RetentionCache.for_model(net, policy, budget=9, every=4, sinks=1, recent=1)
    plain = DynamicCache(config=net.config)
    place = (mask.cumsum(-1) - 1).masked_fill(mask == 0, -1)
    positions = [place[:, None].repeat(1, 2, 1) for _ in range(2)]
    evictions, new, slots = 0, ids, mask
    for step in range(15):
        before = cache.trace.evictions
        got = forward(net, new, cache, mask=mask)
        at = place[:, -new.shape[1] :]
        wanted = forward(net, new, plain, mask=slots, positions=at.clamp_min(0))
        torch.testing.assert_close(got[:, -1], wanted[:, -1], atol=2e-4, rtol=1e-4)
        if cache.trace.evictions > before:
            evictions += 1
            pairs = zip(plain.layers, cache.layers, positions, strict=True)
            positions = [merged(layer, own, known, merger) for layer, own, known in pairs]
            # Padding slots of a row that keeps less lead; under these policies they do in all heads alike.
            slots = (positions[0][:, 0] >= 0).to(mask.dtype)
        new = tokens(50 + step, 2, 1)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        slots = torch.cat([slots, torch.ones(2, 1, dtype=mask.dtype)], 1)
        place = torch.cat([place, place[:, -1:] + 1], 1)
        positions = [torch.cat([p, place[:, None, -1:].expand(-1, 2, -1)], 2) for p in positions]
    assert evictions >= 3


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRETAIN_CACHE", str(tmp_path_factory.mktemp("calibrations")))
        for name in ("llama", "gemma3"):
            calibrate(model(name), tokens(77, 200)).save(artefacts.own_path("calibration", model(name)))
        yield


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["merging", "summary-entries", "routing", "key-diversity", "value-weighting"])
def test_the_mechanisms_hold_what_they_claim(policy, name):
    """At every step no more than the budget and the cadence, and the bytes of that."""
    net = model(name)
    cache = RetentionCache.for_model(net, policy, budget=12, every=4)
    forward(net, distinct(3, 40)[None], cache)
    for step in range(20):
        forward(net, tokens(step, 1, 1), cache)
        cache.check_integrity()
    full = [layer for layer in cache.layers if not layer.is_sliding]
    assert cache.trace.peak_length <= 12 + 4 and cache.trace.evictions >= 4
    for layer in full:
        assert layer.nbytes <= (12 + 4) * 2 * layer.keys[:, :, :1].nbytes


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("situation", ["single", "turns left-padded ratio", "left-padded short row", "chunked prefill"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["routing", "key-diversity", "value-weighting"])
def test_mechanisms_that_only_evict_pass_the_oracle(policy, name, situation):
    _, steps = agrees(policy, name, situation)
    differ = [not torch.equal(held[:, 0], held[:, 1]) for step in steps for held in step.after.values()]
    assert any(differ) == (policy == "routing")


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("policy", ["routing", "key-diversity", "value-weighting"])
def test_they_pass_it_in_beams(policy):
    agrees_in_beams(policy)


@pytest.mark.usefixtures("calibrated")
def test_routing_streams_in_some_heads_and_keeps_by_score_in_others():
    net = model("llama")
    kept = {}
    for policy in ("routing", "streaming", "trig"):
        cache = RetentionCache.for_model(net, policy, budget=12, every=4, sinks=2)
        forward(net, distinct(3, 40)[None], cache)
        kept[policy] = [layer.positions[0] for layer in cache.layers]
    for routed, streams, scored in zip(*kept.values(), strict=True):
        alike = [[torch.equal(routed[head], other[head]) for head in range(2)] for other in (streams, scored)]
        assert sorted(alike[0]) == [False, True] and alike[1] == [not same for same in alike[0]]
