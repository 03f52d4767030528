"""HubKV's theory, statement by statement; ``docs/theory.md`` links to these tests by name."""

from __future__ import annotations

import doctest
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvretain import coverage, hub_refine, select_topk, theory

quick = settings(max_examples=60, deadline=None)
# Eighths are exact in floating point.
level = st.integers(0, 8).map(lambda n: n / 8)
fine = st.floats(0, 1, width=32, allow_subnormal=False)


def matrices(largest: int = 6, least: int = 1):
    return st.tuples(st.integers(1, 6), st.integers(least, largest)).flatmap(
        lambda shape: st.lists(
            st.lists(level, min_size=shape[1], max_size=shape[1]), min_size=shape[0], max_size=shape[0]
        ).map(lambda rows: torch.tensor(rows, dtype=torch.float64))
    )


scored = st.lists(st.one_of(level, fine), min_size=2, max_size=30)
ratios = st.floats(0, 0.999)
betas = st.floats(0.01, 10)


# --- the objective --------------------------------------------------------------------------------


@given(weights=matrices())
@quick
def test_coverage_is_monotone_and_submodular(weights):
    """For all A within B and v outside B: F(A) <= F(B) and F(A + v) - F(A) >= F(B + v) - F(B). All sets are tried."""
    size = weights.shape[1]
    value = {
        frozenset(s): float(coverage(weights, s))
        for k in range(size + 1)
        for s in itertools.combinations(range(size), k)
    }
    assert value[frozenset()] == 0
    for small, large in itertools.product(value, value):
        if small <= large:
            assert value[small] <= value[large]
            for v in set(range(size)) - large:
                assert value[small | {v}] - value[small] >= value[large | {v}] - value[large]


@given(weights=matrices())
@quick
def test_marginal_gains_are_differences(weights):
    for count in range(weights.shape[1] + 1):
        chosen = list(range(count))
        expected = [float(coverage(weights, [*chosen, j]) - coverage(weights, chosen)) for j in range(weights.shape[1])]
        assert theory.marginal_gains(weights, chosen).tolist() == expected


@given(scores=scored, kernel=st.sampled_from([1, 3, 5, 9]), shape=st.sampled_from(["box", "triangle"]))
@quick
def test_an_entry_alone_is_worth_its_score(scores, kernel, shape):
    """F({i}) = s_i under local weights, at the sequence's ends too, and F(S) <= sum of the scores in S."""
    s = torch.tensor(scores, dtype=torch.float64)
    weights = theory.local_weights(s, kernel, shape)
    assert weights.shape == (len(s) + kernel - 1, len(s))
    torch.testing.assert_close(theory.marginal_gains(weights, []), s)
    assert coverage(weights, range(len(s))) <= s.sum() + 1e-9
    if kernel == 1:  # no overlap: F is modular, and its optimum is top-k
        assert float(coverage(weights, range(len(s)))) == pytest.approx(float(s.sum()))


def test_local_kernels():
    assert (9 * theory.local_kernel(5)).tolist() == pytest.approx([1, 2, 3, 2, 1])
    assert theory.local_kernel(5, "box").tolist() == pytest.approx([0.2] * 5)
    assert theory.local_kernel(1).tolist() == [1]
    gaps = theory.local_weights(torch.ones(2), 3, "box", positions=torch.tensor([4, 8]))
    assert (gaps * 3).round().T.tolist() == [[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1]]
    late = theory.local_weights(torch.ones(2), 3, "box", positions=torch.tensor([2**63 - 5, 2**63 - 1]))
    assert torch.equal(late, gaps)  # distances count, not places


@given(weights=matrices(), data=st.data())
@quick
def test_brute_force_is_the_optimum(weights, data):
    size = weights.shape[1]
    keep = data.draw(st.integers(1, size))
    best = theory.best_subset(weights, keep)
    values = {s: float(coverage(weights, s)) for s in itertools.combinations(range(size), keep)}
    assert best.value == max(values.values())
    assert tuple(best.chosen.tolist()) == min(s for s, value in values.items() if value == best.value)


def test_brute_force_takes_the_first_of_equals():
    assert theory.best_subset(torch.ones(1, 16), 6).chosen.tolist() == list(range(6))  # 8,008 sets, in several blocks


