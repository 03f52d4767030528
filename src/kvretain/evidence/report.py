"""Summaries of an evaluation: means with intervals, and paired differences that a refiner makes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ..policy import Policy
from .measure import FULL, Case, Measurement
from .stats import Interval, bootstrap_mean

METRICS: dict[str, Callable[[Measurement], float | None]] = {
    "exact": lambda row: None if row.exact is None else float(row.exact),
    "nll": lambda row: row.nll,
    "kl": lambda row: row.kl,
}


def base_of(policy: str) -> str | None:
    """The same policy without its refiner; None if it has none.

    Example:
        >>> base_of("snapkv+hub@layer"), base_of("snapkv")
        ('snapkv@layer', None)
    """
    parsed = Policy.parse(policy)
    return None if parsed.refiner is None else str(dataclasses.replace(parsed, refiner=None))


def summarise(rows: Sequence[Measurement], *, seed: int = 0, resamples: int = 10_000) -> dict[str, Any]:
    """Means over examples, each with its 95 % bootstrap interval.

    Returns:
        ``cells``: per task, ratio and policy: ``n`` and the metrics, each a mean and an interval. ``differences``: the
        same for policy minus its base without refiner, over the examples that both have.
    """
    table: dict[tuple[str, Case], dict[int, Measurement]] = defaultdict(dict)
    for row in rows:
        table[row.task, Case(row.policy, row.ratio)][row.index] = row

    def interval(values: list[float]) -> dict[str, Any]:
        return dataclasses.asdict(bootstrap_mean(values, seed=seed, resamples=resamples))

    cells, differences = [], []
    for (task, case), examples in table.items():
        cell: dict[str, Any] = {"task": task, "policy": case.policy, "ratio": case.ratio, "n": len(examples)}
        cell["kept"] = sum(row.kept for row in examples.values()) / len(examples)
        for name, metric in METRICS.items():
            values = [value for row in examples.values() if (value := metric(row)) is not None]
            cell[name] = interval(values) if values else None
        cells.append(cell)
        base = base_of(case.policy)
        against = table.get((task, Case(base, case.ratio)), {}) if base else {}
        shared = sorted(examples.keys() & against.keys())
        if shared:
            difference: dict[str, Any] = {"task": task, "policy": case.policy, "base": base, "ratio": case.ratio}
            difference["n"] = len(shared)
            for name, metric in METRICS.items():
                pairs = [(metric(examples[i]), metric(against[i])) for i in shared]
                values = [a - b for a, b in pairs if a is not None and b is not None]
                difference[name] = interval(values) if values else None
            differences.append(difference)
    return {"cells": cells, "differences": differences, "level": 0.95, "resamples": resamples, "seed": seed}


def _shown(value: dict[str, Any] | None, percent: bool = False, signed: bool = False) -> str:
    if value is None:
        return "–"
    interval = Interval(**value)
    scale, digits = (100, 0) if percent else (1, 3)
    sign = "+" if signed else ""
    low, mean, high = (f"{scale * part:{sign}.{digits}f}" for part in (interval.low, interval.mean, interval.high))
    return f"{mean} [{low}, {high}]"


def markdown(summary: dict[str, Any], about: dict[str, Any]) -> str:
    """The summary as tables, with what is needed to read and to repeat it."""
    lines = ["# Evaluation", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        "",
        "Means over examples with 95 % percentile-bootstrap intervals; these are too narrow below about 20 examples "
        "and of no width at 0 and 100 %. *removed*: fraction of the context's entries; *exact*: right greedy replies; "
        "*NLL*: nats per token of the right reply (or of the true continuation), teacher-forced; *KL*: nats per token "
        "to the full cache. Lower is better for NLL and KL.",
    ]
    for task in dict.fromkeys(cell["task"] for cell in summary["cells"]):
        cells = [cell for cell in summary["cells"] if cell["task"] == task]
        cells.sort(key=lambda cell: (cell["ratio"] or 0, cell["policy"] != FULL.policy))
        second = "KL" if any(cell["kl"] for cell in cells) else "exact, %"
        lines += [
            "",
            f"## {task}",
            "",
            f"| removed | policy | n | kept | {second} | NLL |",
            "|---|---|---|---|---|---|",
        ]
        for cell in cells:
            measured = _shown(cell["kl"]) if second == "KL" else _shown(cell["exact"], percent=True)
            lines.append(
                f"| {cell['ratio'] or 0:g} | `{cell['policy']}` | {cell['n']} | {cell['kept']:.0f} | {measured} "
                f"| {_shown(cell['nll'])} |"
            )
        paired = [row for row in summary["differences"] if row["task"] == task]
        if paired:
            paired.sort(key=lambda row: row["ratio"] or 0)
            lines += ["", "What the refiner changes, paired by example (policy minus its base):", ""]
            lines += [f"| removed | policy | n | {second} | NLL |", "|---|---|---|---|---|"]
        for row in paired:
            measured = (
                _shown(row["kl"], signed=True) if second == "KL" else _shown(row["exact"], percent=True, signed=True)
            )
            lines.append(
                f"| {row['ratio'] or 0:g} | `{row['policy']}` | {row['n']} | {measured} "
                f"| {_shown(row['nll'], signed=True)} |"
            )
    return "\n".join(lines) + "\n"
