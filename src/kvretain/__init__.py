"""kvretain: a transformers KV cache that keeps a fixed budget of useful and non-redundant tokens. Lossy once it evicts.

``import kvretain`` costs torch only; :class:`RetentionCache` loads transformers when it is first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import theory
from .policy import Policy, presets
from .refine import Refiner, hub_refine, refiners
from .scores import Scorer, scorers
from .select import Selector, select_coverage, select_topk, selectors
from .select.coverage import coverage

if TYPE_CHECKING:
    from .cache import CacheView, RetentionCache, Trace
    from .models import load_model

__version__ = "0.1.0"

__all__ = [
    "CacheView",
    "Policy",
    "Refiner",
    "RetentionCache",
    "Scorer",
    "Selector",
    "Trace",
    "coverage",
    "hub_refine",
    "load_model",
    "presets",
    "refiners",
    "scorers",
    "select_coverage",
    "select_topk",
    "selectors",
    "theory",
]


def __getattr__(name: str) -> Any:
    # What needs transformers is imported on first use.
    if name in ("RetentionCache", "CacheView", "Trace"):
        from . import cache

        return getattr(cache, name)
    if name == "load_model":
        from .models import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
