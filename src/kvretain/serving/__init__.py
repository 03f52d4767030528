"""For engines that own their cache: tensors in, indices out. Costs torch only; nothing here imports transformers."""

from .paged import Compaction, gather, plan_compaction
from .retain import retain

__all__ = ["Compaction", "gather", "plan_compaction", "retain"]
