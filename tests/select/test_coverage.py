"""Coverage: greedy, lazy and stochastic on any weights against each other and against brute force; the selectors."""

from __future__ import annotations

import doctest
import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kvretain
from kvretain import Policy, coverage, select_coverage, selectors
from kvretain.cache.view import CacheView
from kvretain.choose import choose
from kvretain.select import Greedy, StochasticGreedy, greedy_path, select_topk
from kvretain.theory import best_subset, local_weights, marginal_gains

quick = settings(max_examples=60, deadline=None)
# Eighths are exact in floating point, and few of them make ties the rule.
level = st.integers(0, 8).map(lambda n: n / 8)
fine = st.floats(0, 1, width=32, allow_subnormal=False)
mixed = st.one_of(level, level, fine)


@st.composite
def matrices(draw, elements=mixed):
    places, size = draw(st.integers(1, 8)), draw(st.integers(1, 10))
    rows = draw(st.lists(st.lists(elements, min_size=size, max_size=size), min_size=places, max_size=places))
    return torch.tensor(rows, dtype=torch.float64)


def reference(weights: Tensor, keep: int) -> list[int]:
    """Greedy in plain Python, exact for eighths."""
    rows, chosen = weights.tolist(), []
    value = lambda entries: sum(max((row[j] for j in entries), default=0.0) for row in rows)  # noqa: E731
    for _ in range(keep):
        rest = [j for j in range(len(rows[0])) if j not in chosen]
        chosen.append(max(rest, key=lambda j: (value([*chosen, j]), -j)))
    return chosen


def clustered(size: int, seed: int = 0) -> Tensor:
    """Heavy-tailed scores in clusters, as attention has them."""
    rng = torch.Generator().manual_seed(seed)
    peaks = torch.rand(size, generator=rng) ** 8
    smeared = torch.nn.functional.avg_pool1d(peaks[None], 5, 1, 2)[0]
    return smeared + 0.1 * torch.rand(size, generator=rng) ** 2


# --- any weights ----------------------------------------------------------------------------------


@given(weights=matrices(level), data=st.data())
@quick
def test_greedy_equals_the_reference_ties_included(weights, data):
    keep = data.draw(st.integers(1, weights.shape[1]))
    expected = reference(weights, keep)
    path = greedy_path(weights, keep)
    assert path.order.tolist() == expected
    assert path.gains.sum() == coverage(weights, expected)
    chosen = select_coverage(weights, keep)
    assert chosen.dtype == torch.int64 and chosen.tolist() == sorted(expected)


@given(weights=matrices(), data=st.data())
@quick
def test_lazy_is_greedy_to_the_bit(weights, data):
    keep = data.draw(st.integers(1, weights.shape[1]))
    greedy, lazy = greedy_path(weights, keep), greedy_path(weights, keep, method="lazy")
    assert torch.equal(lazy.order, greedy.order) and torch.equal(lazy.gains, greedy.gains)
    assert lazy.evaluations <= greedy.evaluations
    assert bool((greedy.gains.diff() <= 0).all())


def _lazy_saves(size: int, times: float) -> None:
    weights = local_weights(clustered(size))
    keep = size // 10
    greedy, lazy = greedy_path(weights, keep), greedy_path(weights, keep, method="lazy")
    assert torch.equal(lazy.order, greedy.order) and torch.equal(lazy.gains, greedy.gains)
    assert greedy.evaluations == sum(size - step for step in range(keep))
    assert lazy.evaluations * times <= greedy.evaluations


def test_lazy_needs_far_fewer_evaluations():
    _lazy_saves(500, 10)


@pytest.mark.slow
def test_lazy_needs_far_fewer_evaluations_of_2000():
    _lazy_saves(2000, 10)


