"""Scores on a common scale, for scorers, scopes and selectors that compare heads."""

from __future__ import annotations

from torch import Tensor


def standardised(scores: Tensor, candidates: Tensor) -> Tensor:
    """``scores (..., N)`` with mean 0 and standard deviation 1 over the ``candidates (..., N)`` of each row; 0
    elsewhere.

    Population standard deviation, at least 1e-6, as in TriAttention's code. What stands elsewhere is never read.
    """
    known, count = scores.masked_fill(~candidates, 0.0), candidates.sum(-1, keepdim=True).clamp_min(1)
    centred = (known - known.sum(-1, keepdim=True) / count).masked_fill(~candidates, 0.0)
    return centred / (centred.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
