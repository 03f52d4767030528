"""What the records of a study say: cells with intervals and verdicts, and the outcome of the pre-registered rule."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .grading import Verdict
from .significance import Cell, Comparison, bonferroni, branch, paired_cluster_bootstrap, significant
from .study import Study, mean_of
from .units import Record, Results


@dataclass(frozen=True)
class Side:
    """One arm in one cell.

    Attributes:
        policy: in full; ``budget``: entries per head.
        records: its runs, in the order of the other arm's.
    """

    policy: str
    budget: int
    records: Sequence[Record]

    @property
    def accuracy(self) -> float:
        """Share of right runs."""
        return mean_of([record.right for record in self.records])

    @property
    def accuracy_exact(self) -> float:
        """The same, graded by exact string."""
        return mean_of([record.right_exact for record in self.records])

    @property
    def mean_cache(self) -> float:
        """Entries per head over the runs."""
        return mean_of([record.mean_cache for record in self.records])

    @property
    def peak_cache(self) -> float:
        """The most entries per head in any run."""
        return max(record.peak_cache for record in self.records)

    @property
    def prefill_cache(self) -> float:
        """Entries per head after the prompt, over the runs."""
        return mean_of([record.prefill_cache for record in self.records])

    @property
    def nll(self) -> float | None:
        """Mean of the proxy, None if no run has one."""
        values = [record.nll for record in self.records if record.nll is not None]
        return mean_of(values) if values else None

    @property
    def verdicts(self) -> dict[str, float]:
        """Share of each verdict."""
        counts = Counter(record.verdict for record in self.records)
        return {str(verdict): counts[str(verdict)] / len(self.records) for verdict in Verdict}


@dataclass(frozen=True)
class CellResult:
    """One comparison, on one side of the split.

    Attributes:
        model, budget, arm: which.
        baseline, treatment: the arms' runs, paired.
        comparison: of right answers; ``exact``: of those by exact string.
        matched: whether mean caches agree within the tolerance; without it there is no verdict.
        corrected: the p-value after Bonferroni over all cells of the plan; None without a verdict.
        sign: 1 significantly better, -1 worse, 0 neither; None without a verdict.
    """

    model: str
    budget: int
    arm: str
    baseline: Side
    treatment: Side
    comparison: Comparison
    exact: Comparison
    matched: bool
    corrected: float | None
    sign: int | None

    @property
    def ratio(self) -> float:
        """Mean cache of the arm over the baseline's."""
        return self.treatment.mean_cache / self.baseline.mean_cache

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.arm}, budget {self.budget}"

    @property
    def verdict(self) -> str:
        """In words."""
        words = {1: "better", -1: "worse", 0: "no significant difference"}
        return "no verdict: mean cache differs" if self.sign is None else words[self.sign]


def compare(
    study: Study, baseline: Sequence[Record], treatment: Sequence[Record], *, exact: bool = False
) -> Comparison:
    """The plan's comparison of paired runs."""
    statistics = study.plan.statistics
    before, after = ([r.right_exact if exact else r.right for r in side] for side in (baseline, treatment))
    return paired_cluster_bootstrap(
        before,
        after,
        [record.problem for record in baseline],
        resamples=statistics.resamples,
        seed=statistics.seed,
        level=statistics.level,
    )


def cells_of(study: Study, side: str, results: Results) -> list[CellResult]:
    """All cells of the plan on a side, by the frozen choice.

    Raises:
        KeyError: runs are missing.
    """
    plan = study.plan

    def arm_in(name: str, model: str, budget: int) -> Side:
        candidate, own = study.chosen(name), study.own_budget(name, model, budget)
        return Side(candidate.policy, own, results.of(study.units(side, model, candidate, own)))

    found = []
    for arm in plan.treatments:
        for model in plan.models:
            for budget in plan.budgets:
                before, after = arm_in(plan.baseline, model, budget), arm_in(arm, model, budget)
                matched = abs(after.mean_cache / before.mean_cache - 1) <= plan.tolerance
                comparison = compare(study, before.records, after.records)
                exact = compare(study, before.records, after.records, exact=True)
                corrected = bonferroni([comparison.p_value], cells=plan.cells)[0] if matched else None
                cell = CellResult(model, budget, arm, before, after, comparison, exact, matched, corrected, None)
                found.append(cell)
    tested = [Cell(c.model, c.name, c.comparison if c.matched else None) for c in found]
    signs = significant(tested, plan.statistics.alpha)
    return [replace(cell, sign=sign if cell.matched else None) for cell, sign in zip(found, signs, strict=True)]


def outcomes(study: Study, cells: Sequence[CellResult]) -> dict[str, str]:
    """The branch, A, B or C, of each arm but the baseline.

    Each arm's cells are judged alone, at its share of the family-wise error, so that Bonferroni still counts all cells
    of the plan.
    """
    plan = study.plan
    found = {}
    for arm in plan.treatments:
        own = [Cell(c.model, str(c.budget), c.comparison if c.matched else None) for c in cells if c.arm == arm]
        alpha = plan.statistics.alpha / len(plan.treatments)
        found[arm] = branch(own, alpha=alpha, models=plan.required or None)
    return found


def in_random_order(problems: Sequence[str]) -> list[str]:
    """Problem ids in an order that depends on nothing but each id, and not as the split does."""
    return sorted(set(problems), key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def as_dict(cell: CellResult) -> dict[str, Any]:
    """For ``report.json``."""

    def side(of: Side) -> dict[str, Any]:
        return {
            "policy": of.policy,
            "budget": of.budget,
            "accuracy": of.accuracy,
            "accuracy_exact": of.accuracy_exact,
            "mean_cache": of.mean_cache,
            "peak_cache": of.peak_cache,
            "prefill_cache": of.prefill_cache,
            "nll": of.nll,
            "verdicts": of.verdicts,
        }

    found = cell.comparison
    return {
        "model": cell.model,
        "budget": cell.budget,
        "arm": cell.arm,
        "baseline": side(cell.baseline),
        "treatment": side(cell.treatment),
        "difference": found.difference,
        "interval": list(found.interval),
        "p": found.p_value,
        "p_corrected": cell.corrected,
        "difference_exact": cell.exact.difference,
        "problems": found.clusters,
        "runs": found.runs,
        "ratio": cell.ratio,
        "matched": cell.matched,
        "verdict": cell.verdict,
    }