@given(weights=matrices(), data=st.data())
@quick
def test_greedy_reaches_its_share_of_the_optimum(weights, data):
    """F(greedy) >= (1 - (1 - 1/k)^k) OPT >= (1 - 1/e) OPT."""
    keep = data.draw(st.integers(1, weights.shape[1]))
    best = best_subset(weights, keep).value
    bound = 1 - (1 - 1 / keep) ** keep
    assert bound >= 1 - 1 / math.e
    assert coverage(weights, select_coverage(weights, keep)) >= bound * best - 1e-12


def test_the_bound_of_greedy_is_tight():
    """The optimum is three blocks of nine places; three baits each take a third of what every block has left."""
    bait = torch.tensor([[3, 3, 3, 0, 0, 0, 0, 0, 0], [0, 0, 0, 3, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 3, 1, 0, 0]])
    weights = torch.cat([bait.repeat(1, 3), torch.eye(3, dtype=torch.int64).repeat_interleave(9, 1) * 3]).T
    best = best_subset(weights, 3)
    assert best.chosen.tolist() == [3, 4, 5] and best.value == 81
    chosen = select_coverage(weights, 3)
    assert chosen.tolist() == [0, 1, 2] and coverage(weights, chosen) / 81 == pytest.approx(1 - (1 - 1 / 3) ** 3)


def test_stochastic_greedy_keeps_its_expected_bound():
    """E[F] >= (1 - 1/e - epsilon) OPT, and each step looks at ceil(N / k ln(1 / epsilon)) entries."""
    rng = torch.Generator().manual_seed(0)
    weights = 0.02 * torch.rand(12, 18, generator=rng)
    weights[torch.arange(12), torch.tensor([1, 6, 10, 17]).repeat(3)] += 1  # four entries that hold nearly all there is
    best = best_subset(weights, 4).value
    blind = float(coverage(weights, torch.combinations(torch.arange(18), 4)).mean())
    means = []
    for epsilon in (0.05, 0.15, 0.3):
        assert blind < (1 - 1 / math.e - epsilon) * best  # which sets drawn without looking would miss
        paths = [greedy_path(weights, 4, method="stochastic", epsilon=epsilon, generator=rng) for _ in range(300)]
        values = torch.stack([path.gains.sum() for path in paths])
        error = values.std() / math.sqrt(len(values))
        assert values.mean() - 3 * error >= (1 - 1 / math.e - epsilon) * best
        size = math.ceil(18 / 4 * math.log(1 / epsilon))
        assert paths[0].evaluations == sum(min(size, 18 - step) for step in range(4))
        means.append(float(values.mean()))
    assert means[0] > means[1] > means[2]  # more candidates, better sets


@given(weights=matrices(level), data=st.data())
@quick
def test_stochastic_that_sees_everything_is_greedy(weights, data):
    keep = data.draw(st.integers(1, weights.shape[1]))
    everything = greedy_path(weights, keep, method="stochastic", epsilon=1e-9)
    assert torch.equal(everything.order, greedy_path(weights, keep).order)


def test_stochastic_is_reproducible():
    weights = local_weights(clustered(100))
    draw = lambda seed: select_coverage(  # noqa: E731
        weights, 20, method="stochastic", generator=torch.Generator().manual_seed(seed)
    )
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    torch.manual_seed(1)
    first = select_coverage(weights, 20, method="stochastic")
    torch.manual_seed(2)
    assert torch.equal(select_coverage(weights, 20, method="stochastic"), first)
    assert torch.equal(draw(0), first)
    assert len(first.unique()) == 20 and bool((first.diff() > 0).all())


@pytest.mark.parametrize("method", ["greedy", "lazy", "stochastic"])
def test_keeping_everything_and_weights_of_zero(method):
    weights = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    assert select_coverage(weights, 6, method=method).tolist() == list(range(6))
    assert len(select_coverage(torch.zeros(4, 6), 3, method=method).unique()) == 3
    assert len(select_coverage(torch.zeros(0, 6), 3, method=method).unique()) == 3
    assert select_coverage(torch.ones(1, 1, dtype=torch.int64), 1, method=method).tolist() == [0]
    if method != "stochastic":
        assert select_coverage(torch.zeros(4, 6), 3, method=method).tolist() == [0, 1, 2]


