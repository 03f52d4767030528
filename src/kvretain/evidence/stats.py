"""Means with percentile-bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` values and its interval from ``low`` to ``high``."""

    mean: float
    low: float
    high: float
    n: int


def bootstrap_mean(values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """The mean of ``values`` and its percentile-bootstrap interval; the same arguments give the same interval.

    Values are taken as independent draws. The interval is only as good as ``n`` is large: it is too narrow below about
    20 values, and of no width where all values are equal (say, 20 right answers of 20). For a paired comparison give
    the differences.

    Args:
        values: one number per example.
        level: the interval's probability.
        resamples: how often the values are drawn anew, with replacement.
        seed: of these draws.

    Raises:
        ValueError: no values, values that are not finite, or ``level`` outside (0, 1).

    Example:
        >>> bootstrap_mean([1.0, 2.0, 3.0]).mean
        2.0
    """
    data = torch.tensor(list(values), dtype=torch.float64)
    if not len(data) or not bool(data.isfinite().all()):
        raise ValueError("bootstrap_mean needs at least one value, and finite ones")
    if not 0 < level < 1:
        raise ValueError(f"level lies in (0, 1), not {level}")
    generator = torch.Generator().manual_seed(seed)
    means = []
    for start in range(0, resamples, 1000):
        drawn = torch.randint(len(data), (min(1000, resamples - start), len(data)), generator=generator)
        means.append(data[drawn].mean(1))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.cat(means).quantile(tails).tolist()
    return Interval(data.mean().item(), low, high, len(data))
