"""Six ways in which a gain is not what it seems; each with a plain sentence and a figure.

They explain a verdict and never change it: what decides was written down in the plan.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..observe.plots import BLUE, GREEN, GREY, ORANGE, RED, SKY, check_matplotlib
from .analysis import CellResult, compare, in_random_order
from .significance import Comparison
from .study import Study, mean_of
from .units import Results

FIRST = 25
"""The smallest number of problems of which n-evaporation shows a gain."""


@dataclass(frozen=True)
class Diagnostic:
    """One way to be misled.

    Attributes:
        name: of its figure's file.
        title, sentence: for the reader.
        flagged: whether the sentence says that something is wrong.
        figure: SVG; empty without anything to show.
    """

    name: str
    title: str
    sentence: str
    flagged: bool
    figure: str


def points(value: float) -> str:
    """A difference of accuracies in percentage points."""
    return f"{100 * value:+.1f}"


def short(name: str) -> str:
    """A model's name without its folder or owner."""
    return name.rstrip("/").rpartition("/")[2]


def _label(cell: CellResult, study: Study) -> str:
    plan = study.plan
    parts = [short(cell.model)] * (len(plan.models) > 1) + [cell.arm] * (len(plan.treatments) > 1)
    return " ".join([*parts, f"b={cell.budget}"])


def _svg(figure: Any) -> str:
    from matplotlib import rc_context

    sink = io.StringIO()
    with rc_context({"svg.hashsalt": "kvretain", "svg.fonttype": "none"}):
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None})
    text = sink.getvalue()
    return text[text.index("<svg") :]


def _axes(width: float = 6.5, height: float = 3.0) -> tuple[Any, Any]:
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def forest(study: Study, cells: Sequence[CellResult]) -> str:
    """All cells' differences with intervals, as SVG."""
    figure, axes = _axes(height=1.1 + 0.42 * len(cells))
    colours = {1: GREEN, -1: RED, 0: BLUE, None: GREY}
    for place, cell in enumerate(reversed(cells)):
        low, high = (100 * bound for bound in cell.comparison.interval)
        colour = colours[cell.sign]
        axes.plot([low, high], [place, place], color=colour, lw=2, ls=":" if cell.sign is None else "-")
        axes.plot(100 * cell.comparison.difference, place, "s", color=colour)
    axes.axvline(0, color="black", lw=0.8)
    axes.set_yticks(range(len(cells)), [_label(cell, study) for cell in reversed(cells)])
    axes.set_ylim(-0.6, len(cells) - 0.4)
    axes.set_xlabel(
        f"arm minus baseline, percentage points, {100 * study.plan.statistics.level:g}% intervals (one cell each)"
    )
    return _svg(figure)


def diagnose(study: Study, cells: Sequence[CellResult], development: Results) -> list[Diagnostic]:
    """All six, from the held-out cells and, where they need it, the runs of the development split."""
    return [
        _equal_cache(study, cells, development),
        _evaporation(study, cells),
        _proxy(study, cells, development),
        _collapse(study, cells),
        _overrun(study, cells),
        _one_model(study, cells),
    ]


def _excludes_0(found: Comparison) -> int:
    return 1 if found.interval.low > 0 else -1 if found.interval.high < 0 else 0