def test_coverage_of_many_sets():
    weights = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.25]])
    assert coverage(weights, torch.tensor([[0, 1], [2, 2], [0, 2]])).tolist() == [3.0, 0.25, 1.25]
    assert coverage(weights, []).item() == 0.0 and coverage(weights, torch.zeros(4, 0, dtype=torch.int64)).shape == (4,)
    assert coverage(weights, (1,)) == pytest.approx(2.5)


def test_the_documented_examples():
    assert doctest.testmod(importlib.import_module("kvretain.select.coverage")) == (0, 2)


def test_public_names():
    assert kvretain.select_coverage is select_coverage and kvretain.coverage is coverage


@pytest.mark.parametrize(
    ("weights", "keep", "options", "message"),
    [
        (torch.tensor([[0.5, -0.25]]), 1, {}, "weights must be finite and >= 0, but one is -0.25"),
        (torch.tensor([[0.5, math.nan]]), 1, {}, "weights must be finite and >= 0, but one is nan"),
        (torch.tensor([[0.5, math.inf]]), 1, {}, "weights .* inf"),
        (torch.rand(3), 1, {}, r"kernel_matrix must be real of shape \(X, N\), not torch.float32 \(3,\)"),
        (torch.rand(2, 3) > 0, 1, {}, "kernel_matrix must be real .* torch.bool"),
        ([[1.0, 2.0]], 1, {}, "kernel_matrix must be a tensor, not list"),
        (torch.rand(2, 3), 0, {}, "keep must be a whole number from 1 to the 3 entries there are, not 0"),
        (torch.rand(2, 3), 4, {}, "keep .* not 4"),
        (torch.rand(2, 0), 1, {}, "keep .* the 0 entries there are"),
        (torch.rand(2, 3), 1.5, {}, "keep must be a whole number, not 1.5"),
        (torch.rand(2, 3), True, {}, "keep must be a whole number, not True"),
        (torch.rand(2, 3), 1, {"method": "best"}, "unknown method 'best'; valid: greedy, lazy, stochastic"),
        (torch.rand(2, 3), 1, {"epsilon": 0.0}, r"epsilon must be in \(0, 1\), not 0.0"),
        (torch.rand(2, 3), 1, {"epsilon": math.nan}, "epsilon .* not nan"),
        (torch.rand(2, 3), 1, {"epsilon": "small"}, "epsilon .* not 'small'"),
    ],
)
def test_bad_arguments(weights, keep, options, message):
    with pytest.raises(ValueError, match=f"select_coverage: {message}"):
        select_coverage(weights, keep, **options)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([3], "chosen must be from 0 to 2, but one is 3"),
        ([-1], "chosen .* one is -1"),
        (torch.tensor([True, False, True]), "chosen must be integer indices"),
        (torch.tensor([0.0]), "chosen must be integer indices"),
        (torch.tensor(1), "chosen must be integer indices"),
        (None, "chosen must be integer indices .* not None"),
        ("ab", "chosen must be integer indices .* not 'ab'"),
        ([[0], [1, 2]], "chosen must be integer indices"),
        ([10**30], "chosen must be integer indices"),
    ],
)
def test_bad_sets(chosen, message):
    with pytest.raises(ValueError, match=f"coverage: {message}"):
        coverage(torch.rand(2, 3), chosen)


def test_coverage_of_what_is_no_tensor():
    with pytest.raises(ValueError, match="coverage: kernel_matrix must be a tensor, not list"):
        coverage([[1.0, 2.0]], [0])


# --- the selectors --------------------------------------------------------------------------------

