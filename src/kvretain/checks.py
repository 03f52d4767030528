"""Checks of what users give components: one error that names the component, the field, and what would be valid."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_whole(owner: str, field: str, value: object, lowest: int) -> None:
    """Raise ``ValueError`` unless ``value`` is an ``int`` of at least ``lowest``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise ValueError(f"{owner}: {field} must be a whole number of at least {lowest}, not {value!r}")


def check_kernel(owner: str, kernel: object) -> None:
    """Raise ``ValueError`` unless ``kernel`` is an odd whole number."""
    if isinstance(kernel, bool) or not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"{owner}: kernel must be an odd whole number of at least 1, not {kernel!r}")


def check_share(owner: str, field: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a number from 0 to 1."""
    if not between(0, value, 1):
        raise ValueError(f"{owner}: {field} must be a number from 0 to 1, not {value!r}")


def check_choice(owner: str, field: str, value: object, valid: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``valid``."""
    if value not in valid:
        raise ValueError(f"{owner}: {field} must be one of {', '.join(map(repr, valid))}, not {value!r}")


def check_flag(owner: str, field: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{owner}: {field} must be True or False, not {value!r}")


def check_scores(owner: str, scores: Tensor) -> float:
    """The largest of ``scores``, 0 if there are none; ``ValueError`` unless all are finite and >= 0."""
    if scores.numel() == 0:
        return 0.0
    low, high = torch.stack(scores.aminmax()).tolist()  # NaN propagates to both
    if math.isnan(low) or high == math.inf or low == -math.inf:
        bad = scores[~scores.isfinite()][0].item()
        raise ValueError(f"{owner}: scores must be finite, but an unprotected one is {bad}")
    if low < 0:
        raise ValueError(
            f"{owner}: scores must be >= 0, but an unprotected one is {low}: a discount would raise it. "
            "Shift signed scores first, as Scorer.nonnegative does"
        )
    return high


def between(low: float, value: object, high: float) -> bool:
    """Whether ``value`` is a number, and in [low, high]."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
