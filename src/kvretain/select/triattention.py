"""TriAttention's three modes as functions on tensors: from scores per layer and query head to the sets that stay.

Source: TriAttention, arXiv 2604.04921, and its code. Scores are those of :func:`kvretain.trig_scores`, with mean 0 and
standard deviation 1 per query head (:func:`kvretain.zscores.standardised`). In a cache the same sets come from
scopes; equal scores go to the lowest index.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .topk import select_topk


def per_head(scores: Tensor, heads: int, keep: int) -> Tensor:
    """Each KV-head index keeps its own set, the same in every layer: maximum over the query group, mean over layers.

    The authors' default. In a cache: ``trig@aligned(combine='mean')``.

    Args:
        scores: ``(L, B, Hq, N)``, of all layers.
        heads: KV heads; divides ``Hq``.
        keep: entries to keep, 1 to N.

    Returns:
        ``(B, heads, keep)`` int64, ascending.

    Raises:
        ValueError: ``heads`` does not divide ``Hq``, or what :func:`~kvretain.select_topk` refuses.
    """
    return select_topk(_grouped("per_head", scores, heads).amax(3).mean(0), keep)


def per_layer_perhead(scores: Tensor, heads: int, keep: int, *, group: str = "max") -> Tensor:
    """Each KV head of each layer keeps its own set, by the maximum or mean over its query group.

    In a cache: ``trig`` (the maximum). Arguments as for :func:`per_head`; returns ``(L, B, heads, keep)``.

    Raises:
        ValueError: ``group`` is neither ``"max"`` nor ``"mean"``, or as for :func:`per_head`.
    """
    if group not in ("max", "mean"):
        raise ValueError(f"per_layer_perhead: group must be 'max' or 'mean', not {group!r}")
    grouped = _grouped("per_layer_perhead", scores, heads)
    return select_topk(grouped.amax(3) if group == "max" else grouped.mean(3), keep)


def union(scores: Tensor, keep: int) -> Tensor:
    """One set for the whole model: every query head nominates its ``keep`` best entries, and of all that were nominated
    the ``keep`` with the largest score in any head stay.

    The nomination changes nothing: this *is* top-k of the maximum over heads. Say an entry ``t`` is among the ``keep``
    best by the maximum, and ``h`` is a head that gives it that maximum. Had ``h`` not nominated it, ``keep`` entries
    would come before ``t`` in ``h``, with at least ``t``'s score there, hence with at least ``t``'s maximum (and lower
    indices where equal): they would all come before ``t`` by the maximum as well. Nor is the union ever short, since
    one head alone nominates ``keep``. So ``trig@model(combine='max')`` gives the same set in a cache.

    Args:
        scores: ``(L, B, Hq, N)``, of all layers.
        keep: entries to keep, 1 to N.

    Returns:
        ``(B, keep)`` int64, ascending.
    """
    by_head = scores.transpose(0, 1).flatten(1, 2)  # (B, L * Hq, N)
    nominated = torch.zeros_like(by_head, dtype=torch.bool).scatter_(2, select_topk(by_head, keep), True).any(1)
    return select_topk(by_head.amax(1).masked_fill(~nominated, -torch.inf), keep)


def _grouped(owner: str, scores: Tensor, heads: int) -> Tensor:
    """``(L, B, Hq, N)`` as ``(L, B, heads, G, N)``."""
    if scores.ndim != 4 or heads < 1 or not scores.shape[2] or scores.shape[2] % heads:
        raise ValueError(
            f"{owner}: scores must be (L, B, Hq, N) with Hq a multiple of {heads} heads, not {tuple(scores.shape)}"
        )
    return scores.unflatten(2, (heads, -1))
