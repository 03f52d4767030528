"""The merger's contract."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ..registry import Registry


class Merger(ABC):
    """What do entries that stay take over from those that go? A frozen dataclass of flat hyper-parameters; no state.

    Invariants: as many entries as without it, at the same positions; a row's entries do not depend on the other rows,
    nor on padding.
    """

    @abstractmethod
    def merge(self, keys: Tensor, values: Tensor, index: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``(B, H, K, D)`` and values ``(B, H, K, Dv)`` of the entries that stay, in the dtypes given.

        Args:
            keys: ``(B, H, N, D)``, rotated, in position order.
            values: ``(B, H, N, Dv)``.
            index: ``(B, H, K)`` int64, what stays, ascending; a leading -1 is a padding slot, whose content is never
                read.
            positions: ``(B, H, N)`` int64, original positions; -1 is padding.
        """


mergers: Registry[Merger] = Registry("merger")


def taken(states: Tensor, index: Tensor) -> Tensor:
    """The rows ``(B, H, K, D)`` of ``states (B, H, N, D)`` at ``index (B, H, K)``; any row where it is -1."""
    return states.gather(2, index.clamp_min(0)[..., None].expand(-1, -1, -1, states.shape[3]))


def leaving(index: Tensor, positions: Tensor) -> Tensor:
    """Which real entries are not at ``index``, ``(B, H, N)`` bool."""
    stays = torch.zeros(*positions.shape[:2], positions.shape[2] + 1, dtype=torch.bool, device=index.device)
    stays.scatter_(2, index.remainder(stays.shape[2]), True)  # -1 is the extra column
    return ~stays[..., :-1] & (positions >= 0)


def averaged(states: Tensor, kept: Tensor, target: Tensor) -> Tensor:
    """``kept (B, H, K, D)``, each averaged with the rows of ``states (B, H, N, D)`` whose ``target (B, H, N)`` is it.

    Sums are float32 and one after the other on a CPU; ``target`` is ``K`` for rows that go nowhere. An entry with
    nothing to take over comes back bit for bit.
    """
    batch, heads, size, width = kept.shape
    total = torch.zeros(batch, heads, size + 1, width, dtype=torch.float32, device=kept.device)
    total.scatter_add_(2, target[..., None].expand(-1, -1, -1, width), states.to(torch.float32))
    count = torch.zeros(batch, heads, size + 1, dtype=torch.float32, device=kept.device)
    count.scatter_add_(2, target, torch.ones_like(target, dtype=torch.float32))
    total, count = total[:, :, :size], count[:, :, :size, None]
    mean = (kept.to(torch.float32) + total) / (1 + count)
    return torch.where(count > 0, mean.to(kept.dtype), kept)
