"""How useful is each entry? One scorer a file; importing the package registers them all in ``scorers``."""

from .base import Scorer, scorers
from .expected import Expected
from .fastkvzip import FastKVzip
from .h2o import H2O
from .keydiff import KeyDiff
from .knorm import KNorm
from .kvzip import KVzip
from .lagkv import LagKV
from .random import Random
from .rkv import RKV
from .routed import Routed
from .snapkv import SnapKV
from .streaming import Streaming
from .tova import TOVA
from .trig import Trig, trig_scores
from .value_norm import ValueNorm

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "Expected",
    "FastKVzip",
    "KNorm",
    "KVzip",
    "KeyDiff",
    "LagKV",
    "Random",
    "Routed",
    "Scorer",
    "SnapKV",
    "Streaming",
    "Trig",
    "ValueNorm",
    "scorers",
    "trig_scores",
]
