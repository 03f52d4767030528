"""HubKV: a naive reference, the sharp consequences of its formula, and every error."""

from __future__ import annotations

import doctest
import importlib
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvretain.refine import Hub, hub_refine, refiners

RATIOS = (0.5, 0.75, 0.8, 0.85, 0.88, 0.9, 0.95)

quick = settings(max_examples=60, deadline=None)
# Few distinct values, so that ties and plateaus are common, as in scores born in bfloat16.
coarse = st.integers(0, 6).map(lambda level: level / 8)
fine = st.floats(0, 1, width=32, allow_subnormal=False)
grids = st.integers(1, 3).flatmap(
    lambda heads: st.integers(0, 24).flatmap(
        lambda size: st.lists(
            st.lists(st.one_of(coarse, fine), min_size=size, max_size=size), min_size=heads, max_size=heads
        )
    )
)


def reference(
    scores: list[list[float]],
    ratio: float,
    kernel: int = 5,
    discount: float = 0.5,
    weight_exponent: float = 0.5,
    weight_clip: tuple[float, float] = (0.8, 1.2),
    gate_exponent: float = 2.0,
    calibrate: bool = True,
    positions: list[list[int]] | None = None,
    protected: list[list[bool]] | None = None,
) -> list[list[float]]:
    """DESIGN.md's reading of HubKV, one double loop per head."""
    size = len(scores[0])
    positions = positions or [list(range(size))] * len(scores)
    protected = protected or [[False] * size] * len(scores)
    open_ = [
        [i for i in range(size) if not shut[i] and p[i] >= 0] for p, shut in zip(positions, protected, strict=True)
    ]
    selectivity = []
    for s, free in zip(scores, open_, strict=True):
        mean = sum(s[i] for i in free) / max(len(free), 1)
        spread = math.sqrt(sum((s[i] - mean) ** 2 for i in free) / max(len(free), 1))
        selectivity.append(None if mean == 0 else spread / mean if spread / mean > 1e-5 else 0.0)
    alive = [value for value in selectivity if value is not None]
    typical = sum(alive) / len(alive) if alive else 0.0
    alpha = ratio**gate_exponent
    refined = []
    for s, p, free, own in zip(scores, positions, open_, selectivity, strict=True):
        beta = 1.0
        if calibrate and typical > 0 and own is not None:
            beta = min(max((own / typical) ** weight_exponent, weight_clip[0]), weight_clip[1])
        z = list(s)
        for i in free:
            hub = True
            for j in free:
                if j != i and abs(p[j] - p[i]) <= kernel // 2 and (s[j] > s[i] or (s[j] == s[i] and p[j] < p[i])):
                    hub = False
            z[i] = s[i] + alpha * (beta * (s[i] if hub else discount * s[i]) - s[i])
        refined.append(z)
    return refined


def hubs(row: list[float], **options) -> list[int]:
    """Indices of the positive entries that keep their score."""
    s = torch.tensor([row])
    z = hub_refine(s, 0.9, calibrate=False, **options)
    return ((z == s) & (s > 0))[0].nonzero()[:, 0].tolist()


