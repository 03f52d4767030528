"""``RetentionCache.compress``: an eviction between passes is the eviction at the end of the pass, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

from kvretain import RetentionCache

from .models import forward, left_padded, model, tokens

POLICIES = (
    "random", "streaming", "knorm", "keydiff", "tova", "snapkv", "h2o", "snapkv+hub", "knorm+smd",
    "snapkv@layer", "keydiff+hub@layer", "keydiff@model", "snapkv(window=4)+hub@model",
)  # fmt: skip


def same(left: RetentionCache, right: RetentionCache) -> None:
    for a, b in zip(left._retained, right._retained, strict=True):
        for name in ("positions", "keys", "values"):
            assert torch.equal(getattr(a, name), getattr(b, name)), f"layer {a.index}: other {name}"
        assert (a._attention is None) == (b._attention is None)
        assert a._attention is None or torch.equal(a._attention[..., : a.kept], b._attention[..., : b.kept])
        assert a.nbytes == b.nbytes


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("rows", ["single", "left-padded"])
@pytest.mark.parametrize("limit", [{"ratio": 0.6}, {"budget": 12}, {"budget": 12, "sinks": 2, "recent": 3}], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_bitwise_the_eviction_of_the_pass(policy, limit, rows, name) -> None:
    net = model(name)
    ids, mask = (tokens(0, 1, 40), None) if rows == "single" else left_padded([tokens(0, 40), tokens(1, 29)])
    inpass = RetentionCache.for_model(net, policy, **limit)
    recorded = RetentionCache.for_model(net, policy, ratio=0)
    forward(net, ids, inpass, mask=mask)
    forward(net, ids, recorded, mask=mask)
    before = [layer.kept for layer in recorded._retained]
    short = copy.deepcopy(recorded)
    short.compress(policy, **limit)
    short.check_integrity()
    same(short, inpass)
    assert [layer.kept for layer in recorded._retained] == before == [40] * len(before)
    recorded.check_integrity()
    assert short.get_seq_length() == inpass.get_seq_length() == 40
    # The next token sees the same.
    token = tokens(2, len(ids), 1)
    wider = None if mask is None else torch.cat([mask, torch.ones_like(token)], -1)
    assert torch.equal(forward(net, token, short, mask=wider), forward(net, token, inpass, mask=wider))
    short.check_integrity()


@pytest.mark.parametrize("policy", ["random", "keydiff+hub", "knorm@model"])
def test_a_full_cache_serves_every_policy_without_needs(llama, policy) -> None:
    recorded = RetentionCache.for_model(llama, "full")
    inpass = RetentionCache.for_model(llama, policy, ratio=0.7)
    for cache in (recorded, inpass):
        forward(llama, tokens(0, 1, 40), cache)
    recorded.compress(policy, ratio=0.7)
    same(recorded, inpass)
    # From here on the cache is full again: it evicts nothing.
    forward(llama, tokens(1, 1, 10), recorded)
    assert recorded.layers[0].kept == inpass.layers[0].kept + 10
    recorded.check_integrity()


def test_a_wider_window_of_queries_serves_a_narrower_one(llama) -> None:
    recorded = RetentionCache.for_model(llama, "snapkv(window=16)", ratio=0)
    inpass = RetentionCache.for_model(llama, "snapkv+hub", ratio=0.7)
    for cache in (recorded, inpass):
        forward(llama, tokens(0, 1, 40), cache)
    recorded.compress("snapkv+hub", ratio=0.7)
    for a, b in zip(recorded._retained, inpass._retained, strict=True):
        assert torch.equal(a.positions, b.positions) and torch.equal(a.keys, b.keys)


def test_compressing_again_and_while_decoding(llama) -> None:
    cache = RetentionCache.for_model(llama, "knorm", budget=20, every=8)
    forward(llama, tokens(0, 1, 40), cache)
    for step in range(5):
        forward(llama, tokens(step, 1, 1), cache)
    cache.compress("streaming", budget=18)
    cache.check_integrity()
    cache.compress("knorm", budget=9)
    cache.check_integrity()
    assert cache.layers[0].kept == 9
    for step in range(30):
        forward(llama, tokens(step, 1, 1), cache)
        cache.check_integrity()
    assert cache.trace.peak_length <= 27


@pytest.mark.parametrize(
    ("own", "first", "then", "where"),
    [
        ("knorm", "knorm", "knorm@layer", "all heads, but layer 0"),
        ("knorm", "knorm@layer", "knorm@model", "all heads and layers, but layer 1"),
        ("knorm", "knorm@layer", "knorm@aligned", "all layers, but layer 1"),
        ("knorm@model-heads", "knorm@model-heads", "knorm/diverse@model", "all heads and layers, but layer 0"),
    ],
)
def test_one_set_for_different_entries_is_refused(llama, own, first, then, where) -> None:
    cache = RetentionCache.for_model(llama, own, ratio=0)
    forward(llama, tokens(0, 1, 40), cache)
    twin = copy.deepcopy(cache)
    twin.compress(then, budget=20)  # nothing has gone: all hold the same
    cache.compress(first, budget=20)
    before = [layer.positions for layer in cache.layers]
    with pytest.raises(ValueError, match=f"one set for {where} holds other entries"):
        cache.compress(then, budget=10)
    assert all(torch.equal(a, layer.positions) for a, layer in zip(before, cache.layers, strict=True))
    cache.check_integrity()
    cache.compress(first, budget=10)


def test_the_trace_has_a_step_of_no_tokens(llama) -> None:
    cache = RetentionCache.for_model(llama, "full")
    forward(llama, tokens(0, 1, 40), cache)
    cache.compress("knorm", ratio=0)  # nothing to evict: no step
    cache.compress("knorm", budget=10)
    forward(llama, tokens(1, 1, 2), cache)
    steps = [(s.tokens, s.seen, s.kept[0], s.evicted[0]) for s in cache.trace]
    assert steps == [(40, 40, 40, 0), (0, 40, 10, 30), (2, 42, 12, 0)]
    assert cache.trace.evictions == 1 and cache.trace.evicted == 30
    assert sum(list(cache.trace)[-1].nbytes) == cache.nbytes


@pytest.mark.parametrize(
    ("own", "policy", "limit", "message"),
    [
        ("full", "snapkv", {"ratio": 0.5}, "needs the queries of earlier passes"),
        ("snapkv", "h2o", {"ratio": 0.5}, "needs the attention of earlier passes"),
        ("snapkv", "snapkv(window=9)", {"ratio": 0.5}, "needs the last 9 queries; .* collects 8"),
        ("full", "knorm", {}, "not neither"),
        ("full", "knorm", {"ratio": 1.0}, "not 1.0"),
        ("full", "nonsense", {"ratio": 0.5}, "unknown scorer"),
        ("full", "knorm", {"budget": 5, "sinks": 4, "recent": 4}, "8 protected entries"),
    ],
)
def test_what_it_refuses_changes_nothing(llama, own, policy, limit, message) -> None:
    cache = RetentionCache.for_model(llama, own, **({} if own == "full" else {"ratio": 0}))
    forward(llama, tokens(0, 1, 40), cache)
    with pytest.raises(ValueError, match=message):
        cache.compress(policy, **limit)
    cache.check_integrity()
    assert cache.layers[0].kept == 40 and len(cache.trace) == 1
    forward(llama, tokens(1, 1, 3), cache)


def test_bad_scores_leave_the_cache_as_it_was_or_unfinished(llama) -> None:
    recorded = RetentionCache.for_model(llama, "full")
    forward(llama, tokens(0, 1, 40), recorded)
    for policy, layer in (("knorm", 0), ("knorm@model", 1)):
        cache = copy.deepcopy(recorded)
        cache.layers[layer].keys[..., 5, 0] = torch.nan
        with pytest.raises(ValueError, match=f"layer {layer}"):
            cache.compress(policy, ratio=0.5)
        assert [layer.kept for layer in cache.layers] == [40, 40]
        cache.check_integrity()
    cache = copy.deepcopy(recorded)
    cache.layers[1].keys[..., 5, 0] = torch.nan
    with pytest.raises(ValueError, match="layer 1"):
        cache.compress("knorm", ratio=0.5)
    with pytest.raises(ValueError, match=r"did not finish.*call reset\(\)"):
        forward(llama, tokens(1, 1, 3), cache)


def test_it_keeps_to_the_own_budget(llama) -> None:
    cache = RetentionCache.for_model(llama, "knorm", budget=8, every=16)
    for step in range(20):
        forward(llama, tokens(step, 1, 1), cache)
    with pytest.raises(ValueError, match="cannot compress to 12 entries: the cache's budget is 8"):
        cache.compress("knorm", budget=12)
    cache.check_integrity()


def test_an_empty_cache_stays_empty(llama) -> None:
    cache = RetentionCache.for_model(llama, "full")
    cache.compress("knorm", budget=4)
    assert len(cache.trace) == 0 and cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "own,other,fits",
    [
        ("keydiff@model", "keydiff", False),
        ("keydiff@model", "keydiff@layer", False),
        ("keydiff@model", "keydiff@aligned", False),
        ("keydiff@model", "random@model", True),
        ("keydiff@layer", "keydiff", False),
        ("keydiff@layer", "keydiff@aligned", False),
        ("keydiff@layer", "keydiff@model", True),
        ("keydiff@aligned", "keydiff@layer", False),
        ("keydiff@aligned", "keydiff@model", True),
        ("keydiff", "keydiff@layer", True),
    ],
)
def test_entries_that_are_chosen_together_later_stay_together(llama, own, other, fits) -> None:
    cache = RetentionCache.for_model(llama, own, budget=30)
    forward(llama, tokens(0, 1, 24), cache)
    if not fits:
        with pytest.raises(ValueError, match="choose one set for all of them"):
            cache.compress(other, budget=12)
        assert cache._retained[0].kept == 24
        return
    cache.compress(other, budget=12)
    forward(llama, tokens(1, 1, 40), cache)  # evicts by the cache's own policy
    cache.check_integrity()
    sets = [layer.positions[0] for layer in cache._retained]
    if cache.policy.scope == "model":
        assert all(torch.equal(row, sets[0][0]) for layer in sets for row in layer)


def test_a_recording_that_evicts_nothing_takes_any_scope(llama) -> None:
    cache = RetentionCache.for_model(llama, "keydiff@model", ratio=0)
    forward(llama, tokens(0, 1, 24), cache)
    cache.compress("keydiff", budget=12)
    assert cache._retained[0].kept == 12
