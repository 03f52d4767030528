"""Which entries stay? One selector a file; importing the package registers them all in ``selectors``."""

from .base import Selector, selectors
from .coverage import GreedyPath, greedy_path, select_coverage
from .local import Greedy, StochasticGreedy
from .scope import combine_heads, combine_layers
from .topk import TopK, select_topk

__all__ = [
    "Greedy",
    "GreedyPath",
    "Selector",
    "StochasticGreedy",
    "TopK",
    "combine_heads",
    "combine_layers",
    "greedy_path",
    "select_coverage",
    "select_topk",
    "selectors",
]
