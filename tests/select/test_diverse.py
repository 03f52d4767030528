"""α: signatures against loops, picks against a plain reference, ties above all; what the penalty does and does not."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import math
import os
import statistics
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvretain
from kvretain import Policy, select_diverse, select_topk, selectors, value_signatures
from kvretain.cache.view import CacheView
from kvretain.choose import choose, choose_unequal
from kvretain.select import Diverse, diverse
from kvretain.select.signatures import mean_values

quick = settings(max_examples=60, deadline=None)
score = st.one_of(st.integers(-4, 4).map(lambda n: n / 4), st.floats(-2, 2, width=32, allow_subnormal=False))
part = st.integers(-4, 4).map(lambda n: n / 8)  # exact in every product and sum, and ties are the rule


def reference(
    scores: list[float],
    signatures: list[list[float]],
    keep: int,
    weight: float,
    protected: list[bool],
    redundancy: str = "max",
    count: bool = True,
    standardise: bool = False,
) -> list[int]:
    """One row in plain Python, float64, no shortcut; scores of -inf stand for padding."""
    size = len(scores)
    kept = [i for i in range(size) if protected[i]]
    open_ = [i for i in range(size) if not protected[i] and scores[i] > -math.inf]
    if standardise and open_:
        own = [scores[i] for i in open_]
        mean, spread = statistics.fmean(own), max(statistics.pstdev(own), 1e-6)
        scores = [(s - mean) / spread for s in scores]
    compared = list(kept) if count else []
    while len(kept) < keep and open_:
        worth = {}
        for i in open_:
            cosines = [sum(a * b for a, b in zip(signatures[i], signatures[j], strict=True)) for j in compared]
            likeness = (max(cosines) if redundancy == "max" else sum(cosines) / len(cosines)) if cosines else 0.0
            worth[i] = scores[i] - weight * likeness
        best = max(open_, key=lambda i: (worth[i], -i))
        kept.append(best)
        compared.append(best)
        open_.remove(best)
    rest = [i for i in range(size) if i not in kept]
    return sorted(kept + rest[: keep - len(kept)])


@st.composite
def cases(draw):
    rows, size, width = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    keep = draw(st.integers(1, size))
    grid = [draw(st.lists(score, min_size=size, max_size=size)) for _ in range(rows)]
    vectors = torch.tensor(
        [[[draw(part) for _ in range(width)] for _ in range(size)] for _ in range(rows)], dtype=torch.float32
    )
    shut = [draw(st.sets(st.integers(0, size - 1), max_size=keep)) for _ in range(rows)]
    protected = torch.tensor([[i in row for i in range(size)] for row in shut])
    scores = torch.tensor(grid, dtype=torch.float32)
    padding = torch.tensor([[draw(st.integers(0, 4)) == 0 for _ in range(size)] for _ in range(rows)]) & ~protected
    return scores.masked_fill(padding, -math.inf), vectors, keep, protected


def unit(*shape: int, seed: int = 0) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))


# --- selection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [diverse._TABLE, 0], ids=["a table of cosines", "row by row"])
@pytest.mark.parametrize("redundancy", ["max", "mean"])
@given(case=cases(), weight=st.sampled_from([0.125, 0.5, 2.0, 0.3]), count=st.booleans())
@quick
def test_equals_the_reference_ties_included(table, redundancy, case, weight, count):
    scores, vectors, keep, protected = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diverse, "_TABLE", table)
        chosen = select_diverse(
            scores,
            vectors,
            keep,
            weight=weight,
            protected=protected,
            redundancy=redundancy,
            protected_count_as_chosen=count,
        )
    assert chosen.dtype == torch.int64
    rows = zip(scores.tolist(), vectors.tolist(), protected.tolist(), strict=True)
    assert chosen.tolist() == [reference(s, v, keep, weight, p, redundancy, count) for s, v, p in rows]


@pytest.mark.parametrize("redundancy", ["max", "mean"])
@pytest.mark.parametrize("standardise", [False, True])
def test_real_signatures_equal_the_reference(redundancy, standardise):
    scores, vectors = random(4, 60), unit(4, 60, 16)
    protected = torch.zeros(4, 60, dtype=torch.bool)
    protected[1, :4] = protected[2, 20:50] = True
    scores[3, :25] = -math.inf
    chosen = select_diverse(
        scores, vectors, 35, weight=2.7, protected=protected, redundancy=redundancy, standardise=standardise
    )
    rows = zip(scores.tolist(), vectors.tolist(), protected.tolist(), strict=True)
    expected = [reference(s, v, 35, 2.7, p, redundancy, standardise=standardise) for s, v, p in rows]
    assert chosen.tolist() == expected
    assert not torch.equal(chosen, select_topk(scores, 35, protected=protected))


@given(case=cases())
@quick
def test_weight_0_is_top_k_to_the_bit(case):
    scores, vectors, keep, protected = case
    expected = select_topk(scores, keep, protected=protected)
    for more in ({}, {"redundancy": "mean"}, {"standardise": True}, {"protected_count_as_chosen": False}):
        assert torch.equal(select_diverse(scores, vectors, keep, weight=0, protected=protected, **more), expected)
    assert torch.equal(select_diverse(scores, vectors * math.nan, keep, weight=0.0, protected=protected), expected)


@given(case=cases(), weight=st.sampled_from([Fraction(1, 8), Fraction(1, 2), Fraction(2)]))
@quick
def test_a_penalty_for_likeness_is_a_bonus_for_novelty(case, weight):
    """score - w * max cos and score + w * (1 - max cos) order alike: in exact arithmetic they differ by w alone."""
    scores, vectors, keep, _ = case
    scores = scores.nan_to_num(neginf=-4.0).mul(4).round().div(4)  # exact in float64, too
    got = select_diverse(scores, vectors, keep, weight=float(weight))
    for s, v, chosen in zip(scores.tolist(), vectors.tolist(), got.tolist(), strict=True):
        exact = [[Fraction(x) for x in vector] for vector in v]
        picked: list[int] = []
        while len(picked) < keep:
            worth = {}
            for i in set(range(len(s))) - set(picked):
                cosines = [sum(a * b for a, b in zip(exact[i], exact[j], strict=True)) for j in picked]
                worth[i] = Fraction(s[i]) + weight * (1 - max(cosines, default=0))
            picked.append(max(worth, key=lambda i: (worth[i], -i)))
        assert sorted(picked) == chosen


def test_a_row_does_not_depend_on_its_batch_nor_on_padding():
    scores, vectors = random(6, 40), unit(6, 40, 8)
    protected = torch.zeros(6, 40, dtype=torch.bool)
    protected[:3, :3] = True
    together = select_diverse(scores, vectors, 17, protected=protected)
    for row in range(6):
        alone = select_diverse(scores[row], vectors[row], 17, protected=protected[row])
        assert torch.equal(together[row], alone)
    shape = together.reshape(2, 3, 17)
    split = [t.reshape(2, 3, *t.shape[1:]) for t in (scores, vectors, protected)]
    assert torch.equal(select_diverse(split[0], split[1], 17, protected=split[2]), shape)
    front = torch.full((6, 5), -math.inf), torch.full((6, 5, 8), math.nan), torch.zeros(6, 5, dtype=torch.bool)
    padded = [torch.cat(pair, 1) for pair in zip(front, (scores, vectors, protected), strict=True)]
    assert torch.equal(select_diverse(padded[0], padded[1], 17, protected=padded[2]), together + 5)
    everything = select_diverse(padded[0], padded[1], 42, protected=padded[2])
    assert everything[0].tolist() == [0, 1, *range(5, 45)]  # padding only when nothing else is left


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_set_does_not_depend_on_the_dtype(dtype):
    scores, vectors = random(3, 50).bfloat16(), unit(3, 50, 8).bfloat16()
    expected = select_diverse(scores.float(), vectors.float(), 20)
    wide = torch.float32 if dtype == torch.float16 else dtype  # bfloat16 does not fit into float16
    assert torch.equal(select_diverse(scores.to(wide), vectors.to(wide), 20), expected)


def test_copies_tie_whatever_stands_between_them():
    """Equal signatures have equal cosines to everything, wherever they stand in a matrix product: lowest index wins."""
    base = unit(9, 37, seed=3)
    vectors = base.repeat(30, 1)
    chosen = select_diverse(torch.zeros(270), vectors, 9)
    assert chosen.tolist() == reference([0.0] * 270, vectors.tolist(), 9, 0.5, [False] * 270)
    assert bool((chosen < 9).all())


def test_of_copies_one_is_kept_before_any_second_one():
    """Four groups of exact copies, orthogonal to each other; scores differ by less than the weight."""
    groups = torch.eye(4).repeat_interleave(5, 0)
    scores = torch.tensor([1.0, 0.8, 0.75, 0.7]).repeat_interleave(5) - 0.01 * torch.arange(20).remainder(5)
    assert select_topk(scores, 4).div(5, rounding_mode="floor").tolist() == [0, 0, 0, 0]
    assert select_diverse(scores, groups, 4).tolist() == [0, 5, 10, 15]
    assert select_diverse(scores, groups, 4, weight=0.15).tolist() == [0, 1, 2, 3]


def test_protected_entries_repel_if_they_count():
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    scores, protected = torch.tensor([0.0, 0.6, 0.5]), torch.tensor([True, False, False])
    assert select_diverse(scores, vectors, 2, protected=protected).tolist() == [0, 2]
    alone = select_diverse(scores, vectors, 2, protected=protected, protected_count_as_chosen=False)
    assert alone.tolist() == [0, 1]


def test_standardised_scores_do_not_depend_on_scale():
    scores, vectors = random(3, 40), unit(3, 40, 8)
    weak = scores * 1e-3 + 5
    chosen = select_diverse(scores, vectors, 15, standardise=True)
    assert torch.equal(select_diverse(weak, vectors, 15, standardise=True), chosen)
    assert not torch.equal(select_diverse(weak, vectors, 15), select_diverse(scores, vectors, 15))


def test_a_component_that_all_share_switches_the_penalty_off():
    """The hazard: with a large common part all cosines are near 1, so the set is top-k's; centring brings it back."""
    scores, own = random(1, 80), random(1, 80, 16, seed=1)
    common = 300 * unit(16, seed=2)
    top = select_topk(scores, 30)
    free = select_diverse(scores, value_signatures([own[:, None]]), 30)
    assert not torch.equal(free, top)
    shared = value_signatures([(own + common)[:, None]])
    assert (shared @ shared.mT).min() > 0.99
    assert torch.equal(select_diverse(scores, shared, 30), top)
    centred = value_signatures([(own + common)[:, None]], centre=True)
    again = select_diverse(scores, value_signatures([own[:, None]], centre=True), 30)
    assert torch.equal(select_diverse(scores, centred, 30), again) and not torch.equal(again, top)


