"""For engines that own their cache: tensors in, indices out (:func:`kvretain.retain`), and moves between blocks.

Costs torch only; nothing here imports transformers.
"""

from .paged import Compaction, gather, plan_compaction

__all__ = ["Compaction", "gather", "plan_compaction"]
