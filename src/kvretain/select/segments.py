"""Segments: top-k, with room for the last entry of the latest stretches of text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_share, check_whole
from .base import Selector, selectors
from .topk import select_topk


@selectors.register("segments")
@dataclass(frozen=True)
class Segments(Selector):
    """The largest scores, but a ``share`` of the budget goes to the latest ends of segments, to hold summaries.

    The selector for the merger ``segment``, which see for source and definition. Of the ``keep`` entries less the
    protected ones, ``share`` (rounded down) are the latest entries at the last position of a segment that the scores do
    not choose anyway; fewer, if there are not so many.

    Args:
        length: positions of a segment, as for the merger.
        share: from 0, which is top-k, to 1.

    Raises:
        ValueError: a field is out of range.
    """

    length: int = 16
    share: float = 0.25

    def __post_init__(self) -> None:
        check_whole("segments", "length", self.length, 2)
        check_share("segments", "share", self.share)

    def select(
        self,
        scores: Tensor,
        keep: int,
        *,
        protected: Tensor,
        positions: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending; ``positions`` default to 0 to N-1, ``values`` are not read."""
        size = scores.shape[-1]
        plain = select_topk(scores, keep, protected=protected)
        protected = protected.expand(scores.shape)
        places = torch.arange(size, device=scores.device).expand(scores.shape) if positions is None else positions
        ends = (places % self.length == self.length - 1) & (places >= 0) & (scores > -torch.inf) & ~protected
        room = (self.share * (keep - protected.sum(-1, keepdim=True))).to(torch.int64)
        if not bool((room > 0).any()):
            return plain
        # By score, best first: what the budget holds beside the reserved places.
        worth = torch.where(protected, torch.inf, scores)
        rank = worth.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        spare = ends & (rank >= keep - room)
        late = torch.where(spare, places, -1).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return select_topk(scores, keep, protected=protected | (spare & (late < room)))
