"""Head NMS: a token is left to the head that wants it most."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..checks import check_share
from ._common import Rewrite, by_position
from .base import refiners


@refiners.register("head_nms")
@dataclass(frozen=True)
class HeadNMS(Rewrite):
    """Non-maximum suppression across heads: at each position only the head with the largest score keeps it.

    Source: HubKV's slides name "Head NMS" among the rejected variants, without a definition; kvretain reads it as
    suppression across the heads of a layer (suppression along tokens is ``nms``). Of equal scores the lowest head wins.
    Entries meet at their position, whatever their slots; no gate.

    Args:
        discount: factor of the other heads' scores, in [0, 1]; 0 suppresses them, and what budget the winners
            leave then goes to the lowest positions.

    Raises:
        ValueError: ``discount`` is out of range.
    """

    discount: float = 0.0

    def __post_init__(self) -> None:
        check_share("head_nms", "discount", self.discount)

    def rewrite(self, scores: Tensor, positions: Tensor, excluded: Tensor) -> Tensor:
        """Scores ``(B, H, N)``, those of losing heads discounted."""
        grid, columns = by_position(scores, positions, excluded)
        suppressed = grid * self.discount
        if grid.shape[1]:
            winner = grid.argmax(1, keepdim=True)  # the first of equal maxima
            suppressed.scatter_(1, winner, grid.gather(1, winner))
        return suppressed.gather(-1, columns)
