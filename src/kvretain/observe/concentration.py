"""The figure of how concentrated a model's queries are: one cell per layer and query head. Needs matplotlib."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from .plots import check_matplotlib

if TYPE_CHECKING:
    from ..calibrate import Calibration

HIGH = 0.95
"""Concentration from which TriAttention's authors call a head concentrated."""


def check(path: Path) -> None:
    """Checks that a figure can be drawn to ``path``.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
        ValueError: ``path`` does not end in ``.png``.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"the figure is a .png file, not {path}")
    check_matplotlib()


def draw(calibration: Calibration, path: Path, *, source: str) -> None:
    """Draws the concentration of every head to ``path``, with its numbers in a CSV file of the same name.

    Args:
        calibration: see :attr:`kvretain.calibrate.Calibration.concentration`.
        path: a ``.png`` file; its folder is made if it is not there.
        source: model and text, for the caption.

    Raises:
        ImportError, ValueError: as :func:`check`.
    """
    check(path)
    from matplotlib.figure import Figure

    values, layers = calibration.concentration, calibration.layers
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["layer", "head", "concentration"])
        for layer, row in zip(layers, values.tolist(), strict=True):
            writer.writerows([layer, head, f"{value:.6g}"] for head, value in enumerate(row))
    figure = Figure(figsize=(max(5.0, 1.8 + 0.16 * values.shape[1]), max(3.2, 1.4 + 0.13 * len(layers))), dpi=100)
    figure.set_layout_engine("constrained")
    axis = figure.subplots()
    image = axis.imshow(values.numpy(), cmap="cividis", vmin=min(0.5, float(values.min())), vmax=1.0, aspect="auto")
    axis.set(xlabel="query head", ylabel="layer")
    across, down = (-(-count // 16) for count in reversed(values.shape))
    axis.set_xticks(range(0, values.shape[1], across))
    axis.set_yticks(range(0, len(layers), down), [str(layer) for layer in layers[::down]])
    high = float((values > HIGH).float().mean())
    axis.set_title(f"{source}\nmean {float(values.mean()):.3f}; {high:.0%} of heads above {HIGH}", fontsize=9)
    figure.suptitle("Concentration of the queries before rotation", fontweight="bold", fontsize=11)
    figure.colorbar(image, ax=axis).set_label("R = |mean of q| / mean of |q|")
    figure.savefig(path, facecolor="white", pil_kwargs={"optimize": True})
