"""Budgets that are not equal: over layers by a rule, over heads by competition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .topk import select_topk


def layer_budgets(kind: str, mean: int, layers: int, *, lowest: int, highest: int, beta: float) -> list[int]:
    """Entries per head for each layer; their sum is ``layers * mean``.

    ``pyramid`` falls linearly from the first layer to the last. Source: PyramidKV, arXiv 2406.02069: the last layer
    gets ``mean / beta``, the first as much more as keeps the mean. Deviation: the paper's budgets exclude its window;
    here the last layer gets at least ``lowest``, which holds the protected entries.

    Args:
        kind: ``"equal"`` or ``"pyramid"``.
        mean: entries per head, averaged over layers; 0 for a row that holds none.
        layers: number of layers that share.
        lowest, highest: bounds of a layer's budget; ``lowest <= mean <= highest``.
        beta: steepness of the pyramid, >= 1; 1 is equal.
    """
    if kind == "equal" or layers == 1:
        return [mean] * layers
    bottom = min(mean, max(lowest, round(mean / beta), 1, 2 * mean - highest))
    top = 2 * mean - bottom
    exact = [top + (bottom - top) * i / (layers - 1) for i in range(layers)]
    budgets = [int(b) for b in exact]
    # What rounding down lost goes to the largest remainders, first layers first.
    order = sorted(range(layers), key=lambda i: (budgets[i] - exact[i], i))
    for i in order[: layers * mean - sum(budgets)]:
        budgets[i] += 1
    return budgets


def compete(scores: Sequence[Tensor], protected: Sequence[Tensor], counts: Sequence[int], floor: float) -> list[Tensor]:
    """Which entries stay when all heads of all given layers compete for one budget.

    HubKV's own setting (its base scorers use one threshold over layers, heads and tokens) and AdaKV's (arXiv
    2407.11550) for one layer; scores of different heads are compared as they are. Ties go to the first layer, head and
    position.

    Args:
        scores: one ``(B, H, N)`` float32 a layer; -inf marks padding.
        protected: one ``(B, H, N)`` bool a layer: entries that stay whatever their score, unless they are padding.
        counts: ``B`` numbers: entries kept per head on average.
        floor: share of the average that each head is sure of, in [0, 1].

    Returns:
        One ``(B, H, N)`` bool a layer, on that layer's device; each row keeps ``counts[row] * heads`` entries over all,
        or as many as it has.

    Raises:
        ValueError: more entries are protected, or sure by the floor, than the budget holds.
    """
    device = scores[0].device
    sizes = [s.shape[1] * s.shape[2] for s in scores]
    heads = sum(s.shape[1] for s in scores)
    sure = []
    for layer, guarded in zip(scores, protected, strict=True):
        real = layer > -torch.inf
        worth = torch.where(guarded & real, torch.inf, layer)
        rank = worth.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        limits = torch.tensor([int(floor * count) for count in counts], device=layer.device)
        sure.append((guarded | (rank < limits[:, None, None])) & real)
    flat = torch.cat([s.flatten(1).to(device) for s in scores], 1)
    flat_sure = torch.cat([s.flatten(1).to(device) for s in sure], 1)
    kept = torch.zeros_like(flat_sure)
    for row, count in enumerate(counts):
        total = min(count * heads, int((flat[row] > -torch.inf).sum()))
        if total:
            kept[row, select_topk(flat[row], total, protected=flat_sure[row])] = True
    return [part.reshape(s.shape).to(s.device) for part, s in zip(kept.split(sizes, 1), scores, strict=True)]
