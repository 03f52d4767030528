"""Segment: the last entry of a stretch of text stands for those of it that were evicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_whole
from .base import Merger, averaged, leaving, mergers, taken


@mergers.register("segment")
@dataclass(frozen=True)
class Segment(Merger):
    """A summary entry per evicted segment: keys and values of what goes are averaged into the last entry of their
    segment, if that stays.

    Source: the family "State" of α's design space (arXiv 2605.14292), whose members are not public. The definition is
    kvretain's: segments are the text's consecutive stretches of ``length`` positions, the last position of each holds
    its summary, and keys are averaged as they are stored, rotated, so that fast rotary pairs partly cancel. Which
    summaries stay is the selector's business: ``segments`` keeps room for the latest.

    Args:
        length: positions of a segment.

    Raises:
        ValueError: ``length`` is out of range.
    """

    length: int = 16

    def __post_init__(self) -> None:
        check_whole("segment", "length", self.length, 2)

    def merge(self, keys: Tensor, values: Tensor, index: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Merger.merge`."""
        count = index.shape[2]
        if not count:
            return taken(keys, index), taken(values, index)
        at = positions.gather(2, index.clamp_min(0)).masked_fill(index < 0, -1)
        holder = (positions // self.length + 1) * self.length - 1
        slot = torch.searchsorted(at.contiguous(), holder.contiguous()).clamp_max(count - 1)
        found = (at.gather(2, slot) == holder) & leaving(index, positions)
        target = torch.where(found, slot, count)
        return averaged(keys, taken(keys, index), target), averaged(values, taken(values, index), target)
