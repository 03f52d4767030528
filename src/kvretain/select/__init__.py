"""Which entries stay? One selector a file; importing the package registers them all in ``selectors``."""

from .base import Selector, selectors
from .coverage import GreedyPath, greedy_path, select_coverage
from .diverse import Diverse, select_diverse
from .local import Greedy, StochasticGreedy
from .scope import combine_heads, combine_layers
from .segments import Segments
from .signatures import value_signatures
from .topk import TopK, select_topk

__all__ = [
    "Diverse",
    "Greedy",
    "GreedyPath",
    "Segments",
    "Selector",
    "StochasticGreedy",
    "TopK",
    "combine_heads",
    "combine_layers",
    "greedy_path",
    "select_coverage",
    "select_diverse",
    "select_topk",
    "selectors",
    "value_signatures",
]
