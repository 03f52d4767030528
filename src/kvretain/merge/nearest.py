"""Nearest: the value of an evicted entry goes into the kept entry with the most similar key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..checks import between
from .base import Merger, averaged, leaving, mergers, taken


@mergers.register("nearest")
@dataclass(frozen=True)
class Nearest(Merger):
    """Each evicted entry is averaged into the kept one whose rotated key has the largest cosine with its own.

    Source: the family "State" of α's design space (arXiv 2605.14292), whose members are not public; merging into the
    nearest neighbour is also what CaM and D2O do in other forms. The definition is kvretain's: values become the plain
    mean of the kept entry and all that join it at this eviction, keys stay as they are (a mean of rotated keys belongs
    to no position), each KV head for itself, equal cosines go to the lowest position. An entry that has taken others in
    counts as one at the next eviction, so that what went longest ago weighs least.

    Args:
        threshold: least cosine; an entry with no such neighbour is dropped. Within [-1, 1].

    Raises:
        ValueError: ``threshold`` is out of range.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not between(-1, self.threshold, 1):
            raise ValueError(f"nearest: threshold must be a number from -1 to 1, not {self.threshold!r}")

    def merge(self, keys: Tensor, values: Tensor, index: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Merger.merge`; memory for cosines is bounded by blocks of entries."""
        kept, count = taken(keys, index), index.shape[2]
        gone, directions = leaving(index, positions), normalize(kept.to(torch.float32), dim=-1)
        target = torch.full_like(positions, count)
        block = max(1, (1 << 24) // max(1, count * keys.shape[0] * keys.shape[1]))
        for start in range(0, keys.shape[2] if count else 0, block):
            part = normalize(keys[:, :, start : start + block].to(torch.float32), dim=-1)
            cosines = (part @ directions.transpose(-1, -2)).masked_fill((index < 0)[:, :, None], -torch.inf)
            best, where = cosines.max(-1)
            target[:, :, start : start + block] = torch.where(best >= self.threshold, where, count)
        return kept, averaged(values, taken(values, index), torch.where(gone, target, count))
