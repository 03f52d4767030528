"""Storage and eviction: the only package of kvretain that knows transformers.

``view.CacheView`` is what scorers see and costs torch only; everything else here needs transformers and loads on first
use, which raises ImportError if transformers is older than 5.17.
"""

from __future__ import annotations

from typing import Any

from .versions import check_transformers
from .view import CacheView

__all__ = ["CacheView", "CompiledDecoding", "RetentionCache", "Trace"]


def __getattr__(name: str) -> Any:
    if name in ("RetentionCache", "CompiledDecoding"):
        check_transformers()
    if name == "RetentionCache":
        from .cache import RetentionCache

        return RetentionCache
    if name == "CompiledDecoding":
        from .compiled import CompiledDecoding

        return CompiledDecoding
    if name == "Trace":
        from .trace import Trace

        return Trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
