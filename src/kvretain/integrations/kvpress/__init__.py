"""kvretain's refiners and selectors as kvpress presses, and kvpress' scorers as kvretain's.

:class:`HubKVPress` and :class:`DiversePress` need kvpress and run on the transformers releases that it supports;
:func:`from_press` asks for neither: whatever has kvpress' ``score`` method will do.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from .scorer import PressScorer, from_press

if TYPE_CHECKING:
    from .presses import DiversePress, HubKVPress

__all__ = ["DiversePress", "HubKVPress", "PressScorer", "from_press"]


def __getattr__(name: str) -> Any:
    if name not in ("HubKVPress", "DiversePress"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("kvpress") is None:
        raise ImportError(f"{name} is a press of kvpress, which is not installed: pip install kvpress", name="kvpress")
    from . import presses

    return getattr(presses, name)