# --- Local Hub Dominance --------------------------------------------------------------------------


@given(scores=scored, discount=st.floats(0, 1), kernel=st.sampled_from([3, 5, 7]))
@quick
def test_local_hub_dominance(scores, discount, kernel):
    """h the only maximum of its window, i in it: s_h > discount * s_i. And the pairs are those of the definition."""
    s = torch.tensor(scores, dtype=torch.float64)
    pairs = theory.dominance_pairs(s, kernel)
    for h, i in pairs.tolist():
        assert s[h] > discount * s[i] and s[h] > s[i] and 0 < abs(h - i) <= kernel // 2
    expected = []
    for h in range(len(s)):
        window = [i for i in range(max(0, h - kernel // 2), min(len(s), h + kernel // 2 + 1)) if i != h]
        if all(scores[h] > scores[i] for i in window):
            expected += [[h, i] for i in window]
    assert pairs.tolist() == expected


@given(scores=scored, ratio=st.floats(0.1, 0.999))
@quick
def test_dominated_entries_are_no_hubs(scores, ratio):
    """Strengthening 1: i's own window contains h, so i is discounted."""
    s = torch.tensor(scores, dtype=torch.float64)[None]
    z = hub_refine(s, ratio, calibrate=False)[0]
    factors = theory.score_factors(ratio)
    for h, i in theory.dominance_pairs(s[0]).tolist():
        assert z[h] == s[0, h]
        assert float(z[i]) == pytest.approx(factors.other_neutral * float(s[0, i]), abs=1e-300)


@given(scores=scored, beta=betas, alpha=st.floats(0, 1), discount=st.floats(0, 1))
@quick
def test_dominance_survives_head_weight_and_gate(scores, beta, alpha, discount):
    """Strengthening 2: z_h > z_i for every beta > 0 and alpha in [0, 1], from the formula itself."""
    s = torch.tensor(scores, dtype=torch.float64)
    for h, i in theory.dominance_pairs(s).tolist():
        assert s[h] + alpha * (beta * s[h] - s[h]) > s[i] + alpha * (beta * discount * s[i] - s[i])


@given(rows=st.lists(scored, min_size=2, max_size=3), ratio=ratios, low=st.floats(0.05, 1), high=st.floats(1, 5))
@quick
def test_dominance_survives_refinement_within_a_head(rows, ratio, low, high):
    """Strengthening 2 on the product's own function, heads weighted against each other."""
    size = min(map(len, rows))
    s = torch.tensor([row[:size] for row in rows], dtype=torch.float64)
    z = hub_refine(s, ratio, weight_clip=(low, high), weight_exponent=1.0)
    for head in range(len(rows)):
        for h, i in theory.dominance_pairs(s[head]).tolist():
            assert z[head, h] > z[head, i]


def test_dominance_does_not_hold_across_heads():
    """A flat head's hub loses to a smaller score at the same place of a sharp head."""
    flat = [0.40, 0.42, 0.50, 0.41, 0.40, 0.40, 0.40, 0.40]
    sharp = [0.00, 0.00, 0.45, 0.00, 0.00, 0.00, 0.00, 0.00]
    s = torch.tensor([flat, sharp])
    z = hub_refine(s, 0.9)
    assert s[0, 2] > s[1, 2] and [2, 1] in theory.dominance_pairs(s[0]).tolist()
    assert z[0, 2] < z[1, 2]
    assert z[0, 2] > z[0, 1]


def test_dominance_needs_a_unique_peak_and_an_unprotected_pair():
    tied = torch.tensor([[0.5, 0.5, 0.1]])
    z = hub_refine(tied, 0.9, calibrate=False)[0]
    assert theory.dominance_pairs(tied[0]).numel() == 0
    assert z[1] < z[0]  # the second peak is discounted like any neighbour
    s = torch.tensor([[0.5, 0.9, 0.1]])
    protected = torch.tensor([True, False, False])
    z = hub_refine(s, 0.9, protected=protected)
    assert [1, 0] in theory.dominance_pairs(s[0]).tolist()
    assert select_topk(z, 1, protected=protected).tolist() == [[0]]


# --- the Local Marginal Sandwich ------------------------------------------------------------------


@given(weights=matrices(least=2), discount=st.floats(0, 1), data=st.data())
@quick
def test_the_sandwich_is_an_equality(weights, discount, data):
    """gain = (1 - rho) s_i, hence |gain - discount s_i| = |1 - rho - discount| s_i, the least slack there is."""
    i, h = data.draw(st.permutations(range(weights.shape[1])))[:2]
    own = float(weights[:, i].sum())
    assume(own > 0)
    bound = theory.marginal_sandwich(weights, i, h, discount)
    assert 0 <= bound.overlap <= 1
    assert bound.gain == pytest.approx((1 - bound.overlap) * own, abs=1e-12)
    assert bound.gain == theory.marginal_gains(weights, [h])[i]
    assert bound.proxy == pytest.approx(discount * own)
    assert abs(bound.gain - bound.proxy) == pytest.approx(bound.slack * own, abs=1e-12)
    assert bound.slack == pytest.approx(abs(bound.overlap - (1 - discount)), abs=1e-12)


@given(weights=matrices(least=2), discount=st.floats(0, 1), data=st.data())
@quick
def test_only_the_upper_side_survives_more_hubs(weights, discount, data):
    """h in S: 0 <= F(S + i) - F(S) <= F({h, i}) - F({h}) <= (discount + slack) s_i."""
    size = weights.shape[1]
    i, h = data.draw(st.permutations(range(size)))[:2]
    assume(float(weights[:, i].sum()) > 0)
    chosen = sorted({h, *data.draw(st.sets(st.integers(0, size - 1)))} - {i})
    bound = theory.marginal_sandwich(weights, i, h, discount)
    gain = float(theory.marginal_gains(weights, chosen)[i])
    assert 0 <= gain <= bound.gain <= (discount + bound.slack) * float(weights[:, i].sum()) + 1e-12


def test_the_lower_side_fails_with_two_hubs():
    """Two hubs may leave nothing of i, while the discount still credits half."""
    weights = theory.local_weights(torch.tensor([2.0, 1.0, 2.0]), 5, "box", positions=torch.tensor([0, 2, 4]))
    bound = theory.marginal_sandwich(weights, 1, 0)
    assert bound.gain == pytest.approx(0.4) and theory.marginal_gains(weights, [0, 2])[1] == 0


@pytest.mark.parametrize(
    ("shape", "score_ratio", "near", "far", "slack"),
    [
        ("box", 1.0, 0.800, 0.600, 0.300),
        ("box", 1.5, 0.800, 0.600, 0.300),
        ("box", 100.0, 0.800, 0.600, 0.300),
        ("triangle", 1.0, 0.667, 0.444, 0.167),
        ("triangle", 1.25, 0.750, 0.472, 0.250),
        ("triangle", 2.0, 0.889, 0.556, 0.389),
    ],
)
def test_the_worked_overlaps(shape, score_ratio, near, far, slack):
    """The table of hubkv.md, section 3: rho at distances 1 and 2, and the slack that a discount of 0.5 needs there."""
    overlaps = [theory.local_overlap(distance, score_ratio, 5, shape) for distance in (1, 2)]
    assert [round(rho, 3) for rho in overlaps] == [near, far]
    assert round(max(abs(1 - rho - 0.5) for rho in overlaps), 3) == slack
    assert theory.local_overlap(5, score_ratio, 5, shape) == theory.local_overlap(10**15, score_ratio, 5, shape) == 0


# --- Bounded Perturbation -------------------------------------------------------------------------

TABLE = """
| 0.50 | 0.2500 | 0.9500–1.0500 | 0.8500–0.9000 | 0.8750 | 1.143 | 1.235 |
| 0.75 | 0.5625 | 0.8875–1.1125 | 0.6625–0.7750 | 0.7188 | 1.391 | 1.679 |
| 0.80 | 0.6400 | 0.8720–1.1280 | 0.6160–0.7440 | 0.6800 | 1.471 | 1.831 |
| 0.85 | 0.7225 | 0.8555–1.1445 | 0.5665–0.7110 | 0.6388 | 1.566 | 2.020 |
| 0.88 | 0.7744 | 0.8451–1.1549 | 0.5354–0.6902 | 0.6128 | 1.632 | 2.157 |
| 0.90 | 0.8100 | 0.8380–1.1620 | 0.5140–0.6760 | 0.5950 | 1.681 | 2.261 |
| 0.95 | 0.9025 | 0.8195–1.1805 | 0.4585–0.6390 | 0.5488 | 1.822 | 2.575 |
"""
"""Section 1.2 of hubkv.md: r, gate, hub factors, non-hub factors, non-hub at weight 1, flip ratios (one head, any)."""


@pytest.mark.parametrize("line", TABLE.strip().splitlines(), ids=lambda line: line[2:6])
def test_the_factor_table(line):
    numbers = [float(number) for number in re.findall(r"[\d.]+", line)]
    factors = theory.score_factors(numbers[0])
    computed = [
        factors.gate, *factors.hub, *factors.other, factors.other_neutral, factors.flip_same_head, factors.flip_any
    ]  # fmt: skip
    # Half a unit of the last printed digit: some entries lie exactly between two roundings.
    tolerances = [0.5e-4] * 6 + [0.5e-3] * 2
    for value, printed, tolerance in zip(computed, numbers[1:], tolerances, strict=True):
        assert abs(value - printed) <= tolerance + 1e-12


@given(rows=st.lists(scored, min_size=1, max_size=3), ratio=ratios)
@quick
def test_bounded_perturbation(rows, ratio):
    """z = (1 - alpha) s + alpha u; -0.6 alpha s <= z - s <= 0.2 alpha s; and each factor is in its range."""
    size = min(map(len, rows))
    s = torch.tensor([row[:size] for row in rows], dtype=torch.float64)
    z, factors = hub_refine(s, ratio), theory.score_factors(ratio)
    ungated = hub_refine(s, 0.5, gate_exponent=0.0)
    torch.testing.assert_close(z, (1 - factors.gate) * s + factors.gate * ungated, rtol=1e-12, atol=1e-15)
    low, high = factors.change
    assert (low, high) == pytest.approx((-0.6 * factors.gate, 0.2 * factors.gate), abs=1e-12)
    assert bool((z - s >= low * s - 1e-12).all()) and bool((z - s <= high * s + 1e-12).all())
    hub = hub_refine(s, 0.5, calibrate=False) == s
    for mask, (least, most) in ((hub, factors.hub), (~hub, factors.other)):
        assert bool((z >= least * s - 1e-12)[mask].all()) and bool((z <= most * s + 1e-12)[mask].all())


@given(rows=st.lists(scored, min_size=2, max_size=3), ratio=ratios)
@quick
def test_clear_leads_are_kept(rows, ratio):
    """s_a > flip_any * s_b keeps the order in whatever heads; s_a > flip_same_head * s_b within a head of weight 1."""
    size = min(map(len, rows))
    s = torch.tensor([row[:size] for row in rows], dtype=torch.float64)
    factors = theory.score_factors(ratio)
    for z, flip in (
        (hub_refine(s, ratio), factors.flip_any),
        (hub_refine(s, ratio, calibrate=False), factors.flip_same_head),
    ):
        before, after = s.flatten(), z.flatten()
        clear = before[:, None] > flip * before * (1 + 1e-12)
        assert bool((after[:, None] > after)[clear].all())


@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9, 0.95])
def test_the_flip_ratios_are_sharp(ratio):
    """Just below them the order flips: a non-hub beside its peak against a lone hub, in one head and in two."""
    factors = theory.score_factors(ratio)
    lone, beaten = 1.0, 0.999 * factors.flip_same_head
    s = torch.tensor([[3.0, beaten, 0.0, 0.0, 0.0, lone, 0.0]], dtype=torch.float64)
    z = hub_refine(s, ratio, calibrate=False)[0]
    assert s[0, 1] > s[0, 5] and z[1] < z[5]
    # A flat head weighs 0.8, a sharp one 1.2.
    beaten = 0.999 * factors.flip_any
    s = torch.full((2, 64), beaten, dtype=torch.float64)
    s[0, 0], s[1], s[1, 9] = beaten * 1.001, 0.0, lone
    z = hub_refine(s, ratio)
    assert s[0, 1] > s[1, 9] and z[0, 1] < z[1, 9]


@given(scores=scored, ratio=ratios, gate=st.floats(0, 1), beta=betas)
@quick
def test_the_head_weight_only_moves_the_effective_discount(scores, ratio, gate, beta):
    """Within a head, calibration acts through one number, between the discount and 1; it cancels as the gate opens."""
    discount = theory.effective_discount(gate, beta)
    assert 0.5 - 1e-9 <= discount <= 1 + 1e-9
    assert theory.effective_discount(1.0, beta) == pytest.approx(0.5)
    assert theory.effective_discount(0.0, beta) == 1
    s = torch.tensor([scores, [1.0] * len(scores)], dtype=torch.float64)
    z, factors = hub_refine(s, ratio), theory.score_factors(ratio)
    positive = [(float(a), float(b)) for a, b in zip(s[0], z[0], strict=True) if a > 1e-6]
    if not positive or ratio < 0.1:
        return
    observed = [b / a for a, b in positive]
    weight = 1 + (max(observed) - 1) / factors.gate  # the largest positive score is a hub
    if min(observed) < max(observed) * (1 - 1e-9):
        assert min(observed) / max(observed) == pytest.approx(theory.effective_discount(factors.gate, weight))


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.5, 0.857, 0.895), (0.75, 0.697, 0.746), (0.9999, 0.5, 0.5)])
def test_calibration_moves_the_effective_discount_slightly(ratio, low, high):
    """The range over all head weights that the default clip allows, from a formula and from the product's own heads."""
    gate = theory.score_factors(ratio).gate
    assert round(theory.effective_discount(gate, 1.2), 3) == low
    assert round(theory.effective_discount(gate, 0.8), 3) == high
    # The first head is sharp and weighs 1.2, the second is almost flat and weighs 0.8; entry 0 is a hub, 1 is not.
    s = torch.full((2, 64), 0.5, dtype=torch.float64)
    s[0, 2:], s[:, 0] = 0.0, torch.tensor([1.0, 0.501])
    factors = (hub_refine(s, ratio) / s)[:, :2]
    assert factors[:, 0].tolist() == pytest.approx([1 + 0.2 * gate, 1 - 0.2 * gate])
    assert [round(discount, 3) for discount in (factors[:, 1] / factors[:, 0]).tolist()] == [low, high]