def _equal_cache(study: Study, cells: Sequence[CellResult], development: Results) -> Diagnostic:
    """The gain if arms only agree after the prompt (the same nominal budget), beside that at matched mean cache."""
    names, nominal, matched, ratios, adjusted = [], [], [], [], []
    for cell in cells:
        candidate = study.chosen(cell.arm)
        base = development.of(study.units("development", cell.model, study.control, cell.budget))
        loose = development.of(study.units("development", cell.model, candidate, cell.budget))
        close = development.of(study.units("development", cell.model, candidate, cell.treatment.budget))
        names.append(_label(cell, study))
        nominal.append(compare(study, base, loose))
        matched.append(compare(study, base, close))
        ratios.append(mean_of([r.mean_cache for r in loose]) / mean_of([r.mean_cache for r in base]))
        adjusted.append(cell.treatment.budget != cell.budget)
    lost = [
        n for n, a, b in zip(names, nominal, matched, strict=True) if a.difference > 0 and b.difference < a.difference
    ]
    figure, axes = _axes()
    for shift, found, colour, label in ((-0.18, nominal, ORANGE, "same nominal budget"),
                                        (0.18, matched, BLUE, "matched mean cache")):  # fmt: skip
        values = [100 * c.difference for c in found]
        errors = [[100 * max(0.0, c.difference - c.interval.low) for c in found],
                  [100 * max(0.0, c.interval.high - c.difference) for c in found]]  # fmt: skip
        axes.errorbar([i + shift for i in range(len(names))], values, errors, fmt="o", color=colour, label=label)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("gain on development, points")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
    if not any(adjusted):
        sentence = (
            "At the same nominal budget the arms hold the same cache on average as well (ratio "
            f"{min(ratios):.3f} to {max(ratios):.3f}), so matching at the end of the prompt would have said the same."
        )
    else:
        told = "; ".join(
            f"{name} {points(a.difference)} at the nominal budget (mean cache {ratio:.2f} of the baseline's), "
            f"{points(b.difference)} at equal mean cache"
            for name, a, b, ratio, moved in zip(names, nominal, matched, ratios, adjusted, strict=True)
            if moved
        )
        sentence = f"Budgets had to be changed to equal mean cache; gains on development: {told}."
        if lost:
            sentence += f" Part of the gain came from more cache in: {', '.join(lost)}."
    return Diagnostic("equal-cache", "Equal-cache underperformance", sentence, bool(lost), _svg(figure))


def _steps(total: int) -> list[int]:
    sizes, size = [], FIRST
    while size < total:
        sizes.append(size)
        size *= 2
    return [*sizes, total]


