"""What a scorer may look at: one layer's entries at the moment of an eviction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..rope import Rope
from ..slots import unexpanded


@dataclass(frozen=True)
class CacheView:
    """One layer's cached entries, in position order, just before an eviction.

    Shapes: ``B`` batch rows, ``H`` key/value heads, ``Hq`` query heads (a multiple of ``H``), ``N`` stored entries,
    ``W`` window queries, ``D`` head size. Padding entries may stand anywhere; they carry position -1 and are never
    scored: what a scorer returns for them is ignored, but they must not leak into its statistics.

    Attributes:
        keys: ``(B, H, N, D)`` as cached, i.e. rotated by RoPE at their original position; the model's dtype.
        values: ``(B, H, N, Dv)``, the model's dtype.
        positions: ``(B, H, N)`` int64, original positions among the row's real tokens; -1 is padding.
        seen: ``(B,)`` int64, real tokens seen by each row, evicted ones included (the next token's position).
        budget: entries that each row will keep, protected ones included (the largest over rows).
        budgets: the same row by row; None means ``budget`` for all.
        protected: ``(B, H, N)`` bool, entries that are kept whatever their score (sinks, recent window, prompt).
        queries: ``(B, Hq, W, D)``, the last queries as they entered attention (rotated), oldest first; None unless
            needed.
        query_valid: ``(B, W)`` bool, False where a row has seen fewer than ``W`` real tokens; None with ``queries``.
        attention: ``(B, H, N)`` float32, attention weight that each entry has received so far, summed over queries and
            over the query heads of its group; None unless needed.
        replay: ``(B, H, N)`` float32, the most attention weight that each entry received when its tokens were read a
            second time; None unless needed.
        gate: ``(B, H, N)`` float32, what the layer's gate said of each entry's hidden state; None unless needed.
        query_mean: ``(B, Hq, D)`` float32, mean of the queries before RoPE over the tokens seen; None unless needed.
        query_covariance: ``(B, Hq, D, D)`` float32, their population covariance; None with ``query_mean``.
        calibration: mean ``(Hq, D / 2)`` complex64 of the queries before RoPE, as complex pairs in the order of
            :meth:`kvretain.rope.Rope.halves`, and mean ``(Hq, D / 2)`` float32 of the pairs' lengths, measured
            beforehand (:mod:`kvretain.calibrate`); None unless needed.
        rope: the layer's rotation, with the moments or a calibration.
        scaling: attention logits are ``scaling * q . k``.
        softcap: logits are squashed by ``softcap * tanh(logits / softcap)`` if set.
        layer: index of the layer in the model; ``num_layers`` counts the model's layers.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    seen: Tensor
    budget: int
    protected: Tensor
    budgets: tuple[int, ...] | None = None
    queries: Tensor | None = None
    query_valid: Tensor | None = None
    attention: Tensor | None = None
    replay: Tensor | None = None
    gate: Tensor | None = None
    query_mean: Tensor | None = None
    query_covariance: Tensor | None = None
    calibration: tuple[Tensor, Tensor] | None = None
    rope: Rope | None = None
    scaling: float = 1.0
    softcap: float | None = None
    layer: int = 0
    num_layers: int = 1

    @property
    def valid(self) -> Tensor:
        """``(B, H, N)`` bool: real entries, i.e. not padding."""
        return (unexpanded(self.positions) >= 0).expand_as(self.positions)

    @property
    def candidates(self) -> Tensor:
        """``(B, H, N)`` bool: entries that may be evicted by score (real and not protected)."""
        return (unexpanded(self.valid) & ~unexpanded(self.protected)).expand_as(self.positions)

    @property
    def closed(self) -> Tensor:
        """``(B, H, N)`` bool: the others (protected or padding)."""
        return (~unexpanded(self.candidates)).expand_as(self.positions)

    def logits(self, queries: Tensor) -> Tensor:
        """Attention logits ``(B, H, G, W, N)`` float32 of ``queries (B, Hq, W, D)``; ``G`` query heads a group. No
        mask."""
        batch, heads, _, size = self.keys.shape
        grouped = queries.reshape(batch, heads, -1, queries.shape[-2], size).to(torch.float32)
        logits = self.scaling * torch.matmul(grouped, self.keys.to(torch.float32).transpose(-1, -2).unsqueeze(2))
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
