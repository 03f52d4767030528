"""TOVA: keep what the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..cache.view import CacheView
from .attention import attend, last_queries
from .base import Scorer, scorers


@scorers.register("tova")
@dataclass(frozen=True)
class TOVA(Scorer):
    """Attention weight of the last query on each entry, mean over the query group of the KV head.

    Source: "Transformers are Multi-State RNNs" (TOVA), arXiv 2401.06104, section 3. The softmax runs over all real
    entries, protected ones included. No sinks and no recent window, as in the paper.

    Deviations: the paper averages over all heads of a layer and keeps one set per layer; that is this scorer under the
    layer scope with ``combine="mean"`` (the ``tova`` preset). The paper evicts one token per step; the cache's cadence
    decides here.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    sinks: ClassVar[int] = 0
    paper = "TOVA, 2401.06104"

    @property
    def window(self) -> int:
        """Only the last query is read."""
        return 1

    def score(self, view: CacheView) -> Tensor:
        """Weights ``(B, H, N)`` float32 in [0, 1], summing to 1 over a head's real entries; 0 for padding.

        Raises:
            ValueError: ``view.queries`` is None.
        """
        query, real = last_queries(view, "tova", 1)
        weights = attend(view.logits(query), view.valid[:, :, None, None])
        return weights.mean(2).squeeze(2).masked_fill(~real[:, :, None], 0.0)
