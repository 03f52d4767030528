"""Which entries stay? One selector a file; importing the package registers them all in ``selectors``."""

from .base import Selector, selectors
from .scope import combine_heads, combine_layers
from .topk import TopK, select_topk

__all__ = ["Selector", "TopK", "combine_heads", "combine_layers", "select_topk", "selectors"]
