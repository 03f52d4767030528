"""Packing: move chosen entries next to each other and back, without a loop or a sort."""

from __future__ import annotations

from torch import Tensor


def pack_index(chosen: Tensor) -> Tensor:
    """Slots ``(..., N)`` int64 of a stable partition of ``chosen (..., N)`` bool: chosen entries first, in order.

    A permutation: ``pack(entries, slots)`` packs and ``.gather(-1, slots)`` undoes it.
    """
    rank = chosen.cumsum(-1)
    others = (~chosen).cumsum(-1)
    return rank.where(chosen, rank[..., -1:] + others) - 1


def pack(entries: Tensor, slots: Tensor) -> Tensor:
    """``entries (..., N)`` moved to ``slots (..., N)`` of :func:`pack_index`."""
    return entries.new_empty(slots.shape).scatter_(-1, slots, entries.expand(slots.shape))