def worth_in_order(order: list[int], scores: list[float], vectors: list[list[float]], weight: float) -> float:
    total = 0.0
    for step, i in enumerate(order):
        cosines = [sum(a * b for a, b in zip(vectors[i], vectors[j], strict=True)) for j in order[:step]]
        total += scores[i] - weight * max(cosines, default=0.0)
    return total


def test_two_picks_are_worth_at_least_top_2():
    for seed in range(50):
        scores, vectors = random(8, seed=seed), unit(8, 3, seed=seed)
        pair = select_diverse(scores, vectors, 2, weight=1.0).tolist()
        top = select_topk(scores, 2).tolist()
        s, v = scores.tolist(), vectors.tolist()
        assert worth_in_order(pair, s, v, 1.0) >= worth_in_order(top, s, v, 1.0) - 1e-6


def test_three_picks_can_be_worth_less_than_top_3():
    """Greedy choice carries no guarantee on the penalised sum: here it ends below top-k, both in their best order."""
    scores = [0.875, 0.25, 1.0, 0.625, 0.75]
    vectors = [[0.6, -0.8], [-0.8, 0.6], [-1.0, 0.0], [1.0, 0.0], [0.6, 0.8]]
    chosen = select_diverse(torch.tensor(scores), torch.tensor(vectors), 3, weight=1.0).tolist()
    top = select_topk(torch.tensor(scores), 3).tolist()
    assert (chosen, top) == ([0, 2, 3], [0, 2, 4])
    assert worth_in_order([2, 3, 0], scores, vectors, 1.0) < worth_in_order([2, 0, 4], scores, vectors, 1.0)