# --- what must not be claimed ---------------------------------------------------------------------


def kept(scores: torch.Tensor, keep: int) -> tuple[list[int], list[int]]:
    """What HubKV, with its defaults and the ratio that belongs to ``keep``, and top-k keep of one head."""
    z = hub_refine(scores[None], 1 - keep / len(scores))[0]
    return select_topk(z, keep).tolist(), select_topk(scores, keep).tolist()


def test_hub_can_cover_less_than_top_k():
    """A non-hub at the edge of its hub's window adds more than half its score; a slightly better lone entry wins."""
    scores = torch.zeros(40)
    scores[0], scores[2], scores[20] = 1.0, 0.999, 0.553
    weights = theory.local_weights(scores)
    hub, top = kept(scores, 2)
    assert hub == [0, 20] and top == [0, 2]
    assert coverage(weights, hub) < coverage(weights, top) == theory.best_subset(weights, 2).value


def test_calibration_can_change_what_a_head_keeps():
    """A sharp head weighs 1.2, which discounts its second entry by 0.697 in place of 0.719: a lone entry passes it."""
    s = torch.tensor([[1.0, 0.9, 0.0, 0.0, 0.635, 0.0, 0.0, 0.0], [0.5] * 8])
    calibrated, plain = (select_topk(hub_refine(s, 0.75, calibrate=on), 2) for on in (True, False))
    assert calibrated[0].tolist() == [0, 4] and plain[0].tolist() == [0, 1]
    almost = [select_topk(hub_refine(s, 0.9999, calibrate=on), 2)[0].tolist() for on in (True, False)]
    assert almost[0] == almost[1] == [0, 4]  # with the gate open the weight cancels


