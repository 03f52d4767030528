"""What every scorer owes the cache: finite float32, rows and padding that do not leak, clear errors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from views import pad, random_view, row, strip

from kvretain.scores import H2O, RKV, TOVA, KeyDiff, KNorm, LagKV, Random, SnapKV, Streaming, ValueNorm, rkv, scorers

ALL = [scorers[name]() for name in scorers] + [
    SnapKV(pooling="mean", group="mean"),
    SnapKV(window=2, pooling="none"),
    LagKV(lag=2, cross=True),
]


def test_registry_holds_the_baselines():
    assert {"expected", "fastkvzip", "h2o", "keydiff", "knorm", "random", "snapkv", "streaming", "tova"} <= set(scorers)
    with pytest.raises(ValueError, match=r"unknown scorer 'snap'; valid: .*expected, fastkvzip, h2o, keydiff, .*tova"):
        scorers["snap"]


@pytest.mark.parametrize("scorer", ALL, ids=str)
def test_scorers_are_frozen_flat_and_documented(scorer):
    with pytest.raises(dataclasses.FrozenInstanceError):
        scorer.extra = 1
    plain = int | float | str | bool | None
    for value in dataclasses.asdict(scorer).values():
        assert all(isinstance(part, plain) for part in (value if isinstance(value, tuple) else (value,)))
    assert scorer.paper and ("Source: " in type(scorer).__doc__ or isinstance(scorer, Random))
    assert hash(scorer) == hash(dataclasses.replace(scorer))


@pytest.mark.parametrize("scorer", ALL, ids=str)
@given(seed=st.integers(0, 2**20), before=st.lists(st.booleans(), min_size=12, max_size=12))
@settings(max_examples=15, deadline=None)
def test_rows_and_padding_do_not_leak(scorer, seed, before):
    """A row scores as it does alone, and padding slots inserted anywhere change nothing."""
    view = random_view(seed, seen=(19, 1, 9), kept=12)
    scores = scorer.score(view)
    mask = torch.tensor(before)
    padded = strip(scorer.score(pad(view, mask)), mask)
    assert scores.isfinite().all() and scores.dtype == torch.float32
    torch.testing.assert_close(padded[view.valid], scores[view.valid], rtol=1e-5, atol=1e-6)
    for index in range(len(view.seen)):
        real = view.valid[index]
        torch.testing.assert_close(scorer.score(row(view, index))[0][real], scores[index][real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scorer", ALL, ids=str)
def test_nonnegative_view_keeps_the_order_of_candidates(scorer):
    view = random_view(5)
    scores = scorer.score(view)
    assert bool((scores[view.candidates] < 0).any()) <= scorer.signed
    shifted = scorer.nonnegative(scores, view.candidates)
    assert bool((shifted >= 0).all())
    for head, open_ in zip(shifted.flatten(0, 1), view.candidates.flatten(0, 1), strict=True):
        assert not scorer.signed or head[open_].min() == 0
    before, after = scores[0, 0][view.candidates[0, 0]], shifted[0, 0][view.candidates[0, 0]]
    assert torch.equal(before.argsort(stable=True), after.argsort(stable=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scorer", ALL, ids=str)
def test_half_precision_caches_are_scored_in_float32(scorer, dtype):
    view = random_view(3)
    half = dataclasses.replace(view, keys=view.keys.to(dtype), queries=view.queries.to(dtype))
    full = dataclasses.replace(view, keys=half.keys.float(), queries=half.queries.float())
    torch.testing.assert_close(scorer.score(half), scorer.score(full), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "sinks", "recent", "window", "needs"),
    [
        ("random", 4, 0, 0, set()),
        ("streaming", 4, 0, 0, set()),
        ("knorm", 4, 0, 0, set()),
        ("keydiff", 4, 0, 0, set()),
        ("tova", 0, 0, 1, {"queries"}),
        ("snapkv", 4, 8, 8, {"queries"}),
        ("h2o", 0, 32, 0, {"attention"}),
        ("rkv", 0, 8, 8, {"queries"}),
        ("lagkv", 4, 16, 0, set()),
        ("value-norm", 4, 0, 0, set()),
    ],
)
def test_what_each_scorer_asks_of_the_cache(name, sinks, recent, window, needs):
    scorer = scorers[name]()
    assert (scorer.sinks, scorer.recent(65), scorer.window, set(scorer.needs)) == (sinks, recent, window, needs)


@pytest.mark.parametrize("scorer", [TOVA(), SnapKV(), RKV()], ids=str)
def test_missing_queries_are_an_error(scorer):
    view = dataclasses.replace(random_view(0), queries=None, query_valid=None)
    with pytest.raises(ValueError, match=r"needs the last \d queries, but layer 3's view has queries=None"):
        scorer.score(view)


def test_missing_attention_is_an_error():
    with pytest.raises(
        ValueError, match="'h2o' needs the accumulated attention, but layer 3's view has attention=None"
    ):
        H2O().score(dataclasses.replace(random_view(0), attention=None))


def test_query_valid_is_optional():
    view = random_view(1, seen=(20, 30))
    for scorer in (TOVA(), SnapKV(), RKV()):
        bare = dataclasses.replace(view, query_valid=None)
        assert torch.equal(scorer.score(bare), scorer.score(view))


@pytest.mark.parametrize(
    ("cls", "field", "value", "message"),
    [
        (Random, "seed", -1, "random: seed must be a whole number of at least 0, not -1"),
        (Random, "seed", 1.5, "random: seed .* not 1.5"),
        (Random, "seed", True, "random: seed .* not True"),
        (SnapKV, "window", 0, "snapkv: window must be a whole number of at least 1, not 0"),
        (SnapKV, "window", "8", "snapkv: window .* not '8'"),
        (SnapKV, "kernel", 0, "snapkv: kernel must be a whole number of at least 1, not 0"),
        (SnapKV, "kernel", 4, "snapkv: kernel must be odd, .* not 4"),
        (SnapKV, "pooling", "median", "snapkv: pooling must be one of 'max', 'mean', 'none', not 'median'"),
        (RKV, "window", 0, "rkv: window must be a whole number of at least 1, not 0"),
        (RKV, "kernel", 2, "rkv: kernel must be odd, .* not 2"),
        (RKV, "mix", -0.1, "rkv: mix must be a number from 0 to 1, not -0.1"),
        (RKV, "mix", float("nan"), "rkv: mix must be a number from 0 to 1, not nan"),
        (RKV, "threshold", "0.5", "rkv: threshold must be a number from 0 to 1, not '0.5'"),
        (LagKV, "lag", 1, "lagkv: lag must be a whole number of at least 2, not 1"),
        (LagKV, "cross", 1, "lagkv: cross must be True or False, not 1"),
        (ValueNorm, "order", 2, "value-norm: order must be one of 'l1', 'l2', not 2"),
        (SnapKV, "group", None, "snapkv: group must be one of 'max', 'mean', not None"),
    ],
)
def test_fields_are_validated(cls, field, value, message):
    with pytest.raises(ValueError, match=message):
        cls(**{field: value})


def test_random_priorities_last_and_are_uniform():
    many = dataclasses.replace(
        random_view(0), positions=torch.arange(4000).expand(2, 2, -1), keys=torch.zeros(2, 2, 4000, 1)
    )
    scores = Random().score(many)
    assert bool((scores >= 0).all()) and bool((scores < 1).all())
    assert scores.mean().item() == pytest.approx(0.5, abs=0.02) and scores.var().item() == pytest.approx(
        1 / 12, abs=0.005
    )
    assert torch.equal(scores[0], scores[1])  # whatever the row
    later = dataclasses.replace(many, positions=many.positions[..., 1::3])
    assert torch.equal(Random().score(later), scores[..., 1::3])  # whatever was evicted
    others = [Random(seed=1).score(many)[0, 0], scores[0, 1], Random().score(dataclasses.replace(many, layer=0))[0, 0]]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([scores[0, 0], other]))[0, 1]) < 0.06


def test_random_retention_is_a_uniform_sample_of_all_tokens():
    """Evicting step by step keeps exactly the tokens that one eviction at the end would keep."""
    view = random_view(0)
    kept: list[int] = []
    for start in range(0, 96, 8):
        entries = torch.tensor(kept + list(range(start, start + 8)))
        scores = Random().score(dataclasses.replace(view, positions=entries.expand(1, 1, -1)))[0, 0]
        kept = sorted(entries[scores.topk(min(10, len(entries))).indices].tolist())
    final = Random().score(dataclasses.replace(view, positions=torch.arange(96).expand(1, 1, -1)))[0, 0]
    assert kept == sorted(final.topk(10).indices.tolist())


def test_streaming_and_knorm_and_keydiff_read_no_queries():
    bare = dataclasses.replace(random_view(2), queries=None, query_valid=None, attention=None)
    for scorer in (Random(), Streaming(), KNorm(), KeyDiff(), LagKV(), ValueNorm()):
        assert not scorer.needs and scorer.score(bare).isfinite().all()


def test_keydiff_survives_zero_keys_and_rows_of_padding():
    view = random_view(0)
    zero = dataclasses.replace(view, keys=torch.zeros_like(view.keys))
    assert torch.equal(KeyDiff().score(zero), torch.zeros_like(view.attention))
    empty = dataclasses.replace(view, positions=torch.full_like(view.positions, -1), seen=torch.zeros_like(view.seen))
    for scorer in ALL:
        assert scorer.score(empty).isfinite().all()


def test_sinks_lend_nothing_to_their_neighbours():
    """A protected sink with all the attention does not raise the entries beside it."""
    view = random_view(0, seen=(20,), heads=1, group=1, kept=20)
    keys = torch.zeros(1, 1, 20, 6)
    keys[0, 0, 0] = 100.0
    queries = torch.ones(1, 1, 8, 6)
    scores = SnapKV().score(dataclasses.replace(view, keys=keys, queries=queries))[0, 0]
    assert scores[0] == pytest.approx(1.0) and bool((scores[4:12] < 1e-6).all()) and bool((scores[12:] == 1).all())


def test_rkv_in_blocks_is_rkv_at_once(monkeypatch):
    view = random_view(4, seen=(40, 20, 5), kept=30)
    whole = RKV().score(view)
    monkeypatch.setattr(rkv, "_BLOCK", 100)  # 3 of 30 rows at a time
    torch.testing.assert_close(RKV().score(view), whole, rtol=1e-6, atol=1e-7)


def test_rkv_holds_duplicates_against_all_but_the_newest():
    """Ten distinct keys and four copies of one: only the last copy is as free of redundancy as the distinct ones."""
    view = random_view(0, seen=(14,), heads=1, group=1, kept=14)
    keys = torch.eye(14)
    copies = [2, 5, 9, 12]
    keys[copies] = torch.eye(14)[2]
    redundancy = RKV().redundancy(dataclasses.replace(view, keys=keys[None, None]))[0, 0]
    assert redundancy.sum().item() == pytest.approx(1)
    distinct = [slot for slot in range(14) if slot not in copies]
    assert redundancy[distinct].max() == redundancy[distinct].min()
    # Rows 2, 5 and 9 spare slot 12, row 12 spares slot 9: 2 and 5 are named by three others, 9 by two, 12 by none.
    means = torch.zeros(14)
    means[[2, 5, 9]] = torch.tensor([3.0, 3.0, 2.0]) / 14
    torch.testing.assert_close(redundancy, means.softmax(-1))


def test_lagkv_cuts_each_row_by_its_own_budget():
    """Under a ratio the rows of a padded batch keep different numbers, and each is scored as it is alone."""
    view = random_view(6, seen=(40, 20, 30), kept=20)
    unequal = dataclasses.replace(view, budgets=(20, 8, 12))
    scores = LagKV().score(unequal)
    for index, budget in enumerate(unequal.budgets):
        alone = LagKV().score(dataclasses.replace(row(view, index), budget=budget))
        torch.testing.assert_close(scores[index], alone[0])
    assert not torch.equal(scores, LagKV().score(view))


def test_lagkv_keeps_the_same_share_of_every_partition_and_the_tail():
    rng = torch.Generator().manual_seed(0)
    view = random_view(0, seen=(45,), heads=1, group=1, kept=45)
    states = torch.randn(1, 1, 45, 6, generator=rng)
    protected = (torch.arange(45) < 4).expand(1, 1, -1)
    view = dataclasses.replace(view, keys=states, values=states, protected=protected, budget=40)
    scores = LagKV().score(view)[0, 0]  # 4 sinks, 4 partitions of 10, a remainder of 1
    assert bool((scores[:4] == 0).all()) and bool((scores[34:] == 1).all())
    for part in scores[4:34].split(10):
        assert part.sort().values.tolist() == pytest.approx([rank / 10 for rank in range(10)])
