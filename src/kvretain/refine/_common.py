"""What the refiners share: checks, the gate, and the frame of those that rewrite scores outright."""

from __future__ import annotations

import numbers
from abc import abstractmethod

import torch
from torch import Tensor

from ..checks import check_scores
from .base import Refiner, refiners


class Rewrite(Refiner):
    """A refiner without a gate: whatever the ratio, :meth:`rewrite` sees the unprotected scores and replaces them.

    This frame keeps the contract for it: protected entries and padding go in as 0 and come out as they were, and a
    ratio of 0 changes nothing. Scores that are negative or not finite are an error that names the refiner.
    """

    @abstractmethod
    def rewrite(self, scores: Tensor, positions: Tensor, excluded: Tensor) -> Tensor:
        """New scores ``(B, H, N)``, >= 0.

        Args:
            scores: ``(B, H, N)`` float32, >= 0, and 0 where ``excluded``.
            positions: ``(B, H, N)`` int64, original positions, ascending over the entries that are not ``excluded``.
            excluded: ``(B, H, N)`` bool, protected entries and padding.
        """

    def refine(self, scores: Tensor, ratio: float | Tensor, *, positions: Tensor, protected: Tensor) -> Tensor:
        """Refined scores ``(B, H, N)``; of ``ratio``, a number or ``(B,)``, only whether it is 0 matters."""
        name = refiners.name_of(self)
        gate = gate_of(name, ratio, 0.0, scores)
        excluded = protected | (positions < 0)
        open_scores = torch.where(excluded, 0.0, scores)
        check_scores(name, open_scores)
        idle = torch.as_tensor(gate, device=scores.device) == 0
        return torch.where(excluded | idle, scores, self.rewrite(open_scores, positions, excluded))


def by_position(scores: Tensor, positions: Tensor, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """``scores (B, H, N)`` with equal positions of all heads in one column, whatever slots they stand in.

    Returns:
        The grid ``(B, H, P)``, 0 where a head has no entry at that position, and columns ``(B, H, N)`` such that
        ``grid.gather(-1, columns)`` brings entries back. Column 0 is a scrap for excluded entries.
    """
    known = positions[~excluded].unique()
    columns = (torch.searchsorted(known, positions.contiguous()) + 1).masked_fill(excluded, 0)
    grid = scores.new_zeros(*scores.shape[:-1], len(known) + 1)
    return grid.scatter_(-1, columns, scores), columns


def gate_of(owner: str, ratio: float | Tensor, exponent: float, scores: Tensor) -> float | Tensor:
    """``ratio ** exponent`` and 0 at a ratio of 0: a number, or ``(..., 1, 1)`` in the dtype of the computation."""
    if not isinstance(ratio, Tensor):
        if isinstance(ratio, bool) or not isinstance(ratio, numbers.Real) or not 0 <= ratio < 1:
            raise ValueError(f"{owner}: ratio is the fraction removed and must be in [0, 1), not {ratio!r}")
        ratio = float(ratio)
        return ratio**exponent if ratio > 0 else 0.0
    rows = scores.shape[:-2]
    if not broadcasts(ratio, rows):
        raise ValueError(
            f"{owner}: ratio of shape {tuple(ratio.shape)} does not broadcast to one per row, {tuple(rows)}, "
            f"for scores of shape {tuple(scores.shape)}"
        )
    outside = ~((ratio >= 0) & (ratio < 1))
    if bool(outside.any()):
        raise ValueError(
            f"{owner}: ratio is the fraction removed and must be in [0, 1), not {ratio[outside][0].item()}"
        )
    ratio = ratio.to(scores.device, torch.float64 if scores.dtype == torch.float64 else torch.float32)
    return torch.where(ratio > 0, ratio.pow(exponent), 0.0)[..., None, None]


def broadcasts(tensor: Tensor, shape: torch.Size) -> bool:
    """Whether ``tensor`` broadcasts to ``shape`` without enlarging it."""
    return tensor.ndim <= len(shape) and all(a in (1, b) for a, b in zip(tensor.shape[::-1], shape[::-1], strict=False))
