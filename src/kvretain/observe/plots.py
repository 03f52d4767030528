"""The figures, drawn from the tables alone. Needs matplotlib (the extra ``figures``)."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .tables import Row, Table

BLACK, ORANGE, SKY, GREEN, BLUE, RED, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#999999",
)  # fmt: skip
"""Okabe and Ito's palette: told apart with any colour vision; lines differ in style as well."""

RULES = {
    "top-k": (BLUE, "-", "o"),
    "hard NMS": (RED, "--", "s"),
    "SMD": (GREEN, "-.", "^"),
    "random": (BLACK, ":", "x"),
}
ORDERS = {"top-k": (BLUE, "-"), "shuffled": (ORANGE, "--")}

BINS = 24
"""Bars of a histogram."""


def check_matplotlib() -> None:
    """Checks that figures can be drawn.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError('matplotlib is not installed; run: pip install "kvretain[figures]"', name="matplotlib")


def draw(table: Table, folder: Path) -> Path:
    """Draws ``table`` to ``<name>.png`` in ``folder`` and returns the path."""
    check_matplotlib()
    from matplotlib import rc_context

    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9.5}):
        figure = _DRAWERS[table.name](table.rows)
        width, height = figure.get_size_inches()
        caption = textwrap.fill(table.caption, int(width * 19.5))
        below = 0.155 * (caption.count("\n") + 1) + 0.12  # inches
        figure.set_size_inches(width, height + below)
        share = below / (height + below)
        figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))
        figure.suptitle(table.title, fontweight="bold", fontsize=11)
        figure.text(0.012, share - 0.05 / (height + below), caption, va="top", fontsize=7.5, color="#333333")
        path = folder / f"{table.name}.png"
        figure.savefig(path, dpi=100, facecolor="white", pil_kwargs={"optimize": True})
    return path


def _panels(rows: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    """An empty figure of ``rows x columns`` panels of that size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(width * columns, 6.0), height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _where(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _unique(rows: list[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _column(rows: list[Row], key: str, factor: float = 1.0) -> list[float]:
    return [float(row[key]) * factor for row in rows]


def _marginal_gain(rows: list[Row]) -> Any:
    scorers = _unique(rows, "scorer")
    figure, axes = _panels(1, len(scorers), width=3.3, height=3.0)
    step = rows[0]["step"]
    for axis, scorer in zip(axes[0], scorers, strict=True):
        for order, (colour, style) in ORDERS.items():
            line = _where(rows, scorer=scorer, order=order)
            kept = _column(line, "kept_share", 100)
            axis.fill_between(
                kept, _column(line, "gain_p10", 100), _column(line, "gain_p90", 100), color=colour, alpha=0.2, lw=0
            )
            axis.plot(kept, _column(line, "gain_mean", 100), color=colour, ls=style, label=order)
        axis.set(title=scorer, xlabel="already kept (% of entries)", xlim=(0, 100))
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel(f"coverage gained by the next {step}\nentries (percentage points)")
    axes[0][0].legend(frameon=False)
    _share_y(axes)
    return figure


def _autocorrelation(rows: list[Row]) -> Any:
    scorers = _unique(rows, "scorer")
    figure, axes = _panels(1, len(scorers), width=3.3, height=3.0)
    for axis, scorer in zip(axes[0], scorers, strict=True):
        line = _where(rows, scorer=scorer)
        lags = _column(line, "lag")
        heads = _column(line, "p10"), _column(line, "p90")
        axis.fill_between(lags, *heads, color=BLUE, alpha=0.2, lw=0, label="10–90 % of heads")
        axis.plot(lags, _column(line, "mean"), color=BLUE, label="mean over heads")
        low, high = _column(line, "null_low"), _column(line, "null_high")
        axis.fill_between(lags, low, high, color=GREY, alpha=0.9, lw=0, label="positions permuted")
        axis.set(title=scorer, xlabel="lag (tokens)", xlim=(1, lags[-1]))
        axis.axhline(0, color=BLACK, lw=0.5)
    axes[0][0].set_ylabel("autocorrelation of scores")
    axes[0][0].legend(frameon=False)
    _share_y(axes)
    return figure


def _segment_coverage(rows: list[Row]) -> Any:
    scorers, sizes = _unique(rows, "scorer"), _unique(rows, "segment")
    figure, axes = _panels(len(sizes), len(scorers), width=3.3, height=2.6)
    for line_of_axes, size in zip(axes, sizes, strict=True):
        for axis, scorer in zip(line_of_axes, scorers, strict=True):
            for rule, (colour, style, marker) in RULES.items():
                line = _where(rows, scorer=scorer, segment=size, rule=rule)
                kept = _column(line, "kept_share", 100)
                axis.fill_between(
                    kept, _column(line, "low", 100), _column(line, "high", 100), color=colour, alpha=0.15, lw=0
                )
                mean = _column(line, "mean", 100)
                axis.plot(kept, mean, color=colour, ls=style, marker=marker, ms=3.5, lw=1.2, label=rule)
            axis.set(title=f"{scorer}, segments of {size}", xscale="log", ylim=(0, 103))
            ticks = [2, 5, 10, 20, 50]
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.minorticks_off()
        line_of_axes[0].set_ylabel("segments with a kept\nentry (%)")
    for axis in axes[-1]:
        axis.set_xlabel("kept (% of entries, log scale)")
    axes[-1][-1].legend(frameon=False)
    return figure


def _selectivity(rows: list[Row]) -> Any:
    scorers = _unique(rows, "scorer")
    figure, axes = _panels(1, len(scorers), width=3.3, height=2.8)
    for axis, scorer in zip(axes[0], scorers, strict=True):
        values = sorted(_column(_where(rows, scorer=scorer), "selectivity"))
        axis.hist(values, bins=BINS, range=_bars(values), color=SKY, edgecolor="white", lw=0.4)
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        axis.axvline(middle, color=BLACK, ls="--", lw=1)
        axis.set(title=scorer, xlabel="selectivity (std / mean of scores)", xlim=(0, None))
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[0][0].set_ylabel("heads")
    return figure


def _bars(values: list[float]) -> tuple[float, float]:
    """Where the bars of the ascending ``values``, >= 0, begin and end: at the least and the largest.

    Values that rounding alone tells apart (of a scorer of ranks) leave no room for bars between them, and bars that
    together are narrower than one should be cannot be seen on an axis from 0. Then bars begin at 0, and the largest
    value stands in the middle of the last.
    """
    low, high = values[0], values[-1]
    return (low, high) if high - low > high / BINS else (0.0, (high or 1.0) * BINS / (BINS - 0.5))


def _attention(rows: list[Row]) -> Any:
    from matplotlib.colors import LogNorm

    figure, axes = _panels(1, 2, width=4.7, height=4.0)
    low = 1e-4
    for axis, kind in zip(axes[0], ("sharpest", "flattest"), strict=True):
        cells = _where(rows, kind=kind)
        starts = _unique(cells, "query")
        block = starts[1] - starts[0]
        grid = [[float("nan")] * len(starts) for _ in starts]
        for cell in cells:
            grid[int(cell["query"]) // block][int(cell["key"]) // block] = max(float(cell["share"]), low)
        across, end = len(starts) * block, starts[-1] + int(cells[-1]["queries"])
        image = axis.imshow(
            grid,
            norm=LogNorm(low, 1),
            cmap="cividis",
            interpolation="nearest",
            extent=(0, across, across, 0),
            aspect="auto",
        )
        axis.set(xlim=(0, end), ylim=(end, 0))  # the text may end within the last block
        first = cells[0]
        axis.set(title=f"{kind}: layer {first['layer']}, KV head {first['head']}")
        axis.set_xlabel("key position (tokens)")
    axes[0][0].set_ylabel("query position (tokens)")
    bar = figure.colorbar(image, ax=list(axes[0]), shrink=0.85, pad=0.01)
    bar.set_label("share of the query's attention (log scale)")
    return figure


def _value_cosines(rows: list[Row]) -> Any:
    samples = _unique(rows, "of")
    figure, axes = _panels(1, len(samples), width=4.4, height=3.2)
    for axis, sample in zip(axes[0], samples, strict=True):
        for signature, colour in zip(_unique(rows, "signature"), (BLUE, ORANGE), strict=True):
            for centred, style in (("no", "-"), ("yes", "--")):
                line = _where(rows, of=sample, signature=signature, centred=centred)
                label = f"{signature}, centred" if centred == "yes" else signature
                axis.plot(_column(line, "cosine"), _column(line, "percentile"), color=colour, ls=style, label=label)
        axis.set(title=f"{sample} (n = {line[0]['count']:,})", xlabel="cosine", ylim=(0, 100))
        axis.set_xlim(right=1)
    axes[0][0].set_ylabel("share at most that alike (%)")
    axes[0][0].legend(frameon=False, fontsize=8)
    return figure


def _share_y(axes: Any) -> None:
    """One y range for a row of panels, so that they compare."""
    limits = [axis.get_ylim() for axis in axes[0]]
    for axis in axes[0]:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


_DRAWERS: dict[str, Callable[[list[Row]], Any]] = {
    "marginal_gain": _marginal_gain,
    "autocorrelation": _autocorrelation,
    "segment_coverage": _segment_coverage,
    "selectivity": _selectivity,
    "attention": _attention,
    "value_cosines": _value_cosines,
}