def _evaporation(study: Study, cells: Sequence[CellResult]) -> Diagnostic:
    """The gain on the first n held-out problems in a random order, from 25 to all."""
    figure, axes = _axes()
    gone, total = [], len({record.problem for record in cells[0].baseline.records})
    sizes = _steps(total)
    for cell, colour in zip(cells, (BLUE, ORANGE, GREEN, RED, SKY, GREY) * len(cells), strict=False):
        order = {name: at for at, name in enumerate(in_random_order([r.problem for r in cell.baseline.records]))}
        found = []
        for size in sizes:
            pairs = zip(cell.baseline.records, cell.treatment.records, strict=True)
            some = [(a, b) for a, b in pairs if order[a.problem] < size]
            found.append(compare(study, [a for a, _ in some], [b for _, b in some]))
        middle = [100 * c.difference for c in found]
        axes.plot(sizes, middle, "o-", color=colour, label=_label(cell, study))
        bounds = [[100 * c.interval[i] for c in found] for i in (0, 1)]
        axes.fill_between(sizes, *bounds, color=colour, alpha=0.12)
        early = [(n, c) for n, c in zip(sizes[:-1], found[:-1], strict=True) if _excludes_0(c)]
        gone += [
            f"{_label(cell, study)} ({points(c.difference)} at n={n}, {points(found[-1].difference)} at n={sizes[-1]})"
            for n, c in early[:1]
            if _excludes_0(found[-1]) != _excludes_0(c)
        ]
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xlabel("held-out problems")
    axes.set_ylabel("gain, points")
    axes.legend(frameon=False, fontsize=8)
    if len(sizes) == 1:
        sentence = f"There are only {total} held-out problems: too few to see a gain shrink with n."
    elif gone:
        sentence = (
            f"An interval that excluded 0 at a smaller n no longer does with all {total} problems: {'; '.join(gone)}."
        )
    else:
        sentence = f"No difference that seemed certain at a smaller n is gone with all {total} problems."
    return Diagnostic("n-evaporation", "n-evaporation", sentence, bool(gone), _svg(figure))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's, ties sharing their mean rank; None if a side is constant.

    Example:
        >>> rank_correlation([1, 2, 3, 4], [1, 2, 4, 3]), rank_correlation([1, 1], [1, 2])
        (0.8, None)
    """

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        # index of the first and of the last equal value, from 1
        first_of = {v: i for i, v in reversed(list(enumerate(order, 1)))}
        last_of = {v: i for i, v in enumerate(order, 1)}
        return [(first_of[v] + last_of[v]) / 2 for v in values]

    a, b = ranks(first), ranks(second)
    mean = (len(a) + 1) / 2
    spread = [sum((x - mean) ** 2 for x in side) for side in (a, b)]
    if not all(spread):
        return None
    return round(sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / (spread[0] * spread[1]) ** 0.5, 12)


def _proxy(study: Study, cells: Sequence[CellResult], development: Results) -> Diagnostic:
    """Whether the likelihood of replies says the same about arms as their answers do."""
    title = "Proxy-to-runtime drift"
    if any(side.nll is None for cell in cells for side in (cell.baseline, cell.treatment)):
        return Diagnostic("proxy", title, "No proxy was measured (workload.proxy is off).", False, "")
    own = "of the right answer" if study.plan.workload.kind == "recall" else "of the model's replies under a full cache"
    figure, axes = _axes(height=3.4)
    nll, right, wrong_way = [], [], []
    for match in study.matches(development):
        if match.own is not None:
            records = development.of(study.units("development", match.model, match.candidate, match.own))
            values = [r.nll for r in records if r.nll is not None]
            if values:
                nll.append(mean_of(values))
                right.append(mean_of([r.right for r in records]))
    axes.plot(nll, [100 * r for r in right], "o", color=GREY, label="development, all candidates")
    each = []
    for cell, colour in zip(cells, (BLUE, ORANGE, GREEN, RED, SKY) * len(cells), strict=False):
        sides = cell.baseline, cell.treatment
        axes.annotate(
            "", xytext=(sides[0].nll, 100 * sides[0].accuracy), xy=(sides[1].nll, 100 * sides[1].accuracy),
            arrowprops={"arrowstyle": "->", "color": colour},
        )  # fmt: skip
        axes.plot(
            [s.nll for s in sides], [100 * s.accuracy for s in sides], ".", color=colour, label=_label(cell, study)
        )
        gain, drop = cell.comparison.difference, (sides[0].nll or 0) - (sides[1].nll or 0)
        if gain * drop < 0:
            wrong_way.append(_label(cell, study))
        pairs = [
            (a.nll - b.nll, b.right - a.right)
            for a, b in zip(cell.baseline.records, cell.treatment.records, strict=True)
            if a.nll is not None and b.nll is not None
        ]
        each.append(rank_correlation(*map(list, zip(*pairs, strict=True))))
    axes.set_xlabel(f"negative log-likelihood {own}, nats per token")
    axes.set_ylabel("right, %")
    axes.legend(frameon=False, fontsize=8)
    over = rank_correlation([-value for value in nll], right)
    told = ", ".join("–" if value is None else f"{value:+.2f}" for value in each)
    sentence = (
        f"Proxy: likelihood {own}. Rank correlation with accuracy over the {len(nll)} candidates and cells of the "
        f"development split: {'–' if over is None else f'{over:+.2f}'}; of paired changes, problem by problem, in the "
        f"held-out cells: {told}. "
    )
    sentence += (
        f"The proxy prefers the other arm in: {', '.join(wrong_way)}."
        if wrong_way
        else "In no cell does the proxy prefer the other arm."
    )
    return Diagnostic("proxy", title, sentence, bool(wrong_way) or (over is not None and over < 0), _svg(figure))


def _collapse(study: Study, cells: Sequence[CellResult]) -> Diagnostic:
    """Whether arms differ in how often there is any answer at all."""
    figure, axes = _axes(height=1.2 + 0.5 * len(cells))
    colours = {"right": GREEN, "wrong": SKY, "no_answer": RED, "cut_off": ORANGE}
    told: list[str] = []
    labels: list[str] = []
    for place, cell in enumerate(cells):
        for row, side in enumerate((cell.baseline, cell.treatment)):
            left = 0.0
            labels.append(f"{_label(cell, study)} {study.plan.baseline if not row else cell.arm}")
            for verdict, share in side.verdicts.items():
                known = verdict if not labels[1:] else None
                axes.barh(2 * place + row, 100 * share, left=left, color=colours[verdict], label=known)
                left += 100 * share
        silent = [side.verdicts["no_answer"] + side.verdicts["cut_off"] for side in (cell.baseline, cell.treatment)]
        if abs(silent[1] - silent[0]) > 0.05 or (cell.exact.difference > 0) != (cell.comparison.difference > 0):
            told.append(
                f"{_label(cell, study)}: no answer or cut off {100 * silent[0]:.0f} % against {100 * silent[1]:.0f} %, "
                f"gain {points(cell.comparison.difference)}, by exact string {points(cell.exact.difference)}"
            )
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("runs, %")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    if study.plan.workload.kind == "recall":
        sentence = "Does not arise: streamed recall forces the reply's beginning, so a run is right or wrong."
    elif told:
        sentence = f"Part of the differences may be answers that are missing or written otherwise: {'; '.join(told)}."
    else:
        sentence = (
            "Arms differ by at most 5 points in runs without an answer, and exact-string grading gives the same sign."
        )
    flagged = bool(told) and study.plan.workload.kind != "recall"
    return Diagnostic("collapse", "Extraction collapse", sentence, flagged, _svg(figure))


def _overrun(study: Study, cells: Sequence[CellResult]) -> Diagnostic:
    """What the cache held, against the budget and the baseline."""
    figure, axes = _axes()
    over: list[str] = []
    labels: list[str] = []
    for cell in cells:
        for name, side in ((study.plan.baseline, cell.baseline), (cell.arm, cell.treatment)):
            place = len(labels)
            labels.append(f"{_label(cell, study)}\n{name}")
            axes.bar(place, side.peak_cache, color=SKY, label=None if place else "peak")
            axes.bar(place, side.mean_cache, color=BLUE, width=0.5, label=None if place else "mean")
            axes.plot([place - 0.4, place + 0.4], [cell.budget] * 2, color=RED, label=None if place else "budget")
        every = study.chosen(cell.arm).cache.every
        if cell.ratio > 1 + study.plan.tolerance:
            over.append(f"{_label(cell, study)} holds {cell.ratio:.2f} of the baseline's mean cache")
        elif cell.treatment.peak_cache > cell.treatment.budget + every:
            over.append(f"{_label(cell, study)} peaks at {cell.treatment.peak_cache:.0f} entries")
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylabel("entries per head")
    axes.legend(frameon=False, fontsize=8)
    sentence = (
        f"More cache than the comparison allows: {'; '.join(over)}."
        if over
        else "No arm holds more than the baseline on average, within the tolerance, nor peaks above its budget and one "
        "interval between evictions."
    )
    means = [side.mean_cache / cell.budget for cell in cells for side in (cell.baseline, cell.treatment)]
    sentence += f" Mean cache is {min(means):.2f} to {max(means):.2f} times the nominal budget."
    return Diagnostic("overrun", "Silent budget overrun", sentence, bool(over), _svg(figure))


def _one_model(study: Study, cells: Sequence[CellResult]) -> Diagnostic:
    """Whether a gain shows on each required model."""
    title, plan = "Gains on one model only", study.plan
    models = list(plan.required or plan.models)
    figure, axes = _axes()
    for at, model in enumerate(plan.models):
        gains = [100 * c.comparison.difference for c in cells if c.model == model]
        axes.plot([at] * len(gains), gains, "o", color=BLUE)
        axes.plot([at - 0.2, at + 0.2], [mean_of(gains)] * 2, color=ORANGE)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(plan.models)), [short(model) for model in plan.models])
    axes.set_ylabel("gain of each cell, points")
    if len(models) < 2:
        sentence = (
            f"Only one model is required ({short(models[0])}): nothing here says that a gain would show on another."
        )
        return Diagnostic("one-model", title, sentence, False, _svg(figure))
    lonely = []
    for arm in plan.treatments:
        better = {c.model for c in cells if c.arm == arm and c.sign == 1}
        if better and not set(models) <= better:
            lacking = ", ".join(short(m) for m in models if m not in better)
            lonely.append(f"{arm}: significantly better on {', '.join(map(short, sorted(better)))}, not on {lacking}")
    means = "; ".join(
        f"{short(m)} {points(mean_of([c.comparison.difference for c in cells if c.model == m]))}" for m in plan.models
    )
    sentence = f"Mean gain by model: {means}. " + (
        f"{'; '.join(lonely)}." if lonely else "No gain is significant on some required models only."
    )
    return Diagnostic("one-model", title, sentence, bool(lonely), _svg(figure))
