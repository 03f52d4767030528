"""Is one arm better than another? Paired cluster bootstrap, correction for several cells, pre-registered branches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Bounds(NamedTuple):
    """An interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """What :func:`paired_cluster_bootstrap` found.

    Attributes:
        difference: mean of treatment minus mean of baseline, over runs.
        interval: percentile-bootstrap interval of it.
        p_value: two-sided, of the hypothesis that the arms do not differ; at least 1 / (resamples + 1).
        clusters, runs: how many there were.
        level, resamples, seed: as asked.
    """

    difference: float
    interval: Bounds
    p_value: float
    clusters: int
    runs: int
    level: float
    resamples: int
    seed: int


def paired_cluster_bootstrap(
    baseline: Sequence[float],
    treatment: Sequence[float],
    clusters: Sequence[Any],
    *,
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Comparison:
    """Compares two arms that ran on the same problems, where runs of one problem belong together.

    *Interval.* Clusters are drawn with replacement, each with all its runs; the interval holds the middle ``level`` of
    the resampled differences (percentile bootstrap). It is somewhat narrow for few clusters.

    *p-value.* The hypothesis is imposed instead: each cluster's difference keeps or changes its sign at random, which
    is the wild cluster bootstrap with Rademacher weights (Cameron, Gelbach and Miller 2008). The p-value is
    ``(1 + n) / (1 + resamples)``, where ``n`` counts resamples whose difference is at least as far from 0 as the
    observed one. Where the arms do not differ, swapping them within a problem changes nothing, and the p-value is
    exact for any number of clusters. Counting how often resamples of the percentile bootstrap cross 0 is a little too
    optimistic instead; ``docs/evidence.md`` shows both. So an interval may exclude 0 where p is just above
    ``1 - level``: the p-value decides.

    Equal differences in all clusters give an interval of no width, and a p-value that still depends on how many
    clusters there are; no differences at all give p = 1.

    Args:
        baseline, treatment: one number per run, such as 1 for right and 0 for wrong; run ``i`` of one arm is paired
            with run ``i`` of the other. Lists, arrays or tensors.
        clusters: which problem each run belongs to. Problems may have different numbers of runs; each run counts the
            same.
        resamples: how many, for interval and p-value each.
        seed: of both.
        level: the interval's probability.

    Raises:
        ValueError: lengths differ, a value is not finite, there are fewer than two clusters, or ``resamples`` or
            ``level`` are out of range.

    Example:
        >>> found = paired_cluster_bootstrap([0, 0, 1, 0] * 10, [1, 0, 1, 0] * 10, [i // 2 for i in range(40)])
        >>> found.difference, found.interval.low > 0, found.p_value < 0.01
        (0.25, True, True)
    """
    sums, sizes = cluster_differences(baseline, treatment, clusters)
    if isinstance(resamples, bool) or not isinstance(resamples, int) or resamples < 1:
        raise ValueError(f"resamples must be a whole number of at least 1, not {resamples!r}")
    if not 0 < level < 1:
        raise ValueError(f"level lies in (0, 1), not {level}")
    generator = torch.Generator().manual_seed(seed)
    runs = int(sizes.sum())

    means = []
    for count in _chunks(resamples, len(sums)):
        drawn = torch.randint(len(sums), (count, len(sums)), generator=generator)
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.cat(means).quantile(tails).tolist()
    p_value = sign_p_values(sums[None], resamples=resamples, generator=generator).item()
    difference = (sums.sum() / runs).item()
    return Comparison(difference, Bounds(low, high), p_value, len(sums), runs, level, resamples, seed)


def cluster_differences(
    baseline: Sequence[float], treatment: Sequence[float], clusters: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """Sums of treatment minus baseline, and numbers of runs, of each cluster in order of appearance, float64.

    Raises:
        ValueError: lengths differ, a value is not finite, or there are fewer than two clusters.
    """
    arms = [_values(name, arm) for name, arm in (("baseline", baseline), ("treatment", treatment))]
    labels = clusters.tolist() if hasattr(clusters, "tolist") else list(clusters)
    lengths = len(arms[0]), len(arms[1]), len(labels)
    if len(set(lengths)) > 1:
        raise ValueError(
            "baseline, treatment and clusters need one entry per run each, but have "
            f"{lengths[0]}, {lengths[1]} and {lengths[2]}"
        )
    numbers: dict[Any, int] = {}
    for label in labels:
        if label is None or label != label:
            raise ValueError(f"a cluster is {label!r}: each run needs the problem that it belongs to")
        numbers.setdefault(label, len(numbers))
    if len(numbers) < 2:
        raise ValueError(f"a comparison needs at least two clusters, not {len(numbers)}")
    index = torch.tensor([numbers[label] for label in labels])
    empty = torch.zeros(len(numbers), dtype=torch.float64)
    sums = empty.index_add(0, index, arms[1] - arms[0])
    return sums, empty.index_add(0, index, torch.ones_like(arms[0]))


def _values(name: str, arm: Sequence[float]) -> Tensor:
    values = torch.as_tensor(arm if hasattr(arm, "__array__") else list(arm), dtype=torch.float64).cpu()
    if values.ndim != 1:
        raise ValueError(f"{name} needs one number per run, not an array of shape {tuple(values.shape)}")
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite: {int((~values.isfinite()).sum())} of {len(values)}")
    return values


def sign_p_values(differences: Tensor, *, resamples: int, generator: torch.Generator) -> Tensor:
    """Two-sided p-values of :func:`paired_cluster_bootstrap`, for many comparisons with the same signs at once.

    Args:
        differences: ``(S, C)`` float64, sums of each cluster in ``S`` comparisons.
        resamples: how many draws of signs.
        generator: of the signs.

    Returns:
        ``(S,)`` float64.
    """
    # What differs by rounding only is a tie, and ties are as extreme as what was observed.
    observed = differences.sum(1).abs() - 1e-9 * differences.abs().sum(1)
    extreme = torch.zeros(len(differences), dtype=torch.int64)
    for count in _chunks(resamples, max(differences.shape)):
        signs = torch.randint(2, (count, differences.shape[1]), generator=generator).double().mul_(2).sub_(1)
        extreme += ((signs @ differences.T).abs() >= observed).sum(0)
    return (1 + extreme).double() / (1 + resamples)


def _chunks(resamples: int, width: int, entries: int = 4_000_000) -> Iterable[int]:
    """Parts of ``resamples`` that take about ``entries`` numbers of memory each."""
    most = max(1, entries // width)
    return [min(most, resamples - start) for start in range(0, resamples, most)]


def bonferroni(p_values: Sequence[float], *, cells: int | None = None) -> list[float]:
    """The p-values times the number of cells, at most 1: below ``alpha`` each, they keep all errors together below it.

    Args:
        p_values: of the cells that have one.
        cells: how many were planned, if some have no verdict; they still count.

    Raises:
        ValueError: a p-value outside [0, 1], or fewer ``cells`` than p-values.

    Example:
        >>> bonferroni([0.01, 0.5], cells=4)
        [0.04, 1.0]
    """
    p_values = [float(p) for p in p_values]
    cells = len(p_values) if cells is None else cells
    if cells < len(p_values):
        raise ValueError(f"cells={cells}, but there are {len(p_values)} p-values")
    for p in p_values:
        if not 0 <= p <= 1:
            raise ValueError(f"a p-value lies in [0, 1], not {p}")
    return [min(1.0, p * cells) for p in p_values]


@dataclass(frozen=True)
class Cell:
    """One comparison of a study.

    Attributes:
        model: which model.
        name: what else distinguishes it, such as the budget.
        comparison: its result; None if it carries no verdict, as where the mean cache did not match.
    """

    model: str
    name: str
    comparison: Comparison | None


def significant(cells: Sequence[Cell], alpha: float = 0.05) -> list[int]:
    """1 for each cell that is significantly better after :func:`bonferroni` over all cells, -1 for worse, 0 otherwise.

    Raises:
        ValueError: ``alpha`` outside (0, 1).
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha lies in (0, 1), not {alpha}")
    found = []
    for cell in cells:
        (p,) = bonferroni([cell.comparison.p_value], cells=len(cells)) if cell.comparison else [1.0]
        found.append(int(math.copysign(1, cell.comparison.difference)) if cell.comparison and p <= alpha else 0)
    return found


def branch(cells: Sequence[Cell], *, alpha: float = 0.05, models: Iterable[str] | None = None) -> str:
    """The pre-registered conclusion of a study.

    - ``"A"``, confirmed: each required model has a significantly better cell, and no cell is significantly worse.
    - ``"B"``, not confirmed: no cell is significantly worse, but not each required model has a significantly better
      one. That includes a gain on one model only, which the rule treats as no finding.
    - ``"C"``, harmful: some cell is significantly worse, whatever the others say.

    Significance is two-sided after Bonferroni over all cells of the plan; a cell without verdict counts in that number
    and is neither better nor worse.

    Args:
        cells: all that were planned.
        alpha: the family-wise error.
        models: that the effect must show on; by default all that occur.

    Raises:
        ValueError: no cells, the same cell twice, a required model without a cell, or ``alpha`` outside (0, 1).
    """
    if not cells:
        raise ValueError("a study without cells has no conclusion")
    names = [(cell.model, cell.name) for cell in cells]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(f"the cell {' '.join(twice)} comes more than once")
    present = {cell.model for cell in cells}
    required = present if models is None else set(models)
    if not required or required - present:
        missing = ", ".join(sorted(required - present)) or "none is named"
        raise ValueError(f"required models without a cell: {missing}")
    signs = significant(cells, alpha)
    if -1 in signs:
        return "C"
    better = {cell.model for cell, sign in zip(cells, signs, strict=True) if sign == 1}
    return "A" if required <= better else "B"
