"""Figures of what scores look like on a real model: how they cluster, what top-k covers, how sharp heads are.

``collect`` runs a model once; ``measures`` are pure functions on the scores; ``tables`` are the numbers of each figure;
``plots`` draws them. ``kvretain observe`` is all of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .measures import FEWEST
from .tables import Table, tables

if TYPE_CHECKING:
    from .collect import Observation

SCORERS = ("snapkv", 'snapkv(pooling="none")', "keydiff")
"""Observed by default. SnapKV also without its pooling, which makes neighbours alike by itself."""

__all__ = ["FEWEST", "SCORERS", "Table", "tables", "write_figures"]


def write_figures(
    observation: Observation,
    folder: Path,
    *,
    source: str,
    seed: int = 0,
    report: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> dict[str, Table]:
    """Writes every figure as PNG and CSV into ``folder``, and the headline numbers as ``summary.csv``.

    All of them are written once the last is drawn, or none.

    Args:
        observation: from :func:`kvretain.observe.collect.collect`.
        folder: made if it is not there; files of the same names are replaced.
        source: model and text, for the captions.
        seed: of permutations, random choices and bootstrap.
        report: receives figures done, figures in all, and the name of the one that comes next.

    Returns:
        The tables by name.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the folder cannot be written.
    """
    from . import plots

    plots.check_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    # All files or none: figures of two runs side by side would look like those of one.
    with tempfile.TemporaryDirectory(prefix=".observe-", dir=folder) as part:
        for table in tables(observation, source, seed, report):
            table.write(Path(part))
            if table.name != "summary":
                plots.draw(table, Path(part))
            made[table.name] = table
        for file in sorted(Path(part).iterdir()):
            file.replace(folder / file.name)
    return made