def test_a_larger_weight_keeps_a_less_redundant_set():
    """On clustered signatures; the mean over entries of the largest cosine to another kept one."""
    centres, rng = unit(12, 16), torch.Generator().manual_seed(5)
    vectors = torch.nn.functional.normalize(
        centres[torch.randint(12, (200,), generator=rng)] + 0.1 * random(200, 16), dim=-1
    )
    scores, likeness = random(200), []
    for weight in (0.0, 0.5, 2.0, 8.0):
        kept = vectors[select_diverse(scores, vectors, 24, weight=weight)]
        likeness.append((kept @ kept.T).fill_diagonal_(-1).amax(-1).mean().item())
    assert likeness == sorted(likeness, reverse=True) and likeness[0] > likeness[-1] + 0.05


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf, True, "0.5", None])
def test_the_weight_must_be_a_number_of_at_least_0(weight):
    with pytest.raises(ValueError, match=f"select_diverse: weight must be a number of at least 0, not {weight!r}"):
        select_diverse(torch.rand(4), torch.rand(4, 2), 2, weight=weight)
    with pytest.raises(ValueError, match="diverse: weight must be"):
        Diverse(weight=weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"redundancy": "sum"}, "unknown redundancy 'sum'; valid: max, mean"),
        ({"keep": 0}, "keep must be a whole number from 1 to the 9"),
        ({"keep": 1, "protected": torch.arange(9) < 3}, "3 entries are protected, but only 1 may be kept"),
        ({"signatures": torch.rand(2, 8, 3)}, r"signatures must be \(2, 9\) and one more dimension"),
        ({"signatures": torch.rand(9, 3)}, r"not torch.float32 \(9, 3\)"),
        ({"signatures": torch.full((2, 9, 3), math.nan)}, "signatures must be finite"),
        ({"scores": torch.full((2, 9), math.nan)}, "scores must be numbers"),
    ],
)
def test_bad_arguments(arguments, message):
    given = {"scores": torch.rand(2, 9), "signatures": torch.rand(2, 9, 3), "keep": 4} | arguments
    with pytest.raises(ValueError, match=message):
        select_diverse(**given)


