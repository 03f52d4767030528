"""What every refiner owes the policy, and what each of the variants that HubKV rejected does."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvretain import Policy
from kvretain.refine import (
    IB,
    SMD,
    SVD,
    CommunitySmooth,
    FixedWeights,
    HardNMS,
    HeadNMS,
    Hub,
    Refiner,
    hub_refine,
    refiners,
)

ALL = [
    *(refiners[name]() for name in refiners),
    CommunitySmooth(kernel=9),
    SVD(rank=2),
    IB(beta=20.0),
    FixedWeights(weights=(0.5, 2.0, 1)),
    HeadNMS(discount=0.5),
    HardNMS(kernel=3),
    SMD(gate_exponent=0.0),
]

contract = pytest.mark.parametrize("refiner", ALL, ids=str)
quick = settings(max_examples=12, deadline=None)


def random_case(seed: int, batch: int = 3, heads: int = 3, size: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with ties, positions with gaps and padding, entries left out (protected or padding), all anywhere."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, heads, size, generator=rng)
    scores = torch.where(torch.rand(scores.shape, generator=rng) < 0.5, (scores * 8).round() / 8, scores)
    positions = torch.randint(1, 3, scores.shape, generator=rng).cumsum(-1) - 1
    positions = positions.masked_fill(torch.rand(scores.shape, generator=rng) < 0.15, -1)
    return scores, positions, (torch.rand(scores.shape, generator=rng) < 0.2) | (positions < 0)


def refine(refiner: Refiner, case: tuple[Tensor, Tensor, Tensor], ratio: float | Tensor = 0.9) -> Tensor:
    scores, positions, protected = case
    return refiner.refine(scores, ratio, positions=positions, protected=protected)


def plain(refiner: Refiner, rows: list[list[float]], positions: Tensor | None = None) -> Tensor:
    """Refined scores of one layer's heads, nothing protected, ``(H, N)``."""
    scores = torch.tensor([rows])
    positions = torch.arange(scores.shape[-1]) if positions is None else positions
    positions = positions.expand(scores.shape)
    return refiner.refine(scores, 0.9, positions=positions, protected=positions < 0)[0]


def test_registry_holds_the_variants():
    assert set(refiners) >= {"hub", "smooth", "svd", "ib", "fixed", "head_nms", "nms", "smd"}


@contract
@given(seed=st.integers(0, 2**20))
@quick
def test_shape_dtype_finite_and_not_negative(refiner, seed):
    case = random_case(seed)
    z = refine(refiner, case)
    assert z.shape == case[0].shape and z.dtype == torch.float32
    assert bool(z.isfinite().all()) and bool((z >= 0).all())
    assert torch.equal(refine(refiner, case), z)


@contract
@given(seed=st.integers(0, 2**20))
@quick
def test_protected_entries_neither_change_nor_matter(refiner, seed):
    scores, positions, shut = random_case(seed)
    z = refine(refiner, (scores, positions, shut))
    assert torch.equal(z[shut], scores[shut])
    for junk in (0.0, 5.0, -1.0, math.inf, math.nan):
        other = refine(refiner, (scores.masked_fill(shut, junk), positions, shut))
        assert torch.equal(other[~shut], z[~shut])
    moved = refine(refiner, (scores, positions.masked_fill(shut, 7), shut))
    torch.testing.assert_close(moved[~shut], z[~shut], rtol=1e-6, atol=1e-7)


@contract
@given(seed=st.integers(0, 2**20))
@quick
def test_rows_and_padding_do_not_leak(refiner, seed):
    """A row refines as it does alone, also with padding put between its entries."""
    scores, positions, shut = random_case(seed)
    z = refine(refiner, (scores, positions, shut))
    for row in range(len(scores)):
        alone = refine(refiner, (scores[row : row + 1], positions[row : row + 1], shut[row : row + 1]))
        torch.testing.assert_close(alone[0], z[row], rtol=1e-6, atol=1e-7)
    slots = torch.arange(0, 2 * scores.shape[-1], 2)
    spread = [
        x.new_full((*x.shape[:2], 2 * x.shape[2]), fill) for x, fill in ((scores, 9.0), (positions, -1), (shut, 1))
    ]
    for wide, x in zip(spread, (scores, positions, shut), strict=True):
        wide[..., slots] = x
    torch.testing.assert_close(refine(refiner, tuple(spread))[..., slots], z, rtol=1e-6, atol=1e-7)


@contract
def test_ratio_per_row(refiner):
    case = random_case(6)
    ratios = torch.tensor([0.0, 0.5, 0.9])
    z = refine(refiner, case, ratios)
    assert torch.equal(z[0], case[0][0])
    for row, ratio in enumerate((0.0, 0.5, 0.9)):
        alone = refine(refiner, tuple(x[row : row + 1] for x in case), ratio)
        torch.testing.assert_close(alone[0], z[row], rtol=1e-6, atol=1e-7)


