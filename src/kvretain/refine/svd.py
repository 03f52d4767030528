"""SVD: the part of the scores on which the heads agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_whole
from ._common import Rewrite, by_position
from .base import refiners


@refiners.register("svd")
@dataclass(frozen=True)
class SVD(Rewrite):
    """The best rank-``rank`` approximation of a layer's head x position score matrix, clamped at 0.

    Source: HubKV's slides reject "SVD" (rewrites the scorer too far, can erase key anchors) and give only the name;
    this is the reading that needs nothing but scores. Entries of different heads meet at their position; a head without
    an entry there counts as 0. With a rank of at least the number of heads nothing changes; no gate.

    Args:
        rank: singular values kept, at least 1.

    Raises:
        ValueError: ``rank`` is not such a number.
    """

    rank: int = 1

    def __post_init__(self) -> None:
        check_whole("svd", "rank", self.rank, 1)

    def rewrite(self, scores: Tensor, positions: Tensor, excluded: Tensor) -> Tensor:
        """The reconstruction ``(B, H, N)``."""
        if self.rank >= scores.shape[1] or scores.numel() == 0:
            return scores
        grid, columns = by_position(scores.to(torch.float64), positions, excluded)
        # Left singular vectors, from the small (H, H) matrix.
        vectors = torch.linalg.eigh(grid @ grid.mT).eigenvectors[..., -self.rank :]
        return (vectors @ (vectors.mT @ grid)).clamp_min(0).gather(-1, columns).to(scores.dtype)
