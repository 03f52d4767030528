"""R-KV: keep what the last queries attend to and what is not said again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..cache.view import CacheView
from ..checks import check_share, check_whole
from .attention import attend, check_window
from .base import Scorer, scorers
from .snapkv import SnapKV

_BLOCK = 1 << 20
"""Cosines of one head that are held at a time, so that N entries never need N x N numbers at once."""


@scorers.register("rkv")
@dataclass(frozen=True)
class RKV(Scorer):
    """``mix * importance - (1 - mix) * redundancy``, per KV head.

    Source: R-KV, arXiv 2505.24133, and its code.

    *Importance* is SnapKV's in the decode form (:class:`~kvretain.scores.SnapKV` with the same window, kernel, and
    maxima over group and neighbours).

    *Redundancy*: cosines between all cached keys, as rotated, with 0 on the diagonal. In each entry's row the most
    recent entry above ``threshold`` is set to 0 too (the oldest entry of all if none is above), so that the newest of
    several near-duplicates is not held against itself. An entry's redundancy is the softmax, over all entries, of the
    mean of its column.

    The window's own entries score 1.0, above all others; by default they are protected, and no sinks are, as in the
    code. Scores are signed; :meth:`nonnegative` subtracts each head's minimum over the candidates.

    Deviations: float32 throughout (the model's dtype there); protected entries other than the window (sinks or a
    prompt, if the user asks for them) lend nothing to the pooling, as everywhere here, but count in the cosines.
    ``mix`` is the paper's 0.1; the code's default is 0.07. The code compresses at prefill from the budget on, and then
    every 128 tokens; here the cache's cadence decides (``trigger="periodic"`` is nearest).

    Args:
        window: observation window in tokens, >= 1; also the default number of protected last tokens.
        kernel: pooling width in entries, odd.
        mix: share of importance, from 0 to 1 (lambda in the paper).
        threshold: cosine from which an entry counts as a near-duplicate, from 0 to 1.

    Raises:
        ValueError: a field is out of range.
    """

    window: int = 8
    kernel: int = 7
    mix: float = 0.1
    threshold: float = 0.5

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    signed: ClassVar[bool] = True
    sinks: ClassVar[int] = 0
    paper = "R-KV, 2505.24133"

    def __post_init__(self) -> None:
        check_whole("rkv", "window", self.window, 1)
        check_whole("rkv", "kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"rkv: kernel must be odd, so that the pooling window is centred, not {self.kernel}")
        check_share("rkv", "mix", self.mix)
        check_share("rkv", "threshold", self.threshold)

    def recent(self, budget: int) -> int:
        """The observation window."""
        return self.window

    def check_seen(self, seen: int) -> None:
        """Raises ValueError if the window leaves no token to value."""
        check_window("rkv", self.window, seen)

    def score(self, view: CacheView) -> Tensor:
        """Scores ``(B, H, N)`` float32 in [-1, 1]; 1 for the window, 0 for padding.

        Raises:
            ValueError: ``view.queries`` is None.
        """
        if view.queries is None:
            raise ValueError(
                f"scorer 'rkv' needs the last {self.window} queries, but layer {view.layer}'s view has queries=None"
            )
        importance = SnapKV(window=self.window, kernel=self.kernel).score(view)
        scores = self.mix * importance - (1 - self.mix) * self.redundancy(view)
        in_window = view.positions >= (view.seen - self.window).clamp_min(0)[:, None, None]
        return scores.masked_fill(in_window, 1.0).masked_fill(~view.valid, 0.0)

    def redundancy(self, view: CacheView) -> Tensor:
        """The softmax over a head's real entries of their mean cosines, ``(B, H, N)`` float32; 0 for padding."""
        keys = view.keys.to(torch.float32).masked_fill(~view.valid.unsqueeze(-1), 0.0)
        directions = keys / (torch.linalg.vector_norm(keys, dim=-1, keepdim=True) + 1e-8)
        # Row by row: the memory does not grow with the batch, and a row's sums do not depend on the other rows.
        totals = torch.stack([self._columns(*row) for row in zip(directions, view.valid, strict=True)])
        return attend(totals / view.valid.sum(-1, keepdim=True).clamp_min(1), view.valid)

    def _columns(self, directions: Tensor, valid: Tensor) -> Tensor:
        """Sums over the columns ``(H, N)`` of the cosines of ``directions (H, N, D)``, 0 where not ``valid``."""
        heads, size, _ = directions.shape
        total = directions.new_zeros(heads, size)
        slots = torch.arange(size, device=directions.device)
        oldest = valid.to(torch.int8).argmax(-1, keepdim=True)
        step = max(1, _BLOCK // size) if size else 1
        for start in range(0, size, step):
            rows = slots[start : start + step]
            cosines = torch.matmul(directions[:, rows], directions.transpose(-1, -2))
            cosines.masked_fill_(rows[:, None] == slots, 0.0)
            last = torch.where(cosines > self.threshold, slots, -1).amax(-1)
            spared = torch.where(last >= 0, last, oldest)
            total += cosines.scatter_(-1, spared.unsqueeze(-1), 0.0).sum(-2)
        return total
