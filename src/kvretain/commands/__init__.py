"""The commands of ``kvretain``, one file each: options, tables and progress bars; the work is in what they import."""

from . import ask, calibrate, demo, evaluate, lab, observe, plan, policies, report, study, train_gate, view
from .shared import app

__all__ = [
    "app",
    "ask",
    "calibrate",
    "demo",
    "evaluate",
    "lab",
    "observe",
    "plan",
    "policies",
    "report",
    "study",
    "train_gate",
    "view",
]
