"""Checks that components share: what passes, and what the error says."""

import math

import pytest

from kvretain.checks import between, check_choice, check_flag, check_kernel, check_share, check_whole


@pytest.mark.parametrize(
    ("check", "good", "bad", "message"),
    [
        (
            lambda v: check_whole("x", "n", v, 2),
            (2, 10**9),
            (1, True, 2.0, "2", None),
            "x: n must be a whole number",
        ),
        (lambda v: check_kernel("x", v), (1, 5, 101), (0, 4, -3, 5.0, True), "x: kernel must be an odd whole number"),
        (
            lambda v: check_share("x", "s", v),
            (0, 0.5, 1),
            (-0.1, 1.1, math.nan, True, "1"),
            "x: s must be a number",
        ),
        (
            lambda v: check_choice("x", "c", v, ("a", "b")),
            ("a", "b"),
            ("c", None, 0),
            "x: c must be one of",
        ),
        (lambda v: check_flag("x", "f", v), (True, False), (0, 1, "no", None), "x: f must be True or False, not"),
    ],
)
def test_what_passes_and_what_does_not(check, good, bad, message):
    for value in good:
        check(value)
    for value in bad:
        with pytest.raises(ValueError, match=message) as error:
            check(value)
        assert str(error.value).endswith(f"not {value!r}")


def test_numbers_between():
    assert between(0, 0, 1) and between(-1, 0.5, 1)
    assert not any(between(0, value, 1) for value in (True, math.nan, "0", None, 1.0001))
