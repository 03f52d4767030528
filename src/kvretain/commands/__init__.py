"""The commands of ``kvretain``, one file each: options, tables and progress bars; the work is in what they import."""

from . import ask, demo, evaluate, observe, policies
from .shared import app

__all__ = ["app", "ask", "demo", "evaluate", "observe", "policies"]
