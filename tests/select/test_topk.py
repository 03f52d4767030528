"""Top-k against a sorted reference, ties above all; and every error."""

from __future__ import annotations

import doctest
import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvretain.select import TopK, select_topk, selectors

quick = settings(max_examples=80, deadline=None)
coarse = st.integers(-3, 3).map(lambda level: level / 4)  # ties are the rule
values = st.one_of(coarse, coarse, st.floats(-1, 1, width=32), st.just(-math.inf))


def reference(scores: list[float], keep: int, protected: list[bool]) -> list[int]:
    order = sorted(range(len(scores)), key=lambda i: (not protected[i], -scores[i], i))
    return sorted(order[:keep])


@st.composite
def cases(draw):
    rows, size = draw(st.integers(1, 3)), draw(st.integers(1, 16))
    keep = draw(st.integers(1, size))
    grid = [draw(st.lists(values, min_size=size, max_size=size)) for _ in range(rows)]
    shut = [draw(st.sets(st.integers(0, size - 1), max_size=keep)) for _ in range(rows)]
    return grid, keep, [[i in row for i in range(size)] for row in shut]


@given(case=cases())
@quick
def test_equals_a_sort(case):
    grid, keep, protected = case
    chosen = select_topk(torch.tensor(grid), keep, protected=torch.tensor(protected))
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == [reference(s, keep, p) for s, p in zip(grid, protected, strict=True)]
    bare = select_topk(torch.tensor(grid), keep)
    assert bare.tolist() == [reference(s, keep, [False] * len(s)) for s in grid]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_the_set_does_not_depend_on_the_dtype(dtype):
    """Scores born in bfloat16, full of ties, give one set in every wider dtype."""
    scores = torch.rand(2, 3, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = [[reference(s, 37, [False] * 500) for s in row] for row in scores.tolist()]
    if dtype != torch.float16:
        assert select_topk(scores.to(dtype), 37).tolist() == expected
    half = scores.half()
    assert select_topk(half, 37).tolist() == select_topk(half.double(), 37).tolist()


@pytest.mark.parametrize("shape", [(9,), (1, 9), (2, 1, 9), (2, 0, 9)], ids=str)
def test_shapes(shape):
    assert select_topk(torch.rand(shape), 4).shape == (*shape[:-1], 4)


def test_keeping_everything_and_ties_everywhere():
    assert select_topk(torch.rand(5), 5).tolist() == [0, 1, 2, 3, 4]
    assert select_topk(torch.zeros(6), 3).tolist() == [0, 1, 2]
    assert select_topk(torch.tensor([0.0, -0.0, 1.0, 0.0]), 3).tolist() == [0, 1, 2]


def test_the_documented_example():
    assert doctest.testmod(importlib.import_module("kvretain.select.topk")) == (0, 1)


def test_padding_comes_last():
    scores = torch.tensor([-math.inf, 1.0, -math.inf, -5.0])
    assert select_topk(scores, 2).tolist() == [1, 3]
    assert select_topk(scores, 3).tolist() == [0, 1, 3]  # only when nothing else is left


def test_protected_entries_come_first():
    scores = torch.tensor([[0.1, 9.0, math.nan, 8.0], [-math.inf, 9.0, 7.0, 8.0]])
    protected = torch.tensor([True, False, True, False])
    assert select_topk(scores, 3, protected=protected).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert select_topk(scores, 2, protected=protected).tolist() == [[0, 2], [0, 2]]


def test_it_is_the_registered_selector():
    assert selectors["topk"] is TopK
    scores, protected = torch.rand(2, 3, 9), torch.zeros(2, 3, 9, dtype=torch.bool)
    assert torch.equal(TopK().select(scores, 4, protected=protected), select_topk(scores, 4))
    with pytest.raises(ValueError, match=r"unknown selector 'best'; valid: .*topk"):
        selectors["best"]


@pytest.mark.parametrize("keep", [0, -1, 10, 2.0, 2.5, True, "3", None])
def test_keep_must_be_a_whole_number_within_reach(keep):
    with pytest.raises(
        ValueError, match=f"keep must be a whole number from 1 to the 9 entries there are, not {keep!r}"
    ):
        select_topk(torch.rand(9), keep)


def test_nothing_can_be_kept_of_nothing():
    with pytest.raises(ValueError, match="from 1 to the 0 entries there are"):
        select_topk(torch.rand(2, 0), 1)


def test_too_many_protected_entries():
    protected = torch.tensor([[True] * 3 + [False] * 6, [True] * 5 + [False] * 4])
    message = (
        "5 entries are protected, but only 4 may be kept: raise the budget, or protect fewer sinks, recent or prompt"
    )
    with pytest.raises(ValueError, match=message):
        select_topk(torch.rand(2, 9), 4, protected=protected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_must_be_numbers(value):
    scores = torch.rand(2, 9)
    scores[1, 4] = value
    for protected in (None, torch.arange(9) < 2):
        with pytest.raises(ValueError, match=f"scores must be numbers below .inf, but one is {value}"):
            select_topk(scores, 3, protected=protected)


@pytest.mark.parametrize(
    ("scores", "protected", "message"),
    [
        (torch.arange(9), None, r"scores must be floating point of shape \(..., N\), not torch.int64"),
        (torch.tensor(1.0), None, r"not torch.float32 \(\)"),
        (torch.rand(2, 9), torch.zeros(9), "protected must be bool, not torch.float32"),
        (
            torch.rand(2, 9),
            torch.zeros(3, 9).bool(),
            r"protected of shape \(3, 9\) does not fit scores of shape \(2, 9\)",
        ),
        (torch.rand(2, 9), torch.zeros(1, 2, 9).bool(), r"protected of shape \(1, 2, 9\) does not fit"),
        (torch.rand(2, 9), torch.zeros(1).bool(), r"protected of shape \(1,\) does not fit"),
    ],
)
def test_shapes_and_dtypes_are_checked(scores, protected, message):
    with pytest.raises(ValueError, match=message):
        select_topk(scores, 1, protected=protected)