SELECTORS = [
    Greedy(),
    Greedy(kernel=3, shape="box"),
    Greedy(kernel=1),
    StochasticGreedy(),
    StochasticGreedy(kernel=7, shape="box", epsilon=0.3, seed=3),
]
each = pytest.mark.parametrize("selector", SELECTORS, ids=str)
few = settings(max_examples=12, deadline=None)


def random_case(seed: int, batch: int = 2, heads: int = 2, size: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (-inf in padding), protected and positions; gaps, padding anywhere, as many real entries in each row."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, heads, size, generator=rng) ** 2
    scores = torch.where(torch.rand(scores.shape, generator=rng) < 0.3, (scores * 8).round() / 8, scores)
    positions = torch.randint(1, 3, scores.shape, generator=rng).cumsum(-1) - 1
    positions = positions.masked_fill(torch.rand(scores.shape, generator=rng).argsort(-1) < 4, -1)
    protected = (positions >= 0) & (torch.rand(scores.shape, generator=rng) < 0.12)
    return scores.masked_fill(positions < 0, -math.inf), protected, positions


def dense(case: tuple[Tensor, Tensor, Tensor], row: tuple[int, int], keep: int, kernel: int, shape: str) -> list[int]:
    """Greedy on the full matrix of one head, protected entries first; the best scores fill up what adds nothing."""
    scores, protected, positions = (x[row] for x in case)
    real = (positions >= 0).nonzero()[:, 0]
    weights = local_weights(scores[real], kernel, shape, positions=positions[real])
    chosen = protected[real].nonzero()[:, 0].tolist()
    while len(chosen) < keep:
        gains = marginal_gains(weights, chosen)
        gains[chosen] = -1
        if gains.max() <= 1e-9:
            break
        chosen.append(int((gains >= gains.max() - 1e-9).nonzero()[0, 0]))
    mask = torch.zeros_like(protected)
    mask[real[chosen]] = True
    return select_topk(scores, keep, protected=mask).tolist()


@pytest.mark.parametrize(("kernel", "shape"), [(5, "triangle"), (5, "box"), (3, "triangle"), (9, "box"), (1, "box")])
@pytest.mark.parametrize("keep", [8, 15])
def test_greedy_equals_the_full_matrix(kernel, shape, keep):
    for seed in range(8):
        case = random_case(seed)
        scores, protected, positions = case
        chosen = Greedy(kernel, shape).select(scores, keep, protected=protected, positions=positions)
        assert chosen.dtype == torch.int64 and chosen.shape == (2, 2, keep)
        for row in ((0, 0), (0, 1), (1, 0), (1, 1)):
            assert chosen[row].tolist() == dense(case, row, keep, kernel, shape)


def test_greedy_without_gaps_is_select_coverage():
    scores = clustered(300)
    none = torch.zeros(300, dtype=torch.bool)
    for kernel, shape in ((5, "triangle"), (3, "box")):
        expected = select_coverage(local_weights(scores, kernel, shape), 40)
        assert torch.equal(Greedy(kernel, shape).select(scores, 40, protected=none), expected)


@given(seed=st.integers(0, 2**20), keep=st.integers(8, 20))
@few
def test_a_kernel_of_one_is_top_k(seed, keep):
    scores, protected, positions = random_case(seed)
    for shifted in (scores, scores - 0.5):
        expected = select_topk(shifted, keep, protected=protected)
        for selector in (Greedy(kernel=1), Greedy(kernel=1, shape="box")):
            assert torch.equal(selector.select(shifted, keep, protected=protected, positions=positions), expected)


@each
@given(seed=st.integers(0, 2**20), keep=st.integers(8, 20))
@few
def test_rows_and_padding_do_not_leak(selector, seed, keep):
    """A row chooses as it does alone and without its padding; protected entries are in; padding is not."""
    scores, protected, positions = random_case(seed)
    chosen = selector.select(scores, keep, protected=protected, positions=positions)
    assert bool((chosen.diff(dim=-1) > 0).all())
    assert bool((positions.gather(-1, chosen) >= 0).all())
    assert torch.equal(protected.gather(-1, chosen).sum(-1), protected.sum(-1))
    junk = scores.masked_fill(protected, math.nan)
    assert torch.equal(
        selector.select(junk, keep, protected=protected, positions=positions),
        selector.select(scores.masked_fill(protected, 0.0), keep, protected=protected, positions=positions),
    )
    for row in range(2):
        alone = selector.select(scores[row], keep, protected=protected[row], positions=positions[row])
        assert torch.equal(alone, chosen[row])
        real = positions[row] >= 0
        cut = [x[row][real].view(2, -1) for x in (scores, protected, positions)]
        bare = selector.select(cut[0], keep, protected=cut[1], positions=cut[2])
        assert torch.equal(cut[2].gather(-1, bare), positions[row].gather(-1, chosen[row]))


@each
def test_left_padding_without_positions(selector):
    scores = clustered(40)
    none = torch.zeros(43, dtype=torch.bool)
    padded = torch.cat([torch.full((3,), -math.inf), scores])
    expected = selector.select(scores, 9, protected=none[:40]) + 3
    assert torch.equal(selector.select(padded, 9, protected=none), expected)
    assert selector.select(padded, 42, protected=none).tolist() == [0, 1, *range(3, 43)]  # when nothing else is left


@each
def test_signed_scores_and_nothing_to_gain(selector):
    scores = torch.randn(2, 2, 30, generator=torch.Generator().manual_seed(0))
    none = torch.zeros(scores.shape, dtype=torch.bool)
    lifted = scores - scores.amin(-1, keepdim=True)
    assert torch.equal(selector.select(scores, 9, protected=none), selector.select(lifted, 9, protected=none))
    flat = torch.zeros(2, 30)
    assert selector.select(flat, 3, protected=none[0]).tolist() == [[0, 1, 2]] * 2
    assert torch.equal(selector.select(scores, 30, protected=none), torch.arange(30).expand(2, 2, -1))


def test_what_adds_nothing_gives_way_to_the_largest_scores():
    scores = torch.tensor([9.0, 1.0, 9.0, 2.0, 9.0, 0.0, 0.0])
    none = torch.zeros(7, dtype=torch.bool)
    assert Greedy().select(scores, 4, protected=none).tolist() == [0, 2, 3, 4]


def test_redundant_neighbours_are_not_both_taken():
    scores = torch.tensor([0.1, 0.8, 0.9, 0.8, 0.1, 0.1, 0.1, 0.4, 0.1])
    none = torch.zeros(9, dtype=torch.bool)
    assert select_topk(scores, 2).tolist() == [1, 2]
    assert Greedy().select(scores, 2, protected=none).tolist() == [2, 7]
    guard = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 0]).bool()
    assert Greedy().select(scores, 2, protected=guard).tolist() == [2, 7]  # protected entries count as chosen
    far = torch.arange(9) * 5  # and with gaps nothing is redundant
    assert Greedy().select(scores, 2, protected=none, positions=far).tolist() == [1, 2]


