"""Evaluations that can be trusted: seeded, paired, resumable, with intervals. Nothing in kvretain depends on it.

What carries the protocol of a study stands here: :func:`split`, :func:`grade`, :func:`paired_cluster_bootstrap`.
"""

from .grading import Verdict, grade, grade_exact
from .power import Design, minimum_detectable, power
from .significance import Cell, Comparison, bonferroni, branch, paired_cluster_bootstrap
from .splitting import split

__all__ = [
    "Cell",
    "Comparison",
    "Design",
    "Verdict",
    "bonferroni",
    "branch",
    "grade",
    "grade_exact",
    "minimum_detectable",
    "paired_cluster_bootstrap",
    "power",
    "split",
]
