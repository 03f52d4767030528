"""Budgets that are not equal: competing heads against a sort in plain Python; the layers' rule by its promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvretain import retain
from kvretain.select.allocate import compete, layer_budgets

quick = settings(max_examples=150, deadline=None)
coarse = st.integers(-3, 3).map(lambda level: level / 4)  # ties are the rule
worth = st.one_of(coarse, coarse, st.floats(-1, 1, width=32))
floors = st.one_of(st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.floats(0, 1))

# --- heads that compete ---------------------------------------------------------------------------


def reference(scores: list[Tensor], protected: list[Tensor], counts: list[int], floor: float) -> list[list]:
    """What stays, by one sort of all real entries of a row; one nested list a layer."""
    kept = [torch.zeros_like(layer, dtype=torch.bool) for layer in scores]
    for row, count in enumerate(counts):
        entries = []
        for layer, (worths, shut) in enumerate(zip(scores, protected, strict=True)):
            for head, (values, guarded) in enumerate(zip(worths[row].tolist(), shut[row].tolist(), strict=True)):
                real = [i for i, value in enumerate(values) if value > -math.inf]
                own = sorted(real, key=lambda i: (not guarded[i], -values[i], i))
                sure = {i for i in real if guarded[i]} | set(own[: int(floor * count)])
                entries += [(i not in sure, -values[i], layer, head, i) for i in real]
        heads = sum(layer.shape[1] for layer in scores)
        for *_, layer, head, i in sorted(entries)[: count * heads]:
            kept[layer][row, head, i] = True
    return [layer.tolist() for layer in kept]


@st.composite
def cases(draw, most=3):
    """Scores with padding anywhere, protected entries of which each head has at most its share, counts per row."""
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    scores, protected = [], []
    for _ in range(draw(st.integers(1, most))):
        heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 8))
        grid, shut = [], []
        for count in counts:
            for _ in range(heads):
                grid.append(draw(st.lists(st.one_of(worth, worth, st.just(-math.inf)), min_size=size, max_size=size)))
                guarded = draw(st.sets(st.integers(0, size - 1), max_size=min(count, 2)))
                shut.append([i in guarded for i in range(size)])
        scores.append(torch.tensor(grid).view(len(counts), heads, size))
        protected.append(torch.tensor(shut).view(len(counts), heads, size))
    return scores, protected, counts


@given(case=cases(), floor=floors)
@quick
def test_competing_heads_equal_a_sort(case, floor):
    scores, protected, counts = case
    kept = compete(scores, protected, counts, floor)
    assert [(k.shape, k.dtype) for k in kept] == [(s.shape, torch.bool) for s in scores]
    assert [k.tolist() for k in kept] == reference(scores, protected, counts, floor)


@given(case=cases(most=1), floor=floors)
@quick
def test_a_row_does_not_depend_on_its_batch(case, floor):
    scores, protected, counts = case
    kept = compete(scores, protected, counts, floor)
    for row, count in enumerate(counts):
        one = slice(row, row + 1)
        alone = compete([s[one] for s in scores], [p[one] for p in protected], [count], floor)
        assert all(torch.equal(a, k[one]) for a, k in zip(alone, kept, strict=True))


def none(scores: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(s, dtype=torch.bool) for s in scores]


def test_the_largest_scores_stay_wherever_they_are():
    scores = [torch.tensor([[[9.0, 1.0, 8.0, 7.0], [2.0, 0.0, 0.0, 0.0]]]), torch.tensor([[[6.0, 3.0]]])]
    kept = compete(scores, none(scores), [1], 0.0)
    assert [k.tolist() for k in kept] == [[[[True, False, True, True], [False] * 4]], [[[False, False]]]]
    # A floor of 1 leaves every head its own best, in every layer.
    kept = compete(scores, none(scores), [1], 1.0)
    assert [k.tolist() for k in kept] == [[[[True] + [False] * 3, [True] + [False] * 3]], [[[True, False]]]]


def test_ties_go_to_the_first_layer_head_and_position():
    scores = [torch.zeros(1, 2, 2), torch.zeros(1, 1, 3)]
    kept = compete(scores, none(scores), [1], 0.0)
    assert [k.tolist() for k in kept] == [[[[True, True], [True, False]]], [[[False] * 3]]]


def test_protected_entries_stay_and_padding_does_not():
    scores = [torch.tensor([[[-5.0, 4.0, 3.0], [-math.inf, -math.inf, 2.0]]])]
    protected = [torch.tensor([[[True, False, False], [True, False, False]]])]
    assert compete(scores, protected, [1], 0.0)[0].tolist() == [[[True, True, False], [False] * 3]]
    # Nor does it use up the floor of its head.
    guarded, open_ = protected[0], torch.zeros(1, 1, 2, dtype=torch.bool)
    pair = [torch.tensor([[[-math.inf, 1.0]]]), torch.tensor([[[8.0, 9.0]]])]
    kept = compete(pair, [guarded[:, 1:, :2], open_], [1], 1.0)
    assert [k.tolist() for k in kept] == [[[[False, True]]], [[[False, True]]]]
    # More than there is: all that is real.
    assert compete(scores, protected, [3], 0.0)[0].tolist() == [[[True] * 3, [False, False, True]]]


def test_a_row_of_padding_keeps_nothing():
    scores = [torch.tensor([[[1.0, 2.0]], [[-math.inf, -math.inf]]])]
    for count in (0, 1):
        assert compete(scores, none(scores), [1, count], 0.5)[0].tolist() == [[[False, True]], [[False, False]]]


def test_more_sure_entries_than_the_budget_holds():
    scores = [torch.arange(8.0).view(1, 2, 4)]
    protected = [torch.tensor([[[True] * 3 + [False], [False] * 4]])]
    with pytest.raises(ValueError, match="3 entries are protected, but only 2 may be kept"):
        compete(scores, protected, [1], 0.0)
    with pytest.raises(ValueError, match="5 entries are protected, but only 4 may be kept"):
        compete(scores, protected, [2], 1.0)


# --- layers that share ----------------------------------------------------------------------------

beta = st.one_of(st.sampled_from([1, 2, 20]), st.floats(1, 1e6))


@st.composite
def budgets(draw):
    mean = draw(st.integers(0, 300))
    lowest, highest = draw(st.integers(0, mean)), mean + draw(st.integers(0, 400))
    return mean, draw(st.integers(1, 40)), lowest, highest, draw(beta)


@given(case=budgets())
@settings(max_examples=400, deadline=None)
def test_a_pyramid_keeps_its_promises(case):
    """The mean, the bounds, no layer above the one before it, and a straight line up to rounding."""
    mean, layers, lowest, highest, beta = case
    shares = layer_budgets("pyramid", mean, layers, lowest=lowest, highest=highest, beta=beta)
    assert len(shares) == layers and sum(shares) == layers * mean
    assert all(type(share) is int and lowest <= share <= highest for share in shares)
    assert shares == sorted(shares, reverse=True)
    if layers > 1:
        bottom = max(lowest, round(mean / beta), min(1, mean), 2 * mean - highest)
        assert shares[-1] == bottom and shares[0] == 2 * mean - bottom
        line = [shares[0] + (shares[-1] - shares[0]) * i / (layers - 1) for i in range(layers)]
        assert all(abs(share - exact) < 1 for share, exact in zip(shares, line, strict=True))


@pytest.mark.parametrize(
    ("layers", "options", "expected"),
    [
        (5, {}, [35, 28, 20, 12, 5]),  # halves go to the first layers
        (3, {"beta": 1}, [20, 20, 20]),
        (3, {"beta": 1e9}, [39, 20, 1]),  # no layer is empty
        (3, {"lowest": 12}, [28, 20, 12]),
        (3, {"highest": 25}, [25, 20, 15]),
        (4, {"lowest": 20}, [20, 20, 20, 20]),
        (4, {"highest": 20}, [20, 20, 20, 20]),
        (1, {}, [20]),
    ],
)
def test_pyramids(layers, options, expected):
    options = {"lowest": 0, "highest": 100, "beta": 4, **options}
    assert layer_budgets("pyramid", 20, layers, **options) == expected


@given(case=budgets())
@quick
def test_equal_layers_are_equal(case):
    mean, layers, lowest, highest, beta = case
    assert layer_budgets("equal", mean, layers, lowest=lowest, highest=highest, beta=beta) == [mean] * layers


@pytest.mark.parametrize("scope", ["head", "layer", "shared"])
def test_a_pyramid_over_a_row_that_holds_nothing(scope):
    """A row of padding alone keeps nothing in any layer, and its neighbour what it keeps alone."""
    rng = torch.Generator().manual_seed(0)
    layers = [torch.randn(2, 2, 20, 8, generator=rng) for _ in range(3)]
    policy = f"knorm@{scope}(layers='pyramid', beta=4)"
    kept = retain(layers, layers, policy=policy, budget=8, lengths=[20, 0])
    alone = [layer[:1] for layer in layers]
    for mask, single in zip(kept, retain(alone, alone, policy=policy, budget=8), strict=True):
        assert torch.equal(mask[:1], single) and not bool(mask[1].any())
    assert [int(mask.sum()) for mask in kept] == [28, 16, 4]
