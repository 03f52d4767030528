"""Summaries of an evaluation: means with intervals, and paired differences that a refiner or selector makes."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..policy import Policy
from ..select import TopK
from .measure import FULL, Case, Measurement
from .significance import bonferroni, sign_p_values
from .stats import Interval, bootstrap_mean
from .store import Store

ALPHA = 0.05

METRICS = ("exact", "score", "nll", "kl")
TITLES = {"exact": "exact, %", "score": "score, %", "nll": "NLL", "kl": "KL"}
PERCENT = ("exact", "score")
"""Metrics in [0, 1] that are shown in percent, and of which more is better."""


def values_of(row: Measurement, metric: str) -> list[float]:
    """A row's values of a metric that count as independent: the example's one, none if it has none, or for decoding the
    mean of each passage.

    Tokens of a passage depend on each other and passages do not: resampling passages is a block bootstrap.
    """
    tokens = {"nll": row.token_nll, "kl": row.token_kl}.get(metric)
    if tokens is not None:
        return [math.fsum(passage) / len(passage) for passage in tokens]
    value = getattr(row, metric)
    return [] if value is None else [float(value)]


def base_of(policy: str) -> str | None:
    """The same policy without its refiner or, if it has none, with top-k for its selector; None for a plain policy.

    Example:
        >>> base_of("snapkv+hub@layer"), base_of("snapkv/diverse"), base_of("snapkv")
        ('snapkv@layer', 'snapkv', None)
    """
    parsed = Policy.parse(policy)
    plain = dataclasses.replace(parsed, refiner=None)
    if parsed.refiner is None:
        plain = dataclasses.replace(parsed, selector=TopK())
    return None if plain == parsed else str(plain)


def summarise(rows: Sequence[Measurement], *, seed: int = 0, resamples: int = 10_000) -> dict[str, Any]:
    """Means over examples, each with its 95 % bootstrap interval.

    Returns:
        ``cells``: per task, size and policy: examples ``n`` and the metrics, each a mean and an interval over
        :func:`values_of` the examples; for streamed tasks ``mean_cache`` and ``peak_cache``, and whether the mean is
        ``uneven``: more than 1 % off the median of the policies of that size. ``differences``: the same for policy
        minus its base (:func:`base_of`), over the examples that both have, and in ``p`` the metrics' p-values
        (:func:`~kvretain.evidence.significance.sign_p_values`), alone and after Bonferroni's correction.
        ``comparisons``: how many differences there are (a metric of a policy at a size in a task is one), how many
        have an interval that excludes 0, and how many a corrected p-value below 0.05.
    """
    table = _table(rows)

    def interval(values: list[float]) -> dict[str, Any]:
        return dataclasses.asdict(bootstrap_mean(values, seed=seed, resamples=resamples))

    cells: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    tests: list[tuple[dict[str, Any], str, list[float]]] = []
    for (task, case), examples in table.items():
        cell: dict[str, Any] = {"task": task, **dataclasses.asdict(case), "n": len(examples)}
        cell["kept"] = sum(row.kept for row in examples.values()) / len(examples)
        for name in ("mean_cache", "peak_cache"):
            lengths = [length for row in examples.values() if (length := getattr(row, name)) is not None]
            if lengths:
                cell[name] = sum(lengths) / len(lengths) if name == "mean_cache" else max(lengths)
        for name in METRICS:
            values = [value for row in examples.values() for value in values_of(row, name)]
            cell[name] = interval(values) if values else None
        cells.append(cell)
        base = base_of(case.policy)
        against = table.get((task, dataclasses.replace(case, policy=base)), {}) if base else {}
        shared = sorted(examples.keys() & against.keys())
        if shared:
            difference: dict[str, Any] = {"task": task, "base": base, **dataclasses.asdict(case)}
            difference["n"], difference["p"] = len(shared), {}
            for name in METRICS:
                values = _minus(examples, against, name)
                difference[name] = interval(values) if values else None
                if values:
                    tests.append((difference, name, values))
            differences.append(difference)
    _flag_uneven(cells)
    # Enough resamples for a p-value to fall well below Bonferroni's threshold.
    enough = max(resamples, 1000 * math.ceil(2 * len(tests) / ALPHA / 1000))
    p_values = _p_values([values for *_, values in tests], seed=seed, resamples=enough)
    corrected = bonferroni(p_values)
    for (difference, name, _), p, least in zip(tests, p_values, corrected, strict=True):
        difference["p"][name] = {"alone": p, "corrected": least}
    comparisons = {
        "number": len(tests),
        "excluding_0": sum(_excludes_0(difference[name]) for difference, name, _ in tests),
        "after_bonferroni": sum(p < ALPHA for p in corrected),
        "resamples": enough,
    }
    return {
        "cells": cells,
        "differences": differences,
        "comparisons": comparisons,
        "level": 1 - ALPHA,
        "resamples": resamples,
        "seed": seed,
    }


def compare(rows: Sequence[Measurement], first: str, second: str, *, seed: int = 0) -> list[dict[str, Any]]:
    """``first`` minus ``second``, two policies of a run, paired by example.

    Returns:
        Per task and size that both were run at: ``task``, ``ratio``, ``budget``, examples ``n``, and per metric a mean
        with its 95 % percentile-bootstrap interval, None if it was not measured.

    Raises:
        ValueError: a policy that the run does not hold, or two without an example in common.
    """
    table = _table(rows)
    names = [str(Policy.parse(text)) for text in (first, second)]
    held = list(dict.fromkeys(case.policy for _, case in table))
    if missing := [name for name in names if name not in held]:
        raise ValueError(f"the run holds no policy {missing[0]!r}; it holds {', '.join(held)}")
    found = []
    for (task, case), examples in table.items():
        against = table.get((task, dataclasses.replace(case, policy=names[1])), {})
        if case.policy == names[0] and (shared := examples.keys() & against.keys()):
            line: dict[str, Any] = {"task": task, "ratio": case.ratio, "budget": case.budget, "n": len(shared)}
            for name in METRICS:
                values = _minus(examples, against, name)
                line[name] = dataclasses.asdict(bootstrap_mean(values, seed=seed)) if values else None
            found.append(line)
    if not found:
        raise ValueError(f"{names[0]!r} and {names[1]!r} have no task, size and example in common")
    return found


def compared(differences: list[dict[str, Any]], first: str, second: str) -> str:
    """What :func:`compare` has found, as a table."""
    measured = [name for name in METRICS if any(line[name] for line in differences)]
    lines = [
        f"`{first}` minus `{second}`, paired by example, 95 % intervals (not corrected for how many are looked at):",
        "",
        f"| task | removed | n | {' | '.join(TITLES[name] for name in measured)} |",
        f"|---|---|---|{'---|' * len(measured)}",
    ]
    for line in sorted(differences, key=lambda line: (line["task"], line["budget"] or 0, line["ratio"] or 0)):
        shown = [_shown(line[name], percent=name in PERCENT, signed=True) for name in measured]
        lines.append(f"| {line['task']} | {_removed(line)} | {line['n']} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Measurement]) -> dict[tuple[str, Case], dict[int, Measurement]]:
    """Rows by task and case, then by example."""
    table: dict[tuple[str, Case], dict[int, Measurement]] = defaultdict(dict)
    for row in rows:
        table[row.task, row.case][row.index] = row
    return table


def _minus(examples: dict[int, Measurement], against: dict[int, Measurement], name: str) -> list[float]:
    """Paired differences of a metric, over the examples that both have."""
    shared = sorted(examples.keys() & against.keys())
    pairs = [(values_of(examples[index], name), values_of(against[index], name)) for index in shared]
    return [a - b for pair in pairs for a, b in zip(*pair, strict=True)]


def _flag_uneven(cells: list[dict[str, Any]]) -> None:
    """Marks policies that held more or less than the others of their size, over the whole run."""
    for cell in cells:
        if "mean_cache" in cell and cell["policy"] != FULL.policy:
            place = (cell["task"], cell["ratio"], cell["budget"])
            alike = [c["mean_cache"] for c in cells if (c["task"], c["ratio"], c["budget"]) == place]
            cell["uneven"] = abs(cell["mean_cache"] / median(alike) - 1) > 0.01


def publish(store: Store, about: dict[str, Any]) -> tuple[dict[str, Any], str, list[Path]]:
    """Writes the summary of all rows in ``store`` beside them; the same rows give the same files.

    Args:
        store: the evaluation.
        about: what else there is to know, for the head of the page.

    Returns:
        The summary, the page, and the paths written.
    """
    notes = {"data": store.sources, "earlier commands": "; ".join(store.earlier)}
    about = {**store.identity, **{name: value for name, value in notes.items() if value}, **about}
    summary = summarise(store.rows(), seed=store.identity["seed"])
    page = markdown(summary, about)
    return summary, page, store.finish(about, {**about, **summary}, page)


def _p_values(samples: list[list[float]], *, seed: int, resamples: int) -> list[float]:
    """Of the hypotheses that the means of ``samples`` are 0; those of equal size share their resamples."""
    found = [1.0] * len(samples)
    for size in {len(values) for values in samples}:
        which = [at for at, values in enumerate(samples) if len(values) == size]
        data = torch.tensor([samples[at] for at in which], dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        for at, p in zip(which, sign_p_values(data, resamples=resamples, generator=generator).tolist(), strict=True):
            found[at] = p
    return found


def _excludes_0(interval: dict[str, Any]) -> bool:
    return bool(interval["low"] > 0 or interval["high"] < 0)


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
        "Means over examples (decode: over passages) with 95 % percentile-bootstrap intervals; these are too narrow "
        "below about 20 examples and of no width at 0 and 100 %. *removed*: fraction of the entries, or all but a "
        "budget; *exact*: right greedy replies; *NLL*: nats per token of the right reply (or of the true text), "
        "teacher-forced; *KL*: nats per token to the full cache. Lower is better for NLL and KL."
        + " *score*: the benchmark's own metric, of 100."
        * any(cell["score"] for cell in summary["cells"]),
    ]
    for task in dict.fromkeys(cell["task"] for cell in summary["cells"]):
        cells = [cell for cell in summary["cells"] if cell["task"] == task]
        cells = _in_order(cells)
        streamed = any("mean_cache" in cell for cell in cells)
        second = next((name for name in ("kl", "score") if any(cell[name] for cell in cells)), "exact")
        lines += [
            "",
            f"## {task}",
            "",
            f"| removed | policy | n | {'mean cache (peak)' if streamed else 'kept'} | {TITLES[second]} | NLL |",
            "|---|---|---|---|---|---|",
        ]
        for cell in cells:
            measured = _shown(cell[second], percent=second in PERCENT)
            held = f"{cell['kept']:.0f}"
            if streamed:
                held = f"{cell['mean_cache']:.1f}{' ≠' if cell.get('uneven') else ''} ({cell['peak_cache']:.0f})"
            lines.append(
                f"| {_removed(cell)} | `{cell['policy']}` | {cell['nll']['n']} | {held} | {measured} "
                f"| {_shown(cell['nll'])} |"
            )
        if streamed:
            lines += [
                "",
                "*mean cache*: entries per head after each pass, their mean over the run (and their largest number).",
            ]
        if any(cell.get("uneven") for cell in cells):
            lines[-1] += " ≠: more than 1 % off the median of the policies of that size, so not comparable to them."
        for name in (second, "nll"):
            lines += _paired(summary, task, name)
    if summary["differences"]:
        found = summary["comparisons"]
        lines += [
            "",
            "## How many differences are real",
            "",
            f"The tables of what refiners and selectors add hold {found['number']} differences. "
            f"{found['excluding_0']} have a 95 % interval that excludes 0 (\\*); about "
            f"{ALPHA * found['number']:.0f} would have if none of them changed anything. After Bonferroni's "
            f"correction {found['after_bonferroni']} differ from 0 (**bold**: p-value of a paired sign bootstrap below "
            f"{ALPHA}/{found['number']}).",
        ]
    return "\n".join(lines) + "\n"


def _removed(row: dict[str, Any]) -> str:
    """A cell's or difference's size."""
    return f"{row['ratio'] or 0:g}" if row["budget"] is None else f"all but {row['budget']}"


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By size; then policies in the order in which they came, but those that differ in numbers alone side by side, by
    these numbers: a curve reads from top to bottom."""

    def parts(policy: str) -> tuple[list[Any], list[float]]:
        fields = Policy.parse(policy).to_dict().values()
        numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in fields]
        kind = [None if number else value for number, value in zip(numbers, fields, strict=True)]
        return kind, [value for number, value in zip(numbers, fields, strict=True) if number]

    known = {policy: parts(policy) for policy in dict.fromkeys(row["policy"] for row in rows)}
    kinds = [kind for kind, _ in known.values()]

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        kind, numbers = known[row["policy"]]
        return row["budget"] or 0, row["ratio"] or 0, row["policy"] != FULL.policy, kinds.index(kind), numbers

    return sorted(rows, key=key)


def _paired(summary: dict[str, Any], task: str, name: str) -> list[str]:
    """One metric's paired differences: a row a policy, a column a size."""
    rows = _in_order([row for row in summary["differences"] if row["task"] == task and row[name]])
    if not rows:
        return []
    better = "more" if name in PERCENT else "less"
    columns = list(dict.fromkeys(map(_removed, rows)))
    lines = [
        "",
        f"What the refiner (or, without one, the selector) adds, {TITLES[name]}: policy minus its base at the same "
        f"size, paired by example ({better} is better):",
        "",
        f"| policy | n | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        of = {_removed(row): row for row in rows if row["policy"] == policy}
        sizes = sorted({row[name]["n"] for row in of.values()})
        n = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        shown = []
        for column in columns:
            row = of.get(column)
            text = _shown(row and row[name], percent=name in PERCENT, signed=True)
            if row and _excludes_0(row[name]):
                text = text.replace(" ", "\\* ", 1)
            if row and row["p"][name]["corrected"] < ALPHA:
                text = f"**{text}**"
            shown.append(text)
        lines.append(f"| `{policy}` | {n} | {' | '.join(shown)} |")
    return lines
