"""Budgets: integers with a stated rounding, defaults that shrink, protections that must fit."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvretain.cache.budget import Budget
from kvretain.scores import H2O, KNorm, SnapKV


@given(st.integers(0, 99), st.integers(1, 5000))
def test_a_ratio_never_removes_more_than_asked_for_and_less_than_one_entry_less(percent, seen):
    keep = Budget(None, percent / 100).keep(seen)
    removed = Fraction(percent, 100) * seen
    assert keep == max(1, seen - math.floor(removed))


@given(st.integers(1, 300), st.sampled_from([KNorm(), SnapKV(), SnapKV(window=64), H2O()]))
def test_default_protection_fits_every_budget_and_leaves_a_quarter_free(target, scorer):
    sinks, recent = Budget(target, None).protection(target, 0, scorer)
    assert 0 <= sinks <= target // 4 and 0 <= recent <= target // 2


def test_numbers_that_the_user_gave_are_kept():
    assert Budget(10, None, sinks=6, recent=4).protection(10, 0, KNorm()) == (6, 4)
    assert Budget(10, None, sinks=9).protection(10, 0, SnapKV()) == (9, 1)
    assert Budget(10, None, recent=9).protection(10, 0, SnapKV()) == (1, 9)


@pytest.mark.parametrize(
    ("kwargs", "target", "prompt"),
    [
        ({"sinks": 6, "recent": 5}, 10, 0),
        ({"protect_prompt": True}, 10, 11),
        ({"recent": 4, "protect_prompt": True}, 10, 7),
    ],
)
def test_more_protected_entries_than_fit_name_both_numbers(kwargs, target, prompt):
    with pytest.raises(ValueError, match=rf"11 protected entries .* budget of {target} .*raise the budget"):
        Budget(None, 0.5, **kwargs).protection(target, prompt, KNorm())


@pytest.mark.parametrize("tokens", [0, -1, 2.5, "8", True])
def test_budgets_are_whole_numbers(tokens):
    with pytest.raises(ValueError, match="budget is a whole number of at least 1"):
        Budget(tokens, None)


@pytest.mark.parametrize("ratio", [1, 1.0, -0.1, "0.5", float("nan")])
def test_ratios_are_fractions_removed(ratio):
    with pytest.raises(ValueError, match="fraction removed"):
        Budget(None, ratio)


@pytest.mark.parametrize("pair", [(None, None), (8, 0.5)])
def test_both_or_neither(pair):
    with pytest.raises(ValueError, match=r"either budget .* or ratio"):
        Budget(*pair)
