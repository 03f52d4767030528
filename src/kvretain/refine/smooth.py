"""CommunitySmooth: average pooling, the opposite of HubKV's discount."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_kernel
from ..slots import pack, pack_index
from ._common import Rewrite
from .base import refiners


@refiners.register("smooth")
@dataclass(frozen=True)
class CommunitySmooth(Rewrite):
    """Each score becomes the mean over its window, so that whole regions of high scores stay.

    Source: rejected by HubKV's slides ("CommunitySmooth": average pooling; mediocre, thickens high-score regions
    instead of removing redundancy). kvretain's readings: the window holds the unprotected entries of the head at most
    ``kernel // 2`` positions away, as in ``hub``, and the mean runs over those that are there; no gate.

    Args:
        kernel: window width in positions, odd.

    Raises:
        ValueError: ``kernel`` is not odd.
    """

    kernel: int = 5

    def __post_init__(self) -> None:
        check_kernel("smooth", self.kernel)

    def rewrite(self, scores: Tensor, positions: Tensor, excluded: Tensor) -> Tensor:
        """Window means ``(B, H, N)``."""
        slots = pack_index(~excluded)  # neighbours stand within kernel // 2 slots once the others are set aside
        scores, positions, apart = pack(scores, slots), pack(positions, slots), pack(excluded, slots)
        total, count = scores.clone(), torch.ones_like(scores)
        for offset in range(1, min(self.kernel // 2, scores.shape[-1] - 1) + 1):
            near = (positions[..., offset:] - positions[..., :-offset] <= self.kernel // 2) & ~apart[..., offset:]
            total[..., :-offset] += near * scores[..., offset:]
            total[..., offset:] += near * scores[..., :-offset]
            count[..., :-offset] += near
            count[..., offset:] += near
        return (total / count).gather(-1, slots)
