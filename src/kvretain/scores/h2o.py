"""H2O: keep the heavy hitters of the accumulated attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..cache.view import CacheView
from .base import Scorer, scorers


@scorers.register("h2o")
@dataclass(frozen=True)
class H2O(Scorer):
    """Attention that each entry has received so far, summed over all queries and over the query group of the KV head.

    Source: H2O, arXiv 2306.14048, algorithm 1. Half of the budget goes to heavy hitters and half to the most recent
    tokens, as in the paper; no sinks. The sum favours old tokens, as there.

    Deviations: the paper has no query groups; a group's weights are summed. It evicts at every step; here the cache's
    cadence decides.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"attention"})
    sinks: ClassVar[int] = 0
    paper = "H2O, 2306.14048"

    def recent(self, budget: int) -> int:
        """Half of the budget, rounded down."""
        return budget // 2

    def score(self, view: CacheView) -> Tensor:
        """Accumulated weights ``(B, H, N)`` float32, >= 0; 0 for padding.

        Raises:
            ValueError: ``view.attention`` is None.
        """
        if view.attention is None:
            raise ValueError(
                f"scorer 'h2o' needs the accumulated attention, but layer {view.layer}'s view has attention=None"
            )
        return view.attention.to(torch.float32).masked_fill(~view.valid, 0.0)
