"""kvretain: a transformers KV cache that keeps a fixed budget of useful and non-redundant tokens. Lossy once it evicts.

``import kvretain`` costs torch only; :class:`RetentionCache` loads transformers when it is first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import theory
from .merge import Merger, mergers
from .policy import Policy, presets
from .refine import Refiner, hub_refine, refiners
from .scores import Scorer, scorers, trig_scores
from .select import Selector, select_coverage, select_diverse, select_topk, selectors, value_signatures
from .select.coverage import coverage
from .serving.retain import retain

if TYPE_CHECKING:
    from . import evidence
    from .cache import CacheView, CompiledDecoding, RetentionCache, Trace
    from .distil import train_gate
    from .models import load_model

__version__ = "0.1.0"

__all__ = [
    "CacheView",
    "CompiledDecoding",
    "Merger",
    "Policy",
    "Refiner",
    "RetentionCache",
    "Scorer",
    "Selector",
    "Trace",
    "coverage",
    "evidence",
    "hub_refine",
    "load_model",
    "mergers",
    "presets",
    "refiners",
    "retain",
    "scorers",
    "select_coverage",
    "select_diverse",
    "select_topk",
    "selectors",
    "theory",
    "train_gate",
    "trig_scores",
    "value_signatures",
]


def __getattr__(name: str) -> Any:
    # What needs transformers, or is seldom needed, is imported on first use.
    if name == "evidence":
        return importlib.import_module(".evidence", __name__)
    if name in ("RetentionCache", "CacheView", "CompiledDecoding", "Trace"):
        from . import cache

        return getattr(cache, name)
    if name == "load_model":
        from .models import load_model

        return load_model
    if name == "train_gate":
        from .distil import train_gate

        return train_gate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
