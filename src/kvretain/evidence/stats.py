"""Means with percentile-bootstrap intervals, and shares with Wilson's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

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


def wilson(hits: int, n: int, *, level: float = 0.95) -> Interval:
    """The share ``hits / n`` and Wilson's score interval (1927), which stays honest where all or none are hits.

    Raises:
        ValueError: ``n`` below 1, ``hits`` outside 0 to ``n``, or ``level`` outside (0, 1).

    Example:
        >>> found = wilson(20, 20)
        >>> found.mean, round(found.low, 3), found.high
        (1.0, 0.839, 1.0)
    """
    if not 0 <= hits <= n or n < 1:
        raise ValueError(f"{hits} of {n} is no share")
    if not 0 < level < 1:
        raise ValueError(f"level lies in (0, 1), not {level}")
    z, share = NormalDist().inv_cdf((1 + level) / 2), hits / n
    centre, width = share + z * z / (2 * n), z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    low, high = ((centre + sign * width) / (1 + z * z / n) for sign in (-1, 1))
    return Interval(share, max(low, 0.0) if hits else 0.0, min(high, 1.0) if hits < n else 1.0, n)
