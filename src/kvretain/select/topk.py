"""Top-k: the entries with the largest scores, with an exact rule for ties."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Selector, selectors


def select_topk(scores: Tensor, keep: int, *, protected: Tensor | None = None) -> Tensor:
    """Indices of the ``keep`` largest scores; protected entries come first, equal scores go to the lowest index.

    The chosen set depends on the values alone (no sort, no atomics), so it is the same on every device.

    Args:
        scores: ``(..., N)``, any floating dtype; -inf marks entries to be chosen only when nothing else is left
            (padding).
        keep: entries to keep, protected ones included; 1 to N.
        protected: bool, broadcasts to ``scores``: entries that are kept whatever their score.

    Returns:
        ``(..., keep)`` int64, ascending.

    Raises:
        ValueError: ``keep`` is not a whole number from 1 to N, a row has more protected entries than ``keep``, a score
            is +inf, an unprotected one is NaN, or a shape or dtype does not fit.

    Example:
        >>> select_topk(torch.tensor([0.2, 0.9, 0.9, 0.1, 0.9]), 2)
        tensor([1, 2])
    """
    keep = _check_arguments(scores, keep, protected)
    rows, size = scores.shape[:-1], scores.shape[-1]
    if rows.numel() == 0:
        return torch.empty(*rows, keep, dtype=torch.int64, device=scores.device)
    worth = scores if protected is None else torch.where(protected, torch.inf, scores)

    # topk ranks NaN above all, so a NaN in a row reaches its threshold.
    threshold = worth.topk(keep, sorted=False).values.amin(-1, keepdim=True)
    chosen = worth >= threshold
    count = chosen.sum(-1, keepdim=True)
    guarded = count.new_zeros(()) if protected is None else protected.sum(-1)
    flags = [scores.amax() == torch.inf, threshold.isnan().any(), (guarded > keep).any(), (count > keep).any()]
    infinite, undefined, crowded, tied = torch.stack(flags).tolist()  # one device synchronisation
    if crowded:
        raise ValueError(
            f"select_topk: {int(guarded.max())} entries are protected, but only {keep} may be kept: "
            "raise the budget, or protect fewer sinks, recent or prompt tokens"
        )
    if undefined or infinite:
        raise ValueError(f"select_topk: scores must be numbers below +inf, but one is {'nan' if undefined else 'inf'}")
    if tied:
        equal = worth == threshold
        above = chosen & ~equal
        room = keep - above.sum(-1, keepdim=True)
        chosen = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))
    return (chosen.flatten().nonzero() % size).reshape(*rows, keep)


def _check_arguments(scores: Tensor, keep: int, protected: Tensor | None) -> int:
    """Check what can be checked without reading the tensors; ``keep`` as an ``int``."""
    if scores.ndim < 1 or not scores.is_floating_point():
        raise ValueError(
            f"select_topk: scores must be floating point of shape (..., N), not {scores.dtype} {tuple(scores.shape)}"
        )
    try:
        whole = operator.index(keep)
    except TypeError:
        whole = 0
    if isinstance(keep, bool) or not 1 <= whole <= scores.shape[-1]:
        raise ValueError(
            f"select_topk: keep must be a whole number from 1 to the {scores.shape[-1]} entries there are, not {keep!r}"
        )
    if protected is not None:
        if protected.dtype != torch.bool:
            raise ValueError(f"select_topk: protected must be bool, not {protected.dtype}")
        sizes = zip(protected.shape[::-1], scores.shape[::-1], strict=False)
        fits = protected.ndim <= scores.ndim and all(own in (1, size) for own, size in sizes)
        if not fits or protected.shape[-1:] != scores.shape[-1:]:
            raise ValueError(
                f"select_topk: protected of shape {tuple(protected.shape)} does not fit scores of shape "
                f"{tuple(scores.shape)}"
            )
    return whole


@selectors.register("topk")
@dataclass(frozen=True)
class TopK(Selector):
    """The largest scores; see :func:`select_topk`."""

    def select(
        self,
        scores: Tensor,
        keep: int,
        *,
        protected: Tensor,
        positions: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending; ``positions`` and ``values`` are not read."""
        return select_topk(scores, keep, protected=protected)