def test_stochastic_lies_between_top_k_and_greedy():
    scores = torch.stack([clustered(400, seed) for seed in range(8)])
    none = torch.zeros_like(scores, dtype=torch.bool)
    value = lambda selector: sum(  # noqa: E731
        float(coverage(local_weights(row), kept))
        for row, kept in zip(scores, selector.select(scores, 60, protected=none), strict=True)
    )
    top, greedy = value(selectors["topk"]()), value(Greedy())
    means = [value(StochasticGreedy(epsilon=epsilon, seed=seed)) for epsilon in (0.1, 0.01) for seed in range(3)]
    assert max(top, (1 - 1 / math.e - 0.1) * greedy) < min(means) and max(means) < greedy
    assert sum(means[:3]) < sum(means[3:]) and len(set(means)) == 6


@given(seed=st.integers(0, 2**20), keep=st.integers(8, 20))
@few
def test_the_stochastic_selector_that_sees_everything_is_greedy(seed, keep):
    """At least 690 draws from at most 20 entries miss none; equal gains go to the lowest index."""
    scores, protected, positions = random_case(seed)
    scores = (scores * 4).round() / 4
    expected = Greedy().select(scores, keep, protected=protected, positions=positions)
    selector = StochasticGreedy(epsilon=1e-300)
    assert torch.equal(selector.select(scores, keep, protected=protected, positions=positions), expected)


