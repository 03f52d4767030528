"""The measures against references written as one reads their definitions, one position at a time."""

import math
from statistics import mean, pstdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvretain import hub_refine, refiners, select_topk
from kvretain.observe import measures

# Few distinct values, so that ties and plateaus are common.
a_head = st.lists(st.integers(0, 6), min_size=1, max_size=40)
quick = settings(max_examples=80, deadline=None)


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ranking(values):
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


# Coverage by rank


def naive_coverage(values, keep, radius):
    taken = ranking(values)[:keep]
    return sum(any(abs(x - j) <= radius for j in taken) for x in range(len(values))) / len(values)


@quick
@given(a_head, st.integers(0, 5))
def test_coverage_curve(values, radius):
    curve = measures.coverage_curve(tensor(values), radius)
    assert curve.tolist() == pytest.approx([naive_coverage(values, k, radius) for k in range(len(values) + 1)])


@quick
@given(a_head, st.integers(1, 40))
def test_the_curve_takes_what_topk_takes(values, keep):
    keep = min(keep, len(values))
    chosen = select_topk(tensor(values), keep).tolist()
    covered = {x for j in chosen for x in range(j - 2, j + 3) if 0 <= x < len(values)}
    assert measures.coverage_curve(tensor(values), 2)[keep].item() == pytest.approx(len(covered) / len(values))


def test_coverage_curves_of_many_heads_are_those_of_each():
    scores = torch.rand(2, 3, 30, generator=generator())
    together = measures.coverage_curve(scores, 2)
    assert together.shape == (2, 3, 31)
    for layer in range(2):
        for head in range(3):
            assert torch.equal(together[layer, head], measures.coverage_curve(scores[layer, head], 2))


@quick
@given(a_head, st.integers(1, 7))
def test_marginal_gains(values, step):
    curve = measures.coverage_curve(tensor(values), 1)
    expected = [
        naive_coverage(values, k + step, 1) - naive_coverage(values, k, 1)
        for k in range(0, len(values) + 1 - step, step)
    ]
    assert measures.marginal_gains(curve, step).tolist() == pytest.approx(expected)


def test_gains_add_up_to_the_curve():
    curve = measures.coverage_curve(torch.rand(4, 60, generator=generator()), 2)
    assert measures.marginal_gains(curve, 5).sum(-1).tolist() == pytest.approx([1.0] * 4)


def test_shuffling_moves_all_heads_alike_and_keeps_their_values():
    scores = torch.arange(60.0).reshape(2, 3, 10)
    mixed = measures.shuffled(scores, generator())
    assert torch.equal(mixed.sort(-1).values, scores)
    assert torch.equal(mixed - scores[..., :1], (mixed - scores[..., :1])[:1, :1].expand_as(mixed))
    assert not torch.equal(mixed, scores)
    assert torch.equal(mixed, measures.shuffled(scores, generator()))


# Autocorrelation


@quick
@given(st.lists(st.integers(0, 6), min_size=3, max_size=40), st.integers(1, 12))
def test_autocorrelation(values, lags):
    lags = min(lags, len(values) - 1)
    centre = mean(values)
    total = sum((v - centre) ** 2 for v in values)
    expected = [
        sum((a - centre) * (b - centre) for a, b in zip(values, values[lag:], strict=False)) / total if total else 0.0
        for lag in range(1, lags + 1)
    ]
    assert measures.autocorrelation(tensor(values), lags).tolist() == pytest.approx(expected, abs=1e-9)


def test_autocorrelation_knows_a_wave():
    wave = torch.sin(torch.arange(4000) * 2 * math.pi / 20)
    found = measures.autocorrelation(wave, 20)
    assert found[19] == pytest.approx(1, abs=0.01)
    assert found[9] == pytest.approx(-1, abs=0.01)


def test_a_head_of_equal_scores_correlates_with_nothing():
    assert measures.autocorrelation(torch.full((2, 30), 0.1), 5).tolist() == [[0.0] * 5] * 2


def test_the_permutation_band_holds_noise_and_not_a_trend():
    noise = torch.rand(4, 3, 300, generator=generator(1))
    low, high = measures.permutation_band(noise, 20, permutations=200, generator=generator())
    found = measures.autocorrelation(noise, 20).flatten(0, 1).mean(0)
    assert ((found >= low) & (found <= high)).sum() >= 16
    trend = noise + torch.linspace(0, 3, 300)
    low, high = measures.permutation_band(trend, 20, permutations=50, generator=generator())
    assert (measures.autocorrelation(trend, 20).flatten(0, 1).mean(0) > high).all()


