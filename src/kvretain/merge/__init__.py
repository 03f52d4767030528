"""What becomes of the evicted? One merger a file; importing the package registers them all in ``mergers``."""

from .base import Merger, mergers
from .nearest import Nearest
from .segment import Segment

__all__ = ["Merger", "Nearest", "Segment", "mergers"]