def test_chosen_entries_are_not_drawn_again():
    """One draw a step, all but one of 20 kept: each of the remaining is drawn alike, so any may be the one left."""
    scores = torch.arange(1.0, 21).expand(400, -1)
    chosen = StochasticGreedy(kernel=1, epsilon=0.95).select(scores, 19, protected=torch.zeros(400, 20).bool())
    left = 190 - chosen.sum(-1)
    assert len(left.unique()) == 20 and left.double().mean().item() == pytest.approx(9.5, abs=1.2)


def test_a_policy_passes_positions_on():
    """Survivors of earlier evictions are side by side in the cache, yet far apart: none makes another redundant."""
    scores = torch.tensor([0.1, 0.8, 0.9, 0.8, 0.1, 0.1, 0.1, 0.4, 0.1])
    keys = (1 - scores).expand(2, 1, -1)[..., None]  # knorm: the smallest keys score best
    view = CacheView(
        keys=keys,
        values=keys,
        positions=torch.stack([torch.arange(9), 5 * torch.arange(9)])[:, None],
        seen=torch.tensor([9, 41]),
        budget=2,
        protected=torch.zeros(2, 1, 9, dtype=torch.bool),
    )
    for counts in (2, [2, 2]):
        for scope in ("head", "layer"):
            chosen = choose(Policy.parse(f"knorm/greedy@{scope}"), [view], 0.8, counts)[0]
            assert chosen.tolist() == [[[2, 7]], [[1, 2]]]


def test_heads_draw_for_themselves():
    scores = clustered(200).expand(2, 2, -1)
    chosen = StochasticGreedy().select(scores, 30, protected=torch.zeros(2, 2, 200, dtype=torch.bool))
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0, 0], chosen[0, 1])


def test_selectors_in_a_policy():
    for text in (
        "knorm/greedy",
        "snapkv+hub/greedy(kernel=3, shape='box')",
        "knorm/stochastic(epsilon=0.2, seed=1)@layer",
    ):
        policy = Policy.parse(text)
        assert Policy.parse(str(policy)) == policy and Policy.from_dict(policy.to_dict()) == policy


@each
def test_errors_of_the_selectors(selector):
    scores = torch.rand(2, 9)
    with pytest.raises(ValueError, match="5 entries are protected, but only 4 may be kept"):
        selector.select(scores, 4, protected=(torch.arange(9) < 5).expand(2, -1))
    with pytest.raises(ValueError, match="positions must ascend strictly"):
        none = torch.zeros(2, 9, dtype=torch.bool)
        selector.select(scores, 4, protected=none, positions=torch.zeros(2, 9, dtype=torch.int64))


@pytest.mark.parametrize(
    ("cls", "field", "value", "message"),
    [
        (Greedy, "kernel", 4, "greedy: kernel must be an odd whole number of at least 1, not 4"),
        (Greedy, "shape", "gauss", "greedy: unknown shape 'gauss'; valid: box, triangle"),
        (StochasticGreedy, "kernel", 0, "stochastic: kernel .* not 0"),
        (StochasticGreedy, "epsilon", 1.0, r"stochastic: epsilon must be in \(0, 1\), not 1.0"),
        (StochasticGreedy, "seed", -1, "stochastic: seed must be a whole number of at least 0, not -1"),
    ],
)
def test_fields_are_validated(cls, field, value, message):
    with pytest.raises(ValueError, match=message):
        cls(**{field: value})
