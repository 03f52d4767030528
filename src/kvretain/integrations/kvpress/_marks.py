"""What a press' scores say beyond their order: which entries it protects; and how they become non-negative."""

from __future__ import annotations

import torch
from torch import Tensor


def marked(scores: Tensor) -> Tensor:
    """``(B, H, N)`` bool: entries that ``scores (B, H, N)`` mark as protected.

    Presses have no field for sinks and recent windows: they give them one score above all others (SnapKV's window, the
    sinks of Expected Attention, LagKV's tail). So what stands in a run at the beginning or the end of a row and has the
    row's largest score in every head is protected. A row with one score throughout marks nothing.
    """
    top = scores.amax((1, 2), keepdim=True)
    at_top = (scores == top).all(1, keepdim=True)
    run = at_top.to(torch.int8)
    ends = (run.cumprod(-1) + run.flip(-1).cumprod(-1).flip(-1)) > 0
    return (ends & ~at_top.all(-1, keepdim=True)).expand(scores.shape)


def lifted(scores: Tensor, candidates: Tensor) -> Tensor:
    """``scores (B, H, N)`` >= 0, for refiners: a head with a negative score loses the least of its ``candidates``
    (bool, same shape); what is no candidate is clamped at 0. Other heads stay as they are: a press does not say whether
    its scores can be negative."""
    lowest = scores.masked_fill(~candidates, torch.inf).amin(-1, keepdim=True).clamp_max(0)
    return (scores - lowest).clamp_min(0)