# --- signatures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("centre", [False, True])
def test_signatures_equal_a_loop(normalise, centre):
    layers = [random(2, heads, 5, 4, seed=heads) for heads in (3, 1, 2)]  # numbers of heads may differ
    got = value_signatures(layers, centre=centre, normalise_heads=normalise)
    assert got.shape == (2, 5, 4) and got.dtype == torch.float32
    for row in range(2):
        vectors = [layer[row, head] for layer in layers for head in range(layer.shape[1])]
        if normalise:
            vectors = [v / v.norm(dim=-1, keepdim=True) for v in vectors]
        mean = torch.stack(vectors).double().mean(0)
        mean = mean - mean.mean(0) if centre else mean
        torch.testing.assert_close(got[row].double(), mean / mean.norm(dim=-1, keepdim=True), rtol=0, atol=1e-6)
    torch.testing.assert_close(got.norm(dim=-1), torch.ones(2, 5))


def test_padding_is_not_read():
    layers, valid = [random(2, 3, 6, 4)], torch.ones(2, 6, dtype=torch.bool)
    valid[1, :2] = False
    spoiled = [layers[0].masked_fill(~valid[:, None, :, None], math.nan)]
    for centre in (False, True):
        got = value_signatures(spoiled, centre=centre, valid=valid)
        alone = value_signatures([layers[0][1:, :, 2:]], centre=centre)
        torch.testing.assert_close(got[1, 2:], alone[0], rtol=0, atol=1e-7)
        assert torch.equal(got[1, :2], torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mean_does_not_depend_on_what_is_computed_beside_it(dtype):
    layers = [random(2, 3, 301, 20, seed=i).to(dtype) for i in range(5)]
    for normalise in (False, True):
        whole = mean_values(layers, normalise_heads=normalise)
        for part in (slice(0, 1), slice(17, 30), slice(290, None)):
            assert torch.equal(mean_values([v[:, :, part] for v in layers], normalise_heads=normalise), whole[:, part])
        assert torch.equal(mean_values([v[1:] for v in layers], normalise_heads=normalise), whole[1:])


def test_no_direction_has_no_likeness():
    got = value_signatures([torch.zeros(1, 2, 3, 4)])
    assert torch.equal(got, torch.zeros(1, 3, 4))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "no layer given"),
        ([torch.rand(2, 5, 4)], r"must be \(B, H, N, D\) for each layer, not \[\(2, 5, 4\)\]"),
        ([torch.rand(1, 2, 5, 4), torch.rand(1, 2, 5, 8)], r"one head size, not \[\(1, 2, 5, 4\), \(1, 2, 5, 8\)\]"),
        ([torch.rand(1, 2, 5, 4), torch.rand(1, 2, 6, 4)], "equal numbers of rows and entries"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ValueError, match=message):
        value_signatures(values)


