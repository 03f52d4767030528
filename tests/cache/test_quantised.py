"""Entries in 8 bits: a plain cache whose entries are rounded by hand says the same, and memory is what it should be."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvretain import CompiledDecoding, RetentionCache
from kvretain.cache.quantised import STORAGES, quantise, restored

from .models import distinct, forward, left_padded, model, tokens

POLICIES = ["knorm", "snapkv+hub", "keydiff@model", "knorm/diverse@model", "h2o", "tova", "kvzip@head", "knorm~nearest"]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), storage=st.sampled_from(sorted(STORAGES)), size=st.floats(1e-6, 1e4))
def test_errors_are_bounded_and_do_not_add_up(seed, storage, size):
    states = size * torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(seed))
    stored, scales = quantise(states, storage)
    once = restored(stored, scales, torch.float32)
    most = states.abs().amax(-1, keepdim=True)
    if storage == "int8":
        assert ((once - states).abs() <= most / 254 * 1.001).all()
    else:
        assert ((once - states).abs() <= states.abs() / 16 * 1.001 + most * 2**-17).all()
    again = restored(*quantise(once, storage), torch.float32)
    torch.testing.assert_close(again, once, atol=0, rtol=1e-6)


def test_zeros_stay_zeros():
    for storage in STORAGES:
        assert not restored(*quantise(torch.zeros(2, 3, 4), storage), torch.float32).any()


def rounded(layer, start: int, storage: str) -> None:
    """Rounds a plain layer's entries from ``start`` on."""
    for name in ("keys", "values"):
        states = getattr(layer, name).clone()
        states[:, :, start:] = restored(*quantise(states[:, :, start:], storage), states.dtype)
        setattr(layer, name, states)


@pytest.mark.parametrize("storage", sorted(STORAGES))
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plain_cache_rounded_by_hand_gives_the_same_logits(policy, name, padded, storage):
    if policy == "knorm~nearest" and padded:
        pytest.skip("averages are quantised anew, which the plain cache does not follow")
    net = model(name)
    ids, mask = left_padded([distinct(1, 23), distinct(2, 17)]) if padded else (distinct(1, 23)[None], None)
    rows = len(ids)
    mask = torch.ones_like(ids) if mask is None else mask
    cache = RetentionCache.for_model(net, policy, budget=9, every=4, sinks=1, recent=1, storage=storage)
    plain = DynamicCache(config=net.config)
    place = (mask.cumsum(-1) - 1).masked_fill(mask == 0, -1)
    positions, evictions, new, slots = [place[:, None].repeat(1, 2, 1) for _ in range(2)], 0, ids, mask
    for step in range(13):
        before = cache.trace.evictions
        got = forward(net, new, cache, mask=mask if padded else None)
        wanted = forward(net, new, plain, mask=slots, positions=place[:, -new.shape[1] :].clamp_min(0))
        torch.testing.assert_close(got[:, -1], wanted[:, -1], atol=2e-4, rtol=1e-4)
        for layer in plain.layers:
            rounded(layer, layer.keys.shape[2] - new.shape[1], storage)
        if cache.trace.evictions > before:
            evictions += 1
            for at, (layer, own) in enumerate(zip(plain.layers, cache.layers, strict=True)):
                same = (positions[at][:, :, None] == own.positions[..., None]) & (own.positions >= 0)[..., None]
                index = same.to(torch.int8).argmax(-1)
                for state in ("keys", "values"):
                    wide = index[..., None].expand(-1, -1, -1, getattr(layer, state).shape[-1])
                    setattr(layer, state, getattr(layer, state).gather(2, wide))
                if policy == "knorm~nearest":
                    layer.values = own.values
                real = own.positions >= 0
                torch.testing.assert_close(own.keys[real], layer.keys[real], atol=1e-4, rtol=1e-4)
                positions[at] = own.positions
            slots = (positions[0][:, 0] >= 0).to(mask.dtype)
        new = tokens(50 + step, rows, 1)
        mask, slots = (torch.cat([m, torch.ones(rows, 1, dtype=m.dtype)], 1) for m in (mask, slots))
        place = torch.cat([place, place[:, -1:] + 1], 1)
        positions = [torch.cat([p, place[:, None, -1:].expand(-1, 2, -1)], 2) for p in positions]
    assert evictions >= 3
    cache.check_integrity()


@pytest.mark.parametrize("storage", sorted(STORAGES))
def test_bytes_are_those_of_8_bits_and_a_scale(storage):
    net = model("llama")
    cache = RetentionCache.for_model(net, "snapkv", budget=12, every=4, storage=storage)
    forward(net, tokens(1, 2, 30), cache)
    _, heads, _, width = cache.layers[0].keys.shape
    entry = 2 * 2 * heads * (width + 4)  # keys and values of two rows, a float32 scale each
    assert cache.nbytes == len(cache.layers) * 12 * entry
    for step in range(6):
        forward(net, tokens(step, 2, 1), cache)
    assert cache.nbytes == len(cache.layers) * 16 * entry and cache.trace.peak_nbytes == cache.nbytes


def test_what_generate_does_works():
    """Beams reorder rows, and a copy goes on alone."""
    net = model("llama")
    cache = RetentionCache.for_model(net, "snapkv+hub", budget=12, every=4, storage="int8")
    out = net.generate(tokens(1, 2, 20), past_key_values=cache, max_new_tokens=20, num_beams=3, do_sample=False)
    assert out.shape[1] == 40 and cache.trace.evictions >= 3
    other = copy.deepcopy(cache)
    new = tokens(9, 6, 1)
    assert torch.equal(forward(net, new, cache), forward(net, new, other))
    full = RetentionCache.for_model(net, "full", storage="int8")
    forward(net, tokens(1, 2, 20), full)
    assert full.layers[0].keys.shape[2] == 20


def test_what_it_cannot_do_is_refused():
    net = model("llama")
    with pytest.raises(ValueError, match="unknown storage 'int4'; valid: int8, fp8, or None"):
        RetentionCache.for_model(net, "snapkv", budget=8, storage="int4")
    with pytest.raises(ValueError, match="unequal numbers of entries, which storage='int8' cannot hold"):
        RetentionCache.for_model(net, "snapkv@shared", budget=8, storage="int8")
    cache = RetentionCache.for_model(net, "knorm", budget=8, storage="int8")
    forward(net, tokens(1, 1, 20), cache)
    with pytest.raises(ValueError, match="QuantisedLayer, whose storage is not plain keys"):
        CompiledDecoding(net, cache)
