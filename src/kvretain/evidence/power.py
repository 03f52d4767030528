"""Before the run: how large must an effect be to be found? By formula, and by simulating the whole procedure.

A pair of runs (baseline, treatment) of one problem differs by +1, 0 or -1. What decides about power is how often pairs
differ at all (``discordant``) and how alike the differences of one problem's runs are (``correlation``); both can be
estimated on the development split, see :func:`estimate_noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from .significance import cluster_differences, sign_p_values

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Design:
    """What a cell of a study will have.

    Attributes:
        problems: how many are held out.
        runs: generations of each arm per problem.
        discordant: share of pairs in which exactly one arm is right, in (0, 1].
        correlation: of the differences of two runs of one problem, in [0, 1].
        alpha: the family-wise error of the study.
        cells: over how many cells it is shared (Bonferroni).
    """

    problems: int
    runs: int = 1
    discordant: float = 0.2
    correlation: float = 0.0
    alpha: float = 0.05
    cells: int = 1

    def __post_init__(self) -> None:
        for name, least in (("problems", 2), ("runs", 1), ("cells", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        if not 0 < self.discordant <= 1:
            raise ValueError(f"discordant is a share in (0, 1], not {self.discordant}")
        if not 0 <= self.correlation <= 1:
            raise ValueError(f"correlation lies in [0, 1], not {self.correlation}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha lies in (0, 1), not {self.alpha}")

    def standard_error(self, difference: float = 0.0) -> float:
        """Of the measured difference, if the true one is ``difference``."""
        single = self.discordant - difference**2
        return math.sqrt(single * (1 + (self.runs - 1) * self.correlation) / self.runs / self.problems)


def power(design: Design, difference: float) -> float:
    """The probability that a cell turns out significant, if the arms truly differ by ``difference``.

    By normal approximation of the test: its own spread under the hypothesis grows with the difference, and differences
    come in steps, which costs power when few pairs are discordant; both are taken into account, so that simulations
    find this power or slightly more. :func:`simulated_power` needs no approximation.

    Args:
        design: the cell.
        difference: of mean accuracies, such as 0.05 for five points.

    Raises:
        ValueError: the arms cannot differ by more than they are discordant.

    Example:
        >>> round(power(Design(299, runs=3, discordant=0.22, cells=4), 0.05), 2)
        0.73
    """
    if not abs(difference) <= design.discordant:
        raise ValueError(
            f"a difference of {difference} needs at least that share of discordant pairs, not {design.discordant}"
        )
    spread = design.standard_error(difference)
    critical = -_NORMAL.inv_cdf(design.alpha / design.cells / 2)
    critical *= math.sqrt(spread**2 + difference**2 / design.problems)
    critical += (1 + (design.runs - 1) * design.correlation) / design.runs / design.problems
    if not spread:
        return float(abs(difference) > critical)
    upper, lower = (abs(difference) - critical) / spread, (-abs(difference) - critical) / spread
    return _NORMAL.cdf(upper) + _NORMAL.cdf(lower)


def minimum_detectable(design: Design, target: float = 0.8) -> float:
    """The smallest difference that is found with probability ``target``.

    Raises:
        ValueError: ``target`` does not lie between the cell's share of alpha and 1, or not even the largest possible
            difference reaches it.

    Example:
        >>> round(minimum_detectable(Design(299, runs=3, discordant=0.22, cells=4)), 4)
        0.0538
    """
    if not design.alpha / design.cells < target < 1:
        raise ValueError(f"target lies between {design.alpha / design.cells:g} and 1, not {target}")
    low, high = 0.0, design.discordant
    if power(design, high) < target:
        raise ValueError(
            f"with {design.problems} problems no difference up to {high:g}, the share of discordant pairs, is found "
            f"with probability {target:g}; plan more problems or runs"
        )
    while high - low > 1e-9:
        middle = (low + high) / 2
        if power(design, middle) < target:
            low = middle
        else:
            high = middle
    return high


def estimate_noise(
    baseline: Sequence[float], treatment: Sequence[float], clusters: Sequence[Any]
) -> tuple[float, float]:
    """``discordant`` and ``correlation`` for a :class:`Design`, estimated from runs such as those of the development
    split.

    The correlation is the one-way analysis of variance's intraclass correlation, cut to [0, 1]; 0 if each problem has
    one run, which says nothing about it.

    Args:
        baseline, treatment, clusters: as in :func:`~kvretain.evidence.paired_cluster_bootstrap`; 0 and 1 only.

    Raises:
        ValueError: other values, or what that function refuses.
    """
    sums, sizes = cluster_differences(baseline, treatment, clusters)
    pairs = [(float(a), float(b)) for a, b in zip(baseline, treatment, strict=True)]
    if any(value not in (0.0, 1.0) for pair in pairs for value in pair):
        raise ValueError("noise is estimated from outcomes that are 0 or 1")
    squares = float(sum(a != b for a, b in pairs))
    count, groups = len(pairs), len(sums)
    discordant = squares / count
    if count == groups or not discordant:
        return discordant, 0.0
    mean = sums.sum() / count
    between = (sizes * (sums / sizes - mean) ** 2).sum() / (groups - 1)
    within = (squares - (sums**2 / sizes).sum()) / (count - groups)
    size = (count - (sizes**2).sum() / count) / (groups - 1)
    total = between + (size - 1) * within
    return discordant, min(1.0, max(0.0, float((between - within) / total))) if total else 0.0


def draw_differences(design: Design, difference: float, studies: int, generator: torch.Generator) -> Tensor:
    """Sums of paired differences of each problem in simulated cells, ``(studies, problems)`` float64.

    A pair differs by +1 or -1 with the probabilities that ``design.discordant`` and ``difference`` demand. Each run
    repeats its problem's own draw with probability ``sqrt(correlation)`` and is drawn afresh otherwise, so that two
    runs correlate as asked.
    """
    shape = (studies, design.problems, design.runs)
    up, down = (design.discordant + difference) / 2, (design.discordant - difference) / 2

    def pairs(*shape: int) -> Tensor:
        chance = torch.rand(shape, generator=generator)
        return (chance < up).double() - (chance > 1 - down).double()

    common = torch.rand(shape, generator=generator) < math.sqrt(design.correlation)
    return torch.where(common, pairs(studies, design.problems, 1), pairs(*shape)).sum(2)


def simulated_power(
    design: Design, difference: float, *, studies: int = 2000, resamples: int = 10_000, seed: int = 0
) -> float:
    """The share of simulated cells that the procedure finds significant; with ``difference=0``, the error of one cell.

    Args:
        design: the cell.
        difference: the planted one.
        studies: how many cells are simulated; the result's standard error is at most ``0.5 / sqrt(studies)``.
        resamples: of the p-value.
        seed: of all draws.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = draw_differences(design, difference, studies, generator)
    p = sign_p_values(drawn, resamples=resamples, generator=generator)
    return (p <= design.alpha / design.cells).double().mean().item()