@contract
def test_gaps_are_distances(refiner):
    """Entries far apart in position are no neighbours, however close their slots: refinement sees positions alone."""
    scores, positions, shut = random_case(8)
    near, far = refine(refiner, (scores, positions, shut)), refine(refiner, (scores, positions * 100, shut))
    local = isinstance(refiner, Hub | SMD | HardNMS | CommunitySmooth)
    assert torch.equal(near, far) != local


@contract
@pytest.mark.parametrize("size", [0, 1])
def test_short_layers_and_everything_protected(refiner, size):
    scores = torch.full((2, 3, size), 0.5)
    positions = torch.arange(size).expand(2, 3, -1)
    assert refine(refiner, (scores, positions, positions < 0)).shape == scores.shape
    scores, positions, shut = random_case(1)
    assert torch.equal(refine(refiner, (scores, positions, torch.ones_like(shut))), scores)
    zero = torch.zeros_like(scores)
    assert torch.equal(refine(refiner, (zero, positions, shut)), zero)


@contract
def test_bad_scores_and_ratios(refiner):
    scores, positions, shut = random_case(2)
    for bad, message in ((-0.5, "must be >= 0"), (math.nan, "must be finite"), (math.inf, "must be finite")):
        with pytest.raises(ValueError, match=message):
            refine(refiner, (scores.masked_fill(~shut, bad), positions, shut))
    for ratio in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"ratio is the fraction removed and must be in \[0, 1\)"):
            refine(refiner, (scores, positions, shut), ratio)


@contract
def test_the_policy_text_round_trips(refiner):
    policy = Policy.parse("knorm")
    policy = Policy(policy.scorer, refiner)
    assert Policy.parse(str(policy)) == policy and Policy.from_dict(policy.to_dict()) == policy


# --- what each one does ---------------------------------------------------------------------------


def test_smooth_is_the_mean_over_the_window():
    row = [0.0, 5.0, 0.0, 0.0, 0.0, 1.0]
    expected = [5 / 3, 5 / 4, 1.0, 6 / 5, 0.25, 1 / 3]
    torch.testing.assert_close(plain(CommunitySmooth(), [row])[0], torch.tensor(expected))
    dense = torch.nn.functional.avg_pool1d(torch.tensor([row]), 5, 1, 2, count_include_pad=False)
    torch.testing.assert_close(plain(CommunitySmooth(), [row]), dense)
    gapped = plain(CommunitySmooth(), [[4.0, 2.0, 9.0, 1.0]], torch.tensor([0, 2, 5, -1]))
    assert gapped.tolist() == [[3.0, 3.0, 9.0, 1.0]]
    assert plain(CommunitySmooth(kernel=1), [row]).tolist() == [row]


def test_smooth_thickens_what_hub_thins():
    """The slides' reason for rejecting it: a cluster rises above a lone peak."""
    row = [0.0, 0.0, 0.9, 0.0, 0.0, 0.0, 0.7, 0.8, 0.7, 0.0, 0.0, 0.0]
    smooth, hub = (plain(refiner, [row])[0].topk(3).indices.tolist() for refiner in (CommunitySmooth(), Hub()))
    assert sorted(smooth) == [6, 7, 8]
    assert 2 in hub