def random_case(seed: int, batch: int = 2, heads: int = 3, size: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with ties, positions with gaps and padding anywhere, protected entries anywhere."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, heads, size, generator=rng)
    scores = torch.where(torch.rand(scores.shape, generator=rng) < 0.5, (scores * 8).round() / 8, scores)
    positions = torch.randint(1, 4, scores.shape, generator=rng).cumsum(-1) - 1
    positions = positions.masked_fill(torch.rand(scores.shape, generator=rng) < 0.15, -1)
    return scores, positions, torch.rand(scores.shape, generator=rng) < 0.2


OPTIONS = [
    {},
    {"kernel": 1},
    {"kernel": 3, "discount": 0.0},
    {"kernel": 9, "discount": 1.0, "gate_exponent": 1.0},
    {"weight_exponent": 2.0, "weight_clip": (0.0, 3.0), "gate_exponent": 0.0},
    {"calibrate": False, "gate_exponent": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_the_naive_reference(options, dtype):
    for seed in range(6):
        scores, positions, protected = random_case(seed)
        scores = scores.to(dtype)
        z = hub_refine(scores, 0.9, positions=positions, protected=protected, **options)
        assert z.dtype == dtype and z.shape == scores.shape
        for row in range(len(scores)):
            grid = [x[row].tolist() for x in (scores, positions, protected)]
            expected = reference(grid[0], 0.9, positions=grid[1], protected=grid[2], **options)
            torch.testing.assert_close(z[row], torch.tensor(expected, dtype=dtype), rtol=2e-6, atol=1e-7)


@given(grid=grids, ratio=st.floats(0, 0.99))
@quick
def test_equals_the_naive_reference_without_positions(grid, ratio):
    expected = torch.tensor(reference(grid, ratio), dtype=torch.float64)
    z = hub_refine(torch.tensor(grid, dtype=torch.float64), ratio)
    torch.testing.assert_close(z, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("ratio", RATIOS)
def test_factors_are_those_of_the_table(ratio):
    """z / s is 1 + alpha (beta - 1) for hubs and 1 - alpha (1 - gamma beta) for others, with beta in [0.8, 1.2]."""
    rng = torch.Generator().manual_seed(1)
    scores = torch.rand(3, 200, generator=rng, dtype=torch.float64) ** torch.tensor([[8.0], [2.0], [0.1]]) + 1e-3
    alpha, factors = ratio**2, hub_refine(scores, ratio) / scores
    betas = []
    for factor in factors:
        low, high = factor.min().item(), factor.max().item()
        assert torch.minimum((factor - low).abs(), (factor - high).abs()).max() < 1e-9
        beta = 1 + (high - 1) / alpha
        assert low == pytest.approx(1 - alpha * (1 - 0.5 * beta))
        betas.append(beta)
    assert betas[0] == pytest.approx(1.2) and 0.8 < betas[1] < 1.2 and betas[2] == pytest.approx(0.8)


@given(row=st.lists(st.one_of(coarse, fine), min_size=1, max_size=30))
@quick
def test_two_hubs_are_at_least_three_apart(row):
    found = hubs(row)
    assert all(b - a >= 3 for a, b in pairwise(found))
    assert not max(row) or row.index(max(row)) in found


def test_a_plateau_has_one_hub():
    assert hubs([0, 0.5, 0.5, 0.5, 0]) == [1]
    assert hubs([0.5] * 5) == [0]
    assert hubs([0.5, 0.1, 0.1, 0.5]) == [0, 3]
    assert hubs([0.5, 0.1, 0.5]) == [0]


def test_all_entries_of_a_ramp_but_the_last_are_discounted():
    assert hubs([1.0, 2, 3, 4, 5, 6, 7, 8]) == [7]


@given(grid=grids, power=st.integers(-60, 60), ratio=st.floats(0, 0.99))
@quick
def test_homogeneity(grid, power, ratio):
    scores = torch.tensor(grid) + torch.tensor(0.01)
    assert torch.equal(hub_refine(scores * 2.0**power, ratio), hub_refine(scores, ratio) * 2.0**power)


@given(row=st.lists(fine, min_size=2, max_size=30), ratio=st.floats(0.01, 0.99))
@quick
def test_local_hub_dominance(row, ratio):
    """A unique window maximum stays strictly above everything in its window, in its head."""
    z = hub_refine(torch.tensor([row], dtype=torch.float64), ratio)[0].tolist()
    for h in range(len(row)):
        window = [i for i in range(len(row)) if 0 < abs(i - h) <= 2]
        if all(row[h] > row[i] for i in window):
            assert all(z[h] > z[i] for i in window)


@given(seed=st.integers(0, 2**20))
@settings(max_examples=25, deadline=None)
def test_protected_entries_neither_change_nor_matter(seed):
    scores, positions, protected = random_case(seed)
    z = hub_refine(scores, 0.9, positions=positions, protected=protected)
    shut = protected | (positions < 0)
    assert torch.equal(z[shut], scores[shut])
    for junk in (0.0, 5.0, -1.0, math.inf, math.nan):
        other = hub_refine(scores.masked_fill(shut, junk), 0.9, positions=positions, protected=protected)
        assert torch.equal(other[~shut], z[~shut])
    moved = torch.where(protected, 7, positions)  # positions of protected entries do not matter either
    assert torch.equal(hub_refine(scores, 0.9, positions=moved, protected=protected)[~shut], z[~shut])


@given(seed=st.integers(0, 2**20))
@settings(max_examples=25, deadline=None)
def test_padding_and_batch_neighbours_do_not_leak(seed):
    """Removing padding, wherever it is, and running rows alone change nothing."""
    scores, positions, _ = random_case(seed)
    z = hub_refine(scores, 0.9, positions=positions)
    for row in range(len(scores)):
        alone = hub_refine(scores[row], 0.9, positions=positions[row])
        assert torch.equal(alone, z[row])
        # Heads of one row keep equally many entries here, so that the padding can be cut off.
        count = int((positions[row] >= 0).sum(-1).min())
        shut = (positions[row] >= 0).cumsum(-1) > count
        cut = positions[row].masked_fill(shut, -1)
        real = cut >= 0
        dense = hub_refine(scores[row][real].view(3, -1), 0.9, positions=cut[real].view(3, -1))
        torch.testing.assert_close(
            hub_refine(scores[row], 0.9, positions=cut)[real].view(3, -1), dense, rtol=1e-6, atol=0
        )


def test_neighbours_are_close_in_position_not_in_slot():
    row = [0.5, 0.4, 0.3, 0.2]
    assert hubs(row, positions=torch.tensor([0, 1, 2, 3])) == [0]
    assert hubs(row, positions=torch.tensor([0, 2, 4, 6])) == [0]
    assert hubs(row, positions=torch.tensor([0, 3, 5, 8])) == [0, 1, 3]
    assert hubs(row, positions=torch.tensor([[0, -1, -1, 2]])) == [0, 1, 2]  # padding keeps its score
    assert hubs([0.5, 0.4, 0.3, 0.2, 0.1], positions=torch.tensor([0, -1, -1, -1, 1])) == [0, 1, 2, 3]
    assert hubs(row, protected=torch.tensor([True, False, False, False])) == [0, 1]
    assert hubs([0.5, 0.4, 0.3, 0.6, 0.2], protected=torch.tensor([0, 1, 1, 0, 0]).bool()) == [0, 1, 2, 3]


def test_positions_that_leave_no_gap_are_the_default():
    scores, _, protected = random_case(3)
    offset = torch.arange(100, 140, dtype=torch.int32)
    expected = hub_refine(scores, 0.9, protected=protected)
    assert torch.equal(hub_refine(scores, 0.9, positions=offset, protected=protected), expected)
    left = torch.cat([torch.full((5,), -1), torch.arange(40)])
    padded = torch.cat([torch.full((2, 3, 5), math.nan), scores], -1)
    shut = torch.cat([torch.zeros(2, 3, 5, dtype=torch.bool), protected], -1)
    result = hub_refine(padded, 0.9, positions=left, protected=shut)[..., 5:]
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


def test_shapes_broadcast():
    scores, _, _ = random_case(4)
    positions, protected = torch.arange(0, 80, 2), torch.arange(40) < 4
    full = hub_refine(scores, 0.9, positions=positions.expand(2, 3, -1), protected=protected.expand(2, 3, -1))
    assert torch.equal(hub_refine(scores, 0.9, positions=positions, protected=protected), full)
    assert torch.equal(hub_refine(scores, 0.9, positions=positions[None, None], protected=protected[None]), full)
    assert torch.equal(hub_refine(scores[0], 0.9, positions=positions, protected=protected), full[0])


def test_ratio_zero_returns_the_input_itself():
    scores, positions, protected = random_case(5)
    assert hub_refine(scores, 0.0) is scores
    assert hub_refine(scores, 0, gate_exponent=0.0, positions=positions, protected=protected) is scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ratio_per_row(dtype):
    scores, positions, protected = random_case(6, batch=3)
    scores = scores.to(dtype)
    z = hub_refine(scores, torch.tensor([0.0, 0.5, 0.9]), positions=positions, protected=protected)
    assert z.dtype == dtype and torch.equal(z[0], scores[0])
    for row, ratio in ((1, 0.5), (2, 0.9)):
        alone = hub_refine(scores[row], ratio, positions=positions[row], protected=protected[row])
        torch.testing.assert_close(z[row], alone, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-7)
    assert torch.equal(hub_refine(scores, torch.tensor(0.0)), scores)
    assert torch.equal(hub_refine(scores, torch.zeros(1), gate_exponent=0.0), scores)
    assert torch.equal(hub_refine(scores[0], torch.tensor(0.5)), hub_refine(scores[:1], torch.tensor([0.5]))[0])


def test_low_precision_is_computed_in_float32():
    scores = random_case(7)[0].bfloat16()
    assert torch.equal(hub_refine(scores, 0.9), hub_refine(scores.float(), 0.9).bfloat16())


def test_head_weights_of_flat_and_dead_heads():
    def weights(rows):
        s = torch.tensor(rows)
        return [
            round((z.max() / r.max()).item(), 6) if r.max() else None
            for z, r in zip(hub_refine(s, 0.5, gate_exponent=0.0, discount=1.0), s, strict=True)
        ]

    assert weights([[0.3, 0.3, 0.3], [0.7, 0.7, 0.7]]) == [1, 1]  # all flat
    assert weights([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]) == [None, 1]  # a dead head does not count in the mean
    assert weights([[0.3, 0.3, 0.3], [0.0, 0.0, 1.0]]) == [pytest.approx(0.8), pytest.approx(1.2)]
    assert weights([[0.1] * 4097, [0.3] * 4097]) == [1, 1]  # rounding is not selectivity
    assert weights([[0.1, 0.2, 0.9]]) == [1]
    assert not hub_refine(torch.zeros(2, 5), 0.9).any()


def test_everything_protected():
    scores = torch.rand(2, 3, 8)
    assert torch.equal(hub_refine(scores, 0.9, protected=torch.ones(8, dtype=torch.bool)), scores)


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("kernel", [1, 5, 99])
def test_short_sequences(size, kernel):
    scores = torch.full((2, 3, size), 0.5)
    expected = torch.tensor(reference(scores[0].tolist(), 0.9, kernel=kernel)).expand(2, 3, size)
    torch.testing.assert_close(hub_refine(scores, 0.9, kernel=kernel), expected)
    positions, protected = torch.arange(size), torch.zeros(size, dtype=torch.bool)
    torch.testing.assert_close(
        hub_refine(scores, torch.tensor([0.9, 0.9]), kernel=kernel, positions=positions, protected=protected), expected
    )


def test_the_documented_example():
    assert doctest.testmod(importlib.import_module("kvretain.refine.hub")) == (0, 1)


def test_the_input_is_left_alone():
    scores, positions, protected = random_case(8)
    copies = scores.clone(), positions.clone(), protected.clone()
    hub_refine(scores.double(), 0.9, positions=positions, protected=protected)
    hub_refine(scores, 0.9, positions=positions, protected=protected)
    assert all(torch.equal(a, b) for a, b in zip((scores, positions, protected), copies, strict=True))


@given(grid=grids)
@quick
def test_bounded_perturbation(grid):
    """-0.6 alpha s <= z - s <= 0.2 alpha s with the defaults."""
    s = torch.tensor(grid, dtype=torch.float64)
    z, alpha = hub_refine(s, 0.9), 0.81
    assert bool((z - s <= 0.2 * alpha * s + 1e-12).all()) and bool((z - s >= -0.6 * alpha * s - 1e-12).all())


def test_the_refiner_is_the_function():
    scores, positions, protected = random_case(9)
    hub = refiners["hub"]()
    assert isinstance(hub, Hub)
    for ratio in (0.7, torch.tensor([0.7, 0.2])):
        refined = hub.refine(scores, ratio, positions=positions, protected=protected)
        assert torch.equal(refined, hub_refine(scores, ratio, positions=positions, protected=protected))
    options = {"kernel": 3, "discount": 0.2, "weight_exponent": 1.0, "weight_clip": (0.5, 2.0), "gate_exponent": 1.0}
    refined = Hub(**options, calibrate=False).refine(scores, 0.7, positions=positions, protected=protected)
    assert torch.equal(
        refined, hub_refine(scores, 0.7, **options, calibrate=False, positions=positions, protected=protected)
    )


BAD_PARAMETERS = [
    ({"kernel": 4}, "kernel must be an odd whole number of at least 1, not 4"),
    ({"kernel": 0}, "kernel .* not 0"),
    ({"kernel": -3}, "kernel .* not -3"),
    ({"kernel": 5.0}, "kernel .* not 5.0"),
    ({"discount": 1.5}, "discount must be a number from 0 to 1, not 1.5"),
    ({"discount": -0.1}, "discount .* not -0.1"),
    ({"discount": math.nan}, "discount .* not nan"),
    ({"discount": "half"}, "discount .* not 'half'"),
    ({"weight_exponent": -1}, "weight_exponent must be finite and >= 0, not -1"),
    ({"weight_exponent": math.inf}, "weight_exponent .* not inf"),
    ({"weight_clip": (1.2, 0.8)}, r"weight_clip must be \(low, high\) with 0 <= low <= high, not \(1.2, 0.8\)"),
    ({"weight_clip": (-1, 1)}, r"weight_clip .* not \(-1, 1\)"),
    ({"weight_clip": (0.8,)}, r"weight_clip .* not \(0.8,\)"),
    ({"weight_clip": (0.8, math.nan)}, "weight_clip .* not"),
    ({"weight_clip": 1.0}, "weight_clip .* not 1.0"),
    ({"gate_exponent": -2}, "gate_exponent must be finite and >= 0, not -2"),
    ({"calibrate": "no"}, "calibrate must be True or False, not 'no'"),
    ({"neighbours": "slot"}, "unknown neighbours 'slot'; valid: 'position'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_PARAMETERS, ids=[str(o) for o, _ in BAD_PARAMETERS])
def test_bad_parameters(options, message):
    with pytest.raises(ValueError, match=f"hub_refine: {message}"):
        hub_refine(torch.rand(2, 8), 0.5, **options)
    with pytest.raises(ValueError, match=message):
        Hub(**options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([[0.5, 1.0]], 0.5), "scores must be a tensor, not list"),
        ((torch.rand(2, 8), "half"), r"ratio is the fraction removed and must be in \[0, 1\), not 'half'"),
        ((torch.rand(2, 8), None), "ratio .* not None"),
        ((torch.rand(2, 8), True), "ratio .* not True"),
    ],
)
def test_what_is_no_number_and_no_tensor(given, message):
    with pytest.raises(ValueError, match=f"hub_refine: {message}"):
        hub_refine(*given)
    with pytest.raises(ValueError, match="hub_refine: positions must be a tensor, not list"):
        hub_refine(torch.rand(2, 2), 0.5, positions=[0, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_finite_scores_stay_finite(dtype):
    top = torch.finfo(dtype).max
    scores = torch.zeros(2, 64, dtype=dtype)
    scores[0, ::8] = top
    scores[1] = top / 4
    refined = hub_refine(scores, 0.9)
    assert refined.isfinite().all() and refined[0, 8] == top  # the sharp head's weight is above 1
    scores[1, 5] = torch.inf
    protected = torch.zeros(2, 64, dtype=torch.bool)
    protected[1, 5] = True
    assert hub_refine(scores, 0.9, protected=protected)[1, 5] == torch.inf


@pytest.mark.parametrize("ratio", [1.0, -0.1, math.nan, math.inf])
def test_bad_ratios(ratio):
    message = rf"ratio is the fraction removed and must be in \[0, 1\), not {ratio}"
    with pytest.raises(ValueError, match=message):
        hub_refine(torch.rand(2, 3, 8), ratio)
    with pytest.raises(ValueError, match=message):
        hub_refine(torch.rand(2, 3, 8), torch.tensor([0.5, ratio], dtype=torch.float64))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_scores_must_be_finite(value, ratio):
    scores = torch.rand(2, 8)
    scores[1, 3] = value
    with pytest.raises(ValueError, match=f"scores must be finite, but an unprotected one is {value}"):
        hub_refine(scores, ratio)


@pytest.mark.parametrize("ratio", [0.0, 0.9])
def test_scores_must_not_be_negative(ratio):
    scores = torch.rand(2, 8)
    scores[1, 3] = -0.25
    with pytest.raises(
        ValueError, match=r"scores must be >= 0, but an unprotected one is -0.25: a discount would raise it"
    ):
        hub_refine(scores, ratio)


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        (torch.rand(8), {}, r"scores must be floating point of shape \(..., H, N\), not torch.float32 \(8,\)"),
        (torch.ones(2, 8, dtype=torch.int64), {}, "scores must be floating point .* not torch.int64"),
        (torch.rand(2, 3, 8), {"positions": torch.arange(7)}, r"positions of shape \(7,\) do not fit .*\(2, 3, 8\)"),
        (
            torch.rand(2, 3, 8),
            {"positions": torch.zeros(1, dtype=torch.int64)},
            r"positions of shape \(1,\) do not fit",
        ),
        (torch.rand(2, 3, 8), {"positions": torch.rand(8)}, "positions must be integers, not torch.float32"),
        (torch.rand(2, 3, 8), {"protected": torch.zeros(3, 3, 8).bool()}, r"protected of shape \(3, 3, 8\) do not fit"),
        (torch.rand(2, 3, 8), {"protected": torch.zeros(8)}, "protected must be bool, not torch.float32"),
        (torch.rand(2, 3, 8), {"protected": torch.zeros(1, 2, 3, 8).bool()}, "protected of shape .* do not fit"),
        (
            torch.rand(2, 3, 8),
            {"ratio": torch.rand(3)},
            r"ratio of shape \(3,\) does not broadcast to one per row, \(2,\)",
        ),
        (torch.rand(3, 8), {"ratio": torch.rand(3)}, r"ratio of shape \(3,\) does not broadcast to one per row, \(\)"),
    ],
)
def test_shapes_and_dtypes_are_checked(scores, options, message):
    with pytest.raises(ValueError, match=message):
        hub_refine(scores, options.pop("ratio", 0.9), **options)


@pytest.mark.parametrize("positions", [[0, 2, 1, 3], [0, 1, 1, 2], [3, -1, 2, 4]], ids=str)
def test_positions_must_ascend(positions):
    with pytest.raises(ValueError, match="positions must ascend strictly"):
        hub_refine(torch.rand(1, 4), 0.9, positions=torch.tensor(positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_negative_zeros_are_zeros(dtype):
    scores = torch.tensor([[0.5, -0.0, -0.0, 0.25, -0.0, 0.0]], dtype=dtype)
    assert torch.equal(hub_refine(scores, 0.5), hub_refine(scores.abs(), 0.5))


def test_what_stands_at_protected_entries_is_never_read():
    scores, protected = torch.rand(2, 3, 40), torch.rand(2, 3, 40) < 0.3
    wild = scores.masked_fill(protected, math.nan)
    refined, expected = (hub_refine(s, 0.7, protected=protected) for s in (wild, scores))
    assert bool(refined[protected].isnan().all()) and torch.equal(refined[~protected], expected[~protected])


def test_expanded_masks_and_positions_equal_dense_ones():
    scores, positions = torch.rand(2, 4, 60), torch.randint(1, 4, (2, 1, 60)).cumsum(-1).expand(2, 4, 60)
    protected = (torch.rand(2, 1, 60) < 0.2).expand(2, 4, 60)
    expanded = hub_refine(scores, 0.7, positions=positions, protected=protected)
    assert torch.equal(
        expanded, hub_refine(scores, 0.7, positions=positions.contiguous(), protected=protected.contiguous())
    )


def test_a_window_wider_than_the_sequence_spans_gaps():
    """Three entries, 3 positions apart, in a window of 13: all are neighbours, across two slots."""
    refined = hub_refine(
        torch.tensor([[1.0, 3.0, 2.0]]), 0.5, kernel=13, calibrate=False, positions=torch.arange(3) * 3
    )
    assert refined.tolist() == [[0.875, 3.0, 1.75]]


# --- other readings -------------------------------------------------------------------------------


def test_a_slope_is_discounted_only_where_a_hub_is_near():
    """The case in which the two readings of "neighbour" differ: on a ramp the next hub is far."""
    ramp = torch.arange(1.0, 9.0)[None]
    every = hub_refine(ramp, 0.5, calibrate=False)
    near = hub_refine(ramp, 0.5, calibrate=False, neighbours="hub")
    assert torch.equal(every[0, -3:], near[0, -3:])
    assert torch.equal(near[0, :-3], ramp[0, :-3]) and bool((every[0, :-1] < ramp[0, :-1]).all())


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_near_hubs_against_a_double_loop(data):
    size = data.draw(st.integers(1, 12))
    kernel = data.draw(st.sampled_from([1, 3, 5]))
    values = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    gaps = data.draw(st.lists(st.integers(1, 3), min_size=size, max_size=size))
    positions = torch.tensor(gaps).cumsum(0)
    radius = kernel // 2

    def window(i):
        return [j for j in range(size) if j != i and abs(int(positions[j] - positions[i])) <= radius]

    hubs = [
        values[i] > 0
        and all(values[j] < values[i] or (values[j] == values[i] and positions[j] > positions[i]) for j in window(i))
        for i in range(size)
    ]
    expected = [v if hubs[i] or not any(hubs[j] for j in window(i)) else v / 2 for i, v in enumerate(values)]
    got = hub_refine(
        torch.tensor([values], dtype=torch.float64),
        1 - 1e-12,
        kernel=kernel,
        calibrate=False,
        positions=positions,
        neighbours="hub",
    )
    assert torch.allclose(got[0], torch.tensor(expected, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("statistic", ["cv", "peak", "entropy"])
def test_every_statistic_weighs_sharp_heads_more_and_is_scale_free(statistic):
    sharp = torch.tensor([0.01, 0.01, 5.0, 0.01, 0.01, 0.01])
    middle = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.5, 0.5])
    flat = torch.tensor([1.0, 1.1, 1.0, 1.1, 1.0, 1.1])
    scores = torch.stack([sharp, middle, flat, torch.zeros(6)])
    weight = hub_refine(scores, 1 - 1e-7, discount=1.0, selectivity=statistic) / scores
    assert float(weight[0, 2]) > float(weight[1, 2]) > float(weight[2, 1]) - 1e-6
    scaled = hub_refine(scores * 7, 1 - 1e-7, discount=1.0, selectivity=statistic) / (scores * 7)
    assert torch.allclose(weight[:3], scaled[:3], rtol=1e-4)
    assert bool((hub_refine(scores, 0.9, selectivity=statistic)[3] == 0).all())


@pytest.mark.parametrize("fields", [{"neighbours": "slot"}, {"selectivity": "gini"}])
def test_unknown_readings_list_the_valid_ones(fields):
    with pytest.raises(ValueError, match=r"hub_refine: unknown .*; valid: '"):
        hub_refine(torch.ones(1, 3), 0.5, **fields)