def test_the_permutation_band_is_wide_where_heads_agree():
    one = torch.rand(1, 1, 200, generator=generator())
    low, high = measures.permutation_band(one.expand(5, 4, -1), 10, permutations=100, generator=generator())
    alone = measures.permutation_band(one, 10, permutations=100, generator=generator())
    assert torch.allclose(low, alone[0]) and torch.allclose(high, alone[1])


# Segments


@quick
@given(st.integers(1, 70), st.integers(1, 20), st.data())
def test_segment_coverage(total, size, data):
    kept = sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1)))
    segments = [range(start, min(start + size, total)) for start in range(0, total, size)]
    expected = mean(any(i in kept for i in segment) for segment in segments)
    assert measures.segment_coverage(torch.tensor(kept), total, size).item() == pytest.approx(expected)


def test_random_choice_reaches_the_segments_that_it_should():
    scores, keep, size = torch.zeros(40, 5, 160), 16, 16
    kept = measures.kept_by("random", scores, keep, generator())
    found = measures.segment_coverage(kept, 160, size).mean().item()
    assert found == pytest.approx(1 - math.comb(160 - size, keep) / math.comb(160, keep), abs=0.01)


@pytest.mark.parametrize(("rule", "name"), [("top-k", None), ("hard NMS", "nms"), ("SMD", "smd")])
@pytest.mark.parametrize("keep", [1, 8, 39, 40])
def test_rules_are_those_of_the_library(rule, name, keep):
    scores = torch.rand(2, 3, 40, generator=generator())
    expected = scores
    if name:
        expected = refiners[name]().refine(
            scores,
            1 - keep / 40,
            positions=torch.arange(40).expand(2, 3, -1),
            protected=torch.zeros(2, 3, 40, dtype=torch.bool),
        )
    chosen = measures.kept_by(rule, scores, keep, generator())
    assert torch.equal(chosen, select_topk(expected, keep))


# Heads


@quick
@given(a_head)
def test_selectivity(values):
    expected = pstdev(values) / mean(values) if any(values) else 0.0
    assert measures.selectivity(tensor(values)).item() == pytest.approx(expected, abs=1e-9)


def test_head_weights_are_those_of_hub_refine():
    """With a gate and a discount of 1 nothing but the head weight is left of HubKV's correction."""
    scores = torch.rand(4, 3, 50, generator=generator()) ** torch.tensor([0.2, 1.0, 6.0])[:, None]
    weights = measures.head_weights(measures.selectivity(scores))
    refined = hub_refine(scores, 0.5, gate_exponent=0.0, discount=1.0)
    assert torch.allclose(refined, scores * weights[..., None].float(), rtol=1e-5)
    assert len(weights.unique()) > 3


def test_heads_of_an_all_zero_layer_weigh_one():
    assert measures.head_weights(torch.zeros(1, 3, dtype=torch.float64)).tolist() == [[1.0] * 3]


# Intervals


def test_the_interval_is_over_layers():
    values = torch.arange(10.0)[:, None].expand(10, 4)
    centre, low, high = measures.mean_interval(values, generator=generator())
    error = pstdev(range(10)) / math.sqrt(10)
    assert centre == pytest.approx(4.5)
    assert low == pytest.approx(4.5 - 1.96 * error, abs=0.2)
    assert high == pytest.approx(4.5 + 1.96 * error, abs=0.2)
    # More heads of the same layers are no further evidence.
    assert measures.mean_interval(values[:, :1], generator=generator()) == (centre, low, high)
    assert measures.mean_interval(values, generator=generator()) == (centre, low, high)


def test_cosines_of_all_pairs_and_of_the_nearest():
    vectors = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    pairs, nearest = measures.cosines(vectors, centre=False)
    half = 0.5**0.5
    assert pairs.tolist() == pytest.approx([0.0, half, half], abs=1e-6)
    assert nearest.tolist() == pytest.approx([half] * 3, abs=1e-6)
    shifted = measures.cosines(vectors + 100, centre=True)
    for got, expected in zip(shifted, measures.cosines(vectors, centre=True), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert measures.cosines(vectors + 100, centre=False)[0].min() > 0.999
    many = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    pairs, nearest = measures.cosines(many, centre=False, most=20)
    thinned = measures.cosines(many[::3], centre=False)
    assert torch.equal(pairs, thinned[0]) and torch.equal(nearest, thinned[1])
