"""What several scorers share: attention over the cached entries, and the check that a window leaves some."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache.view import CacheView


def check_window(scorer: str, window: int, seen: int) -> None:
    """Raise ``ValueError`` if no token stands before the ``window`` that ends ``seen`` tokens."""
    if seen <= window:
        raise ValueError(
            f"{scorer} values what stands before its window of {window} tokens, but only {seen} had been seen when "
            f"entries had to go: give longer contexts (and longer chunks of them), or a smaller window, as in "
            f"{scorer}(window={max(1, seen // 4)})"
        )


def last_queries(view: CacheView, scorer: str, count: int) -> tuple[Tensor, Tensor]:
    """The last ``count`` queries of ``view``, or as many as it has, ``(B, Hq, W, D)``; and which are real, ``(B, W)``.

    Raises:
        ValueError: the view carries no queries.
    """
    if view.queries is None:
        raise ValueError(
            f"scorer {scorer!r} needs the last {count} queries, but layer {view.layer}'s view has queries=None"
        )
    queries = view.queries[..., -count:, :]
    if view.query_valid is None:
        return queries, queries.new_ones((queries.shape[0], queries.shape[-2]), dtype=torch.bool)
    return queries, view.query_valid[:, -count:]


def attend(logits: Tensor, allowed: Tensor) -> Tensor:
    """Softmax of ``logits (..., N)`` over the entries ``allowed (..., N)``; 0 elsewhere, and everywhere if none is."""
    # The second fill turns the NaN of a row with no allowed entry into 0, whatever stands in padding slots.
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).masked_fill(~allowed, 0.0)