def test_the_documented_examples():
    for name in ("diverse", "signatures"):
        assert doctest.testmod(importlib.import_module(f"kvretain.select.{name}")) == (0, 1)
    assert kvretain.select_diverse is select_diverse and kvretain.value_signatures is value_signatures


# --- the selector ---------------------------------------------------------------------------------


def test_the_selector_is_the_function():
    assert selectors["diverse"] is Diverse
    scores, values = random(2, 3, 20), random(2, 3, 20, 4, seed=1)
    protected = torch.zeros(2, 3, 20, dtype=torch.bool)
    protected[..., :2] = True
    positions = torch.arange(20).expand(2, 3, -1).clone()
    positions[0, :, :4] = -1
    protected[0, :, :4] = False
    protected[0, :, 5] = True
    for fields in (
        {},
        {"weight": 2.0, "redundancy": "mean", "standardise": True},
        {"centre": True, "protected_count_as_chosen": False},
    ):
        got = Diverse(**fields).select(scores, 8, protected=protected, positions=positions, values=values)
        closed = scores.masked_fill(positions < 0, -math.inf)
        flat = values.flatten(0, 1)[:, None]
        signatures = value_signatures(
            [flat], centre=fields.pop("centre", False), valid=(positions >= 0).flatten(0, 1)
        ).reshape(values.shape)
        assert torch.equal(got, select_diverse(closed, signatures, 8, protected=protected, **fields))