def test_svd_keeps_what_heads_agree_on():
    profile = torch.tensor([0.1, 0.9, 0.3, 0.0])
    agreed = torch.tensor([[1.0], [2.0], [0.5]]) * profile
    torch.testing.assert_close(plain(SVD(), agreed.tolist()), agreed)
    lone = agreed.clone()
    lone[2, 3] = 0.2  # an anchor of one head only
    assert plain(SVD(), lone.tolist())[2, 3] < 0.02
    assert torch.equal(plain(SVD(rank=3), lone.tolist()), lone)
    rank2 = torch.rand(3, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(rank2, full_matrices=False)
    expected = ((u[:, :2] * s[:2]) @ vh[:2]).clamp_min(0).float()
    torch.testing.assert_close(plain(SVD(rank=2), rank2.float().tolist()), expected, rtol=1e-5, atol=1e-6)


def test_heads_meet_at_positions_not_slots():
    scores = torch.tensor([[[1.0, 2.0, 4.0], [2.0, 4.0, 0.5]]])
    positions = torch.tensor([[[0, 3, 9], [3, 9, -1]]])
    z = HeadNMS().refine(scores, 0.5, positions=positions, protected=positions < 0)
    assert z.tolist() == [[[1.0, 2.0, 4.0], [0.0, 0.0, 0.5]]]
    z = SVD().refine(scores, 0.5, positions=positions, protected=positions < 0)
    grid = torch.tensor([[1.0, 2.0, 4.0], [0.0, 2.0, 4.0]])
    u, s, vh = torch.linalg.svd(grid)
    expected = s[0] * u[:, :1] @ vh[:1]
    torch.testing.assert_close(z[0, 0], expected[0])
    torch.testing.assert_close(z[0, 1, :2], expected[1, 1:])


def test_ib_erases_what_all_heads_share():
    z = plain(IB(), [[0.9, 0.4, 0.1], [0.9, 0.1, 0.4]])
    assert z[:, 0].tolist() == [0.0, 0.0]  # the strongest anchor, and every head's
    p = torch.tensor([0.8, 0.2])
    information = (p * (p / 0.5).log()).sum()
    torch.testing.assert_close(z[0, 1], 0.4 * (1 - torch.exp(-information)))
    torch.testing.assert_close(plain(IB(beta=1e9), [[0.9, 0.4, 0.1], [0.9, 0.1, 0.4]])[0, 1:], torch.tensor([0.4, 0.1]))


def test_ib_of_heads_that_say_the_same_changes_nothing():
    row = torch.tensor([0.7, 0.3, 0.2])
    for heads in (row[None], torch.stack([row, row * 0.3])):
        assert torch.equal(plain(IB(), heads.tolist()), heads)


def test_fixed_weights_do_not_look_at_the_scores():
    rows = [[1.0, 2.0], [1.0, 2.0], [0.0, 1.0]]
    torch.testing.assert_close(plain(FixedWeights(), rows), torch.tensor([[0.8, 1.6], [1.0, 2.0], [0.0, 1.2]]))
    given_weights = plain(FixedWeights(weights=(2, 0.0, 1)), rows)
    assert given_weights.tolist() == [[2.0, 4.0], [0.0, 0.0], [0.0, 1.0]]
    assert plain(FixedWeights(), rows[:1]).tolist() == rows[:1]
    with pytest.raises(ValueError, match="fixed: 2 weights were given, but the layer has 3 KV heads"):
        plain(FixedWeights(weights=(1.0, 1.0)), rows)


def test_head_nms_leaves_a_position_to_one_head():
    rows = [[1.0, 2.0, 0.0], [3.0, 2.0, 0.5]]
    assert plain(HeadNMS(), rows).tolist() == [[0.0, 2.0, 0.0], [3.0, 0.0, 0.5]]
    assert plain(HeadNMS(discount=0.5), rows).tolist() == [[0.5, 2.0, 0.0], [3.0, 1.0, 0.5]]
    assert plain(HeadNMS(discount=1.0), rows).tolist() == rows


def test_nms_and_smd_are_hub_with_parts_switched_off():
    case = random_case(11)
    scores, positions, protected = case
    shared = {"positions": positions, "protected": protected, "calibrate": False}
    for ratio in (0.5, torch.tensor([0.0, 0.3, 0.9])):
        hard = hub_refine(scores, ratio, discount=0.0, gate_exponent=0.0, **shared)
        assert torch.equal(refine(HardNMS(), case, ratio), hard)
        assert torch.equal(refine(SMD(), case, ratio), hub_refine(scores, ratio, **shared))
        other = hub_refine(scores, ratio, kernel=3, discount=0.2, gate_exponent=1.0, **shared)
        assert torch.equal(refine(SMD(kernel=3, discount=0.2, gate_exponent=1.0), case, ratio), other)
    assert plain(HardNMS(), [[0.1, 0.4, 0.9, 0.3, 0.0]]).tolist() == [[0.0, 0.0, pytest.approx(0.9), 0.0, 0.0]]


@pytest.mark.parametrize(
    ("cls", "field", "value", "message"),
    [
        (CommunitySmooth, "kernel", 4, "smooth: kernel must be an odd whole number of at least 1, not 4"),
        (SVD, "rank", 0, "svd: rank must be a whole number of at least 1, not 0"),
        (SVD, "rank", True, "svd: rank .* not True"),
        (IB, "beta", 0.0, "ib: beta must be finite and > 0, not 0.0"),
        (IB, "beta", math.inf, "ib: beta .* not inf"),
        (FixedWeights, "weights", (), r"fixed: weights must be a tuple of finite numbers >= 0, one per head, not \(\)"),
        (FixedWeights, "weights", (1.0, -1.0), r"fixed: weights .* not \(1.0, -1.0\)"),
        (FixedWeights, "weights", 1.0, "fixed: weights .* not 1.0"),
        (HeadNMS, "discount", 1.5, r"head_nms: discount must be a number from 0 to 1, not 1.5"),
        (HardNMS, "kernel", 2, "nms: kernel .* not 2"),
        (SMD, "kernel", 2, "kernel .* not 2"),
        (SMD, "discount", -1, "discount .* not -1"),
        (SMD, "gate_exponent", -1, "gate_exponent .* not -1"),
    ],
)
def test_fields_are_validated(cls, field, value, message):
    with pytest.raises(ValueError, match=message):
        cls(**{field: value})