def test_how_often_calibration_changes_what_a_head_keeps():
    """Pairs of a flat and a sharp head: in about a sixth of 600 pairs a head keeps others for being calibrated."""
    rng = torch.Generator().manual_seed(0)
    s = torch.rand(600, 2, 64, generator=rng)
    s[:, 1] **= 4
    calibrated, plain = (select_topk(hub_refine(s, 0.75, calibrate=on), 16) for on in (True, False))
    assert 80 <= int((calibrated != plain).flatten(1).any(-1).sum()) <= 130


def test_hub_carries_no_greedy_guarantee():
    """On a ramp without overlap (F is modular, top-k is optimal) HubKV falls below (1 - 1/e) of the optimum."""
    scores = torch.zeros(320)
    scores[:16] = torch.linspace(0.99, 1.0, 16)
    scores[20:80:3] = 0.56
    weights = theory.local_weights(scores, kernel=1)
    hub, top = kept(scores, 16)
    assert coverage(weights, top) == pytest.approx(float(scores.topk(16).values.sum()))
    assert coverage(weights, hub) < (1 - 1 / math.e) * coverage(weights, top)


# --- the module itself ----------------------------------------------------------------------------


def test_the_documented_examples():
    assert doctest.testmod(theory).failed == 0


def test_the_docs_name_tests_that_exist():
    """Every statement of docs/theory.md points to a test by name, and every test it names is there."""
    root = Path(__file__).parents[1]
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", (root / "docs" / "theory.md").read_text()))
    assert len(named) > 20
    for file, test in named:
        assert f"\ndef {test}(" in (root / file).read_text(), f"{file}::{test}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.local_kernel(4), "local_kernel: kernel must be an odd whole number of at least 1, not 4"),
        (lambda: theory.local_kernel(5, "cone"), "local_kernel: unknown shape 'cone'; valid: box, triangle"),
        (
            lambda: theory.local_weights(torch.rand(2, 2)),
            r"local_weights: scores must be real of shape \(N,\)",
        ),
        (lambda: theory.local_weights(torch.rand(0)), "local_weights: scores must hold at least one entry"),
        (lambda: theory.local_weights([1.0]), "local_weights: scores must be a tensor, not list"),
        (lambda: theory.local_weights(torch.tensor([True])), "local_weights: scores must be real .* torch.bool"),
        (lambda: theory.local_weights(torch.tensor([1j])), "local_weights: scores must be real .* torch.complex64"),
        (lambda: theory.local_weights(torch.tensor([math.nan])), "local_weights: weights must be finite .* nan"),
        (
            lambda: theory.local_weights(torch.rand(2), positions=torch.tensor([0.0, 1.5])),
            "local_weights: positions must be integers, not torch.float32",
        ),
        (
            lambda: theory.local_weights(torch.rand(2), positions=torch.tensor([False, True])),
            "local_weights: positions must be integers, not torch.bool",
        ),
        (lambda: theory.local_weights(torch.rand(2), positions=[0, 1]), "positions must be a tensor, not list"),
        (
            lambda: theory.local_weights(torch.rand(2), positions=torch.tensor([0, 10**12])),
            "local_weights: positions from 0 to 1000000000000 need 2,000,000,000,010 weights; at most 268,435,456",
        ),
        (lambda: theory.local_overlap(1.5), "local_overlap: distance must be a whole number of at least 0, not 1.5"),
        (lambda: theory.local_overlap(-1), "local_overlap: distance .* not -1"),
        (lambda: theory.local_overlap(1, -0.5), "local_overlap: score_ratio must be finite and >= 0, not -0.5"),
        (lambda: theory.local_overlap(1, math.nan), "local_overlap: score_ratio .* not nan"),
        (lambda: theory.local_overlap(1, "2"), "local_overlap: score_ratio .* not '2'"),
        (lambda: theory.local_overlap(1, kernel=4), "local_overlap: kernel must be an odd whole number"),
        (lambda: theory.local_weights(torch.tensor([-1.0])), "local_weights: weights must be finite and >= 0"),
        (
            lambda: theory.local_weights(torch.rand(2), positions=torch.arange(3)),
            r"positions must be \(2,\), not \(3,\)",
        ),
        (
            lambda: theory.marginal_gains(torch.rand(2, 3), [3]),
            "marginal_gains: chosen must be from 0 to 2, but one is 3",
        ),
        (lambda: theory.marginal_gains([[1.0]], [0]), "marginal_gains: kernel_matrix must be a tensor, not list"),
        (lambda: theory.marginal_gains(torch.rand(2, 3), None), "marginal_gains: chosen must be integer indices"),
        (
            lambda: theory.overlap(torch.zeros(2, 3), 0, 1),
            "overlap: entry 0 has no weight, so its overlap is undefined",
        ),
        (lambda: theory.overlap(torch.rand(2, 3), 0.5, 1), "overlap: i must be a whole number, not 0.5"),
        (lambda: theory.overlap(torch.rand(2, 3), 0, True), "overlap: h must be a whole number, not True"),
        (lambda: theory.overlap(torch.rand(2, 3), 0, 3), "overlap: h must be from 0 to 2, not 3"),
        (lambda: theory.overlap(torch.rand(2, 3), -1, 0), "overlap: i must be from 0 to 2, not -1"),
        (lambda: theory.overlap([[1.0]], 0, 0), "overlap: kernel_matrix must be a tensor, not list"),
        *(
            (
                lambda value=value: theory.marginal_sandwich(torch.rand(2, 3), 0, 1, value),
                f"marginal_sandwich: discount must be a number from 0 to 1, not {value!r}",
            )
            for value in (5, -0.1, math.nan, "0.5", True)
        ),
        (lambda: theory.marginal_sandwich(torch.rand(2, 3), 7, 1), "overlap: i must be from 0 to 2, not 7"),
        (
            lambda: theory.best_subset(torch.rand(2, 3), 4),
            "best_subset: keep must be from 1 to the 3 entries there are, not 4",
        ),
        (lambda: theory.best_subset(torch.rand(2, 3), 2.5), "best_subset: keep must be a whole number, not 2.5"),
        (lambda: theory.best_subset(torch.rand(2, 3), True), "best_subset: keep must be a whole number, not True"),
        (lambda: theory.best_subset(torch.rand(3), 1), r"best_subset: kernel_matrix must be real of shape \(X, N\)"),
        (lambda: theory.best_subset([[1.0]], 1), "best_subset: kernel_matrix must be a tensor, not list"),
        (
            lambda: theory.best_subset(torch.rand(2, 60), 30),
            "best_subset: 118,264,581,564,861,424 sets of 30 out of 60",
        ),
        (lambda: theory.score_factors(1.0), r"score_factors: ratio is the fraction removed and must be in \[0, 1\)"),
        *(
            (lambda value=value: theory.score_factors(value), f"score_factors: ratio .* not {value!r}")
            for value in (-0.1, math.nan, "0.5", True)
        ),
        (lambda: theory.score_factors(0.5, discount=5.0), "discount must be a number from 0 to 1, not 5.0"),
        *(
            (lambda value=value: theory.score_factors(0.5, weight_clip=value), r"weight_clip must be \(low, high\)")
            for value in ((2.0, 1.0), (0.8, math.inf), (math.nan, 1.2), (0.8, 1.0, 1.2), (-0.1, 1.0), 1.0, "12")
        ),
        *(
            (
                lambda value=value: theory.score_factors(0.5, gate_exponent=value),
                f"gate_exponent must be finite and >= 0, not {value!r}",
            )
            for value in (-1, math.nan, math.inf, "2")
        ),
        (lambda: theory.dominance_pairs(torch.tensor([1.0, -2.0])), "dominance_pairs: scores must be >= 0"),
        (
            lambda: theory.dominance_pairs(torch.rand(2, 3)),
            r"dominance_pairs: scores must be real of shape \(N,\)",
        ),
        (lambda: theory.dominance_pairs([1.0, 2.0]), "dominance_pairs: scores must be a tensor, not list"),
        (lambda: theory.dominance_pairs(torch.tensor([True])), "dominance_pairs: scores must be real .* torch.bool"),
        (lambda: theory.dominance_pairs(torch.rand(3), 2), "dominance_pairs: kernel must be an odd whole number"),
        (lambda: theory.marginal_gains(torch.rand(2, 3), [[0], [1]]), r"chosen must be one set \(K,\), not \(2, 1\)"),
        (lambda: theory.effective_discount(1.0, 0.0), "effective_discount: at gate 1.0 and weight 0.0"),
        (lambda: theory.effective_discount(1.5), "effective_discount: gate must be a number from 0 to 1, not 1.5"),
        *(
            (
                lambda value=value: theory.effective_discount(0.5, value),
                f"effective_discount: weight must be finite and >= 0, not {value!r}",
            )
            for value in (-0.5, math.inf, math.nan, "1")
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