def test_the_selector_needs_values():
    assert Diverse.needs_values and not selectors["topk"].needs_values
    with pytest.raises(ValueError, match="'diverse' compares value vectors: give values="):
        Diverse().select(torch.rand(1, 5), 2, protected=torch.zeros(1, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="centre must be True or False, not 1"):
        Diverse(centre=1)
    with pytest.raises(ValueError, match="unknown redundancy 'sum'"):
        Diverse(redundancy="sum")


# --- which values are compared --------------------------------------------------------------------


def views(count: int = 3, batch: int = 2, heads: int = 2, size: int = 24) -> list[CacheView]:
    """Layers whose entries share positions; row 1 has 5 padding slots, full of NaN."""
    positions = torch.arange(size).expand(batch, heads, -1).clone()
    positions[1] = (positions[1] - 5).clamp_min(-1)
    padding = (positions < 0)[..., None]
    return [
        CacheView(
            keys=random(batch, heads, size, 6, seed=layer).masked_fill(padding, math.nan),
            values=random(batch, heads, size, 4, seed=50 + layer).masked_fill(padding, math.nan),
            positions=positions,
            seen=torch.tensor([size, size - 5]),
            budget=9,
            protected=(positions >= 0) & (positions < 2),
            layer=layer,
            num_layers=count,
        )
        for layer in range(count)
    ]


def standard(scores: Tensor, open_: Tensor) -> Tensor:
    rows = []
    for s, o in zip(scores.flatten(0, 1), open_.flatten(0, 1), strict=True):
        rows.append((s - s[o].mean()) / s[o].std(correction=0))
    return torch.stack(rows).reshape(scores.shape)


@pytest.mark.parametrize("scope", ["head", "layer", "model", "aligned"])
@pytest.mark.parametrize("counts", [9, (9, 6)])
def test_each_scope_compares_the_values_of_those_who_share(scope, counts):
    layers = views()
    policy = Policy.parse(f"knorm/diverse(weight=1.5)@{scope}")
    together = scope in ("model", "aligned")
    got = choose(policy, layers, 0.5, counts) if together else [choose(policy, [v], 0.5, counts)[0] for v in layers]
    scores = [-v.keys.norm(dim=-1) for v in layers]
    open_, real = layers[0].candidates, layers[0].valid
    values = [v.values for v in layers]
    zscores = [standard(s, open_) for s in scores]

    def per_head(layers: list[Tensor]) -> list[Tensor]:
        return [value_signatures([v[:, h : h + 1] for v in layers], valid=real[:, h]) for h in range(2)]

    if scope == "head":
        sets = [(s, per_head([v])) for s, v in zip(scores, values, strict=True)]
    elif scope == "layer":
        sets = [
            (z.mean(1, keepdim=True), [value_signatures([v], valid=real[:, 0])])
            for z, v in zip(zscores, values, strict=True)
        ]
    elif scope == "model":
        sets = [(torch.stack(zscores).mean((0, 2))[:, None], [value_signatures(values, valid=real[:, 0])])] * 3
    else:
        sets = [(torch.stack(zscores).mean(0), per_head(values))] * 3
    for chosen, (combined, signatures) in zip(got, sets, strict=True):
        heads = combined.shape[1]
        assert chosen.shape == (2, heads, 9)
        for row, count in enumerate(counts if isinstance(counts, tuple) else (counts, counts)):
            for head in range(heads):
                expected = select_diverse(
                    combined[row, head].masked_fill(~real[row, head], -math.inf),
                    signatures[head][row],
                    count,
                    weight=1.5,
                    protected=layers[0].protected[row, head],
                )
                assert chosen[row, head].tolist() == [-1] * (9 - count) + expected.tolist()


def test_layers_with_budgets_of_their_own():
    layers, policy = views(1), Policy.parse("knorm/diverse(weight=1.5)@head(layers='pyramid')")
    (mask,) = choose_unequal(policy, layers, 0.5, (9, 6))
    (nine,), (six,) = (choose(Policy.parse("knorm/diverse(weight=1.5)"), layers, 0.5, n) for n in (9, 6))
    assert mask[0].nonzero()[:, 1].reshape(2, 9).tolist() == nine[0].tolist()
    assert mask[1].nonzero()[:, 1].reshape(2, 6).tolist() == six[1].tolist()


def test_aligned_needs_equal_numbers_of_heads():
    layers = [*views(1), *views(1, heads=3)]
    with pytest.raises(ValueError, match=r"'aligned' needs as many KV heads in every layer.*\[2, 3\]: use @model"):
        choose(Policy.parse("knorm@aligned"), layers, 0.5, 9)


@pytest.mark.parametrize("combine", ["mean", "zscore", "max"])
def test_aligned_is_one_set_per_head_for_all_layers(combine):
    layers = views()
    got = choose(Policy.parse(f"knorm@aligned(combine={combine!r})"), layers, 0.5, 9)
    assert all(torch.equal(got[0], other) for other in got[1:])
    scores = torch.stack([-v.keys.norm(dim=-1) for v in layers])
    if combine == "zscore":
        scores = torch.stack([standard(s, layers[0].candidates) for s in scores])
    pooled = scores.amax(0) if combine == "max" else scores.mean(0)
    pooled = pooled.masked_fill(~layers[0].valid, -math.inf)
    assert torch.equal(got[0], select_topk(pooled, 9, protected=layers[0].protected))
    assert not torch.equal(got[0][:, 0], got[0][:, 1])


def test_the_maximum_over_the_model_is_over_layers_too():
    layers = views()
    got = choose(Policy.parse("knorm@model(combine='max')"), layers, 0.5, 9)
    best = torch.stack([-v.keys.norm(dim=-1) for v in layers]).amax((0, 2))[:, None]
    best = best.masked_fill(~layers[0].valid[:, :1], -math.inf)
    assert torch.equal(got[0], select_topk(best, 9, protected=layers[0].protected[:, :1]))


@pytest.mark.parametrize("scope", ["shared", "model-heads"])
def test_competing_heads_refuse_it(scope):
    with pytest.raises(ValueError, match="heads compete by score: only the selector 'topk' fits"):
        Policy.parse(f"knorm/diverse@{scope}")


def test_it_is_flat_and_frozen():
    assert dataclasses.asdict(Diverse()) == {
        "weight": 0.5,
        "redundancy": "max",
        "centre": False,
        "standardise": False,
        "protected_count_as_chosen": True,
        "normalise_heads": False,
        "space": "values",
    }
    text = "keydiff/diverse(weight=0.25, centre=True)@model(combine='max')"
    assert str(Policy.parse(text)) == text


KERNEL = """
import torch
from kvretain.select import _picking, diverse

f32, bf16 = torch.float32, torch.bfloat16
for size, dtype, count in ((1, f32, 1), (37, f32, 37), (64, bf16, 64), (256, f32, 128)):
    generator = torch.Generator().manual_seed(size)
    worth = torch.randn(5, size, generator=generator).to(dtype).double().mul_(2).round_().div_(2)
    worth[1, size // 2 :] = -torch.inf
    vectors = torch.nn.functional.normalize(torch.randn(5, size, 8, generator=generator), dim=-1)
    vectors[2] = vectors[2, :1]  # all alike: nothing but ties
    seeds = torch.rand(5, size, generator=generator) < torch.tensor([0.0, 0.2, 0.2, 0.5, 0.0])[:, None]
    worth.masked_fill_(seeds, -torch.inf)
    beside = diverse._Products(vectors, worth, 0.5)
    now = beside.least(seeds)
    pick = torch.where(now == torch.inf, worth, now).argmax(-1)
    loop = diverse._picks_from(beside.table, now.clone(), pick, count)
    kernel = _picking.picks_from(beside.table, now, pick, count)
    assert kernel.shape == (5, count) and torch.equal(kernel, loop), (size, kernel, loop)

# Rows are taken in groups whose table fits; a row alone that does not fit is still the kernel's.
scores, protected = torch.randn(7, 40), torch.rand(7, 40) < 0.1
scores[3, :25] = -torch.inf
vectors = torch.nn.functional.normalize(torch.randn(7, 40, 8), dim=-1)
expected = diverse.select_diverse(scores, vectors, 20, protected=protected)
groups, launch = [], _picking.picks_from
_picking.picks_from = lambda beside, *rest: groups.append(len(beside)) or launch(beside, *rest)
diverse._kernel = lambda worth: _picking
for diverse._TABLE, sizes in ((3 * 1600 + 5, [3, 3, 1]), (1599, [1] * 7), (7 * 1600, [7])):
    groups.clear()
    own = diverse.select_diverse(scores, vectors, 20, protected=protected)
    assert torch.equal(own, expected) and groups == sizes, (groups, sizes)
print("equal")
"""


def test_the_kernel_picks_what_the_loop_picks():
    """In Triton's interpreter, on a CPU; ties, padding, rows of unequal room and groups of rows included. How Triton
    runs kernels is settled when it is imported, hence the process of its own."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "equal\n", done.stderr


def test_the_kernel_serves_gpus_up_to_its_widest_row(monkeypatch):
    class Row:
        def __init__(self, size, is_cuda=True):
            self.shape, self.is_cuda = (3, size), is_cuda

    class Kernel:
        WIDEST = 64

    monkeypatch.setattr(diverse, "_triton", lambda: Kernel)
    assert diverse._kernel(Row(64)) is Kernel
    assert diverse._kernel(Row(65)) is None and diverse._kernel(Row(64, is_cuda=False)) is None
    monkeypatch.setattr(diverse, "_triton", lambda: None)
    assert diverse._kernel(Row(64)) is None


def test_one_row_alone_picks_what_it_picks_among_others():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 50, generator=generator)
    vectors = torch.nn.functional.normalize(torch.randn(6, 50, 8, generator=generator), dim=-1)
    together = select_diverse(scores, vectors, 20)
    alone = [select_diverse(scores[row], vectors[row], 20) for row in range(6)]
    assert torch.equal(together, torch.stack(alone))
