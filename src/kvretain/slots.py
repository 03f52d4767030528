"""Entries in slots: moved next to each other and back without a loop or a sort; shared ones computed once."""

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


def unexpanded(tensor: Tensor) -> Tensor:
    """``tensor`` with the dimensions before the last that ``expand`` has made back at size 1, so that what
    heads share is computed once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape[:-1], tensor.stride(), strict=False)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
