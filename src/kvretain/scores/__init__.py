"""How useful is each entry? One scorer a file; importing the package registers them all in ``scorers``."""

from .base import Scorer, scorers
from .expected import Expected
from .h2o import H2O
from .keydiff import KeyDiff
from .knorm import KNorm
from .kvzip import KVzip
from .random import Random
from .snapkv import SnapKV
from .streaming import Streaming
from .tova import TOVA

__all__ = ["H2O", "TOVA", "Expected", "KNorm", "KVzip", "KeyDiff", "Random", "Scorer", "SnapKV", "Streaming", "scorers"]
