"""SnapKV: keep what the last window of queries attends to, pooled over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from ..cache.view import CacheView
from ..checks import check_choice, check_whole
from ..slots import pack, pack_index
from .attention import attend, check_window, last_queries
from .base import Scorer, scorers


@scorers.register("snapkv")
@dataclass(frozen=True)
class SnapKV(Scorer):
    """Attention of the last ``window`` queries on the entries before them, pooled along the cache.

    Source: SnapKV, arXiv 2404.14469, in the decode form that TriAttention's (2604.04921) and R-KV's (2505.24133) code
    share: per KV head, logits of the window's queries, maximum over the query group on the logits, softmax over the
    entries before the window, mean over the window, max-pooling with stride 1.

    The window's own entries (positions of at least ``seen - window``) score 1.0; by default they are protected anyway.
    Pooling runs over neighbouring cache slots with zeros at both ends, as in the paper's code; padding is skipped, and
    protected entries lend nothing to their neighbours.

    A context no longer than the window is an error when entries must go, since nothing stands before it; beside longer
    rows of a batch it is served, and its first and last tokens stay. A window that the budget does not hold is no
    error: at most half of the budget is protected for the latest tokens, the window's oldest entries follow after the
    sinks, and nothing is chosen by attention.

    Deviations: 4 sinks are protected by default (the paper protects none), and they are left out of the pooling. The
    paper pools each attention head alone (no query groups), by average; ``pooling="mean"`` and ``group="mean"`` are
    close to it.

    Args:
        window: observation window in tokens, >= 1; also the default number of protected last tokens.
        kernel: pooling width in entries, odd.
        pooling: ``"max"``, ``"mean"`` (divides by ``kernel`` at the ends too) or ``"none"``.
        group: ``"max"`` over the group's logits before the softmax, or ``"mean"`` of the group's attention weights.

    Raises:
        ValueError: a field is out of range.
    """

    window: int = 8
    kernel: int = 7
    pooling: str = "max"
    group: str = "max"

    needs: ClassVar[frozenset[str]] = frozenset({"queries"})
    paper = "SnapKV, 2404.14469"

    def __post_init__(self) -> None:
        check_whole("snapkv", "window", self.window, 1)
        check_whole("snapkv", "kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"snapkv: kernel must be odd, so that the pooling window is centred, not {self.kernel}")
        check_choice("snapkv", "pooling", self.pooling, ("max", "mean", "none"))
        check_choice("snapkv", "group", self.group, ("max", "mean"))

    def recent(self, budget: int) -> int:
        """The observation window."""
        return self.window

    def check_seen(self, seen: int) -> None:
        """Raises ValueError if the window leaves no token to value."""
        check_window("snapkv", self.window, seen)

    def score(self, view: CacheView) -> Tensor:
        """Pooled weights ``(B, H, N)`` float32 in [0, 1]; 1 for the window, 0 for padding.

        Raises:
            ValueError: ``view.queries`` is None.
        """
        queries, real = last_queries(view, "snapkv", self.window)
        in_window = view.positions >= (view.seen - self.window).clamp_min(0)[:, None, None]
        before = view.valid & ~in_window
        logits = view.logits(queries)
        if self.group == "max":
            weights = attend(logits.amax(2), before.unsqueeze(2))
        else:
            weights = attend(logits, before[:, :, None, None]).mean(2)
        total = weights.masked_fill(~real[:, None, :, None], 0.0).sum(2)
        mean = total / real.sum(-1).clamp_min(1)[:, None, None]
        return self._pool(mean, before, view.protected).masked_fill(in_window, 1.0)

    def _pool(self, scores: Tensor, before: Tensor, protected: Tensor) -> Tensor:
        """``scores (B, H, N)`` (0 outside ``before``) pooled over the entries ``before`` the window."""
        if self.pooling == "none":
            return scores
        slots = pack_index(before)
        pool = max_pool1d if self.pooling == "max" else avg_pool1d
        packed = pack(scores.masked_fill(protected, 0.0), slots)
        pooled = pool(packed, self.kernel, stride=1, padding=self.kernel // 2).gather(-1, slots)
        return pooled.where(before & ~protected, scores)
