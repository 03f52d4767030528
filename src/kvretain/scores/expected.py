"""Expected Attention: keep what future queries will probably attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..cache.view import CacheView
from ..checks import check_flag, check_whole
from ..rope import Rope
from .attention import attend
from .base import Scorer, scorers

FURTHEST = 2**20
"""The most positions ahead that are averaged."""


@scorers.register("expected")
@dataclass(frozen=True)
class Expected(Scorer):
    """Attention weight that a Gaussian future query is expected to give, times the norm of the value.

    Source: Expected Attention, arXiv 2510.00636. Per query head, mean ``m`` and covariance ``C`` of the queries before
    RoPE, over the real tokens seen so far (the first ``first`` left out); both are rotated by the mean rotation over
    the next ``future`` positions. The logit of a key is ``scaling * k . m + scaling^2 / 2 * k C k`` (the log of the
    expected exponential), the softmax runs over all real entries, then the mean over the query group,
    ``(weight + epsilon) * ||v||``.

    Deviations: 4 sinks are protected and not merely left out of the statistics; heads keep equal numbers of entries
    (the authors' default lets the heads of a layer compete: ``expected@shared(floor=0.2)``); statistics go on while
    decoding. A soft cap is ignored. A row of a batch with no more than ``first`` tokens has no statistics, and equal
    weights.

    Args:
        future: positions ahead over which the rotation is averaged, from 1 to 2^20.
        first: first tokens whose queries are left out, >= 0.
        covariance: whether the second moment counts.
        values: whether weights are multiplied by the values' norms.
        epsilon: added to every weight first, >= 0.

    Raises:
        ValueError: a field is out of range.
    """

    future: int = 512
    first: int = 4
    covariance: bool = True
    values: bool = True
    epsilon: float = 0.0

    needs: ClassVar[frozenset[str]] = frozenset({"moments"})
    paper = "Expected Attention, 2510.00636"

    def __post_init__(self) -> None:
        check_whole("expected", "future", self.future, 1)
        if self.future > FURTHEST:
            raise ValueError(f"expected: future must be at most {FURTHEST} positions, not {self.future}")
        check_whole("expected", "first", self.first, 0)
        check_flag("expected", "covariance", self.covariance)
        check_flag("expected", "values", self.values)
        if isinstance(self.epsilon, bool) or not isinstance(self.epsilon, int | float) or not 0 <= self.epsilon < 1e9:
            raise ValueError(f"expected: epsilon must be a number of at least 0, not {self.epsilon!r}")

    def check_seen(self, seen: int) -> None:
        """Raises ValueError if no query counts."""
        if seen <= self.first:
            raise ValueError(
                f"expected foretells queries from those after the first {self.first} tokens, but only {seen} had been "
                "seen when entries had to go: give longer contexts (and longer chunks of them), or leave fewer out, as "
                f"in expected(first={max(0, seen // 4)})"
            )

    def score(self, view: CacheView) -> Tensor:
        """Expected weights times value norms ``(B, H, N)`` float32, >= 0; 0 for padding.

        Raises:
            ValueError: the view has no query moments or no rotation.
        """
        if view.query_mean is None or view.query_covariance is None or view.rope is None:
            raise ValueError(f"scorer 'expected' needs the queries' moments, but layer {view.layer}'s view has none")
        cos, sin = (part[:, None] for part in self._ahead(view.rope, view.seen))  # (B, 1, R)
        mean = view.rope.rotate(view.query_mean, cos, sin)
        logits = view.logits(mean[:, :, None]).squeeze(3)  # (B, H, G, N)
        if self.covariance:
            half = view.rope.rotate(view.query_covariance, cos[:, :, None], sin[:, :, None])
            spread = view.rope.rotate(half.transpose(-1, -2), cos[:, :, None], sin[:, :, None])
            keys = view.keys.to(torch.float32).masked_fill(~view.valid[..., None], 0.0)
            grouped = spread.unflatten(1, (keys.shape[1], -1))  # (B, H, G, D, D)
            quadratic = (torch.matmul(keys[:, :, None], grouped) * keys[:, :, None]).sum(-1)
            logits = logits + view.scaling**2 / 2 * quadratic
        weights = attend(logits, view.valid[:, :, None]).mean(2) + self.epsilon
        if self.values:
            weights = weights * view.values.to(torch.float32).norm(dim=-1)
        return weights.masked_fill(~view.valid, 0.0)

    def _ahead(self, rope: Rope, seen: Tensor, block: int = 4096) -> tuple[Tensor, Tensor]:
        """Mean cosine and sine ``(B, R)`` of the ``future`` positions from ``seen (B,)`` on."""
        sums: tuple[Tensor, Tensor] | None = None
        for start in range(0, self.future, block):
            steps = torch.arange(start, min(start + block, self.future), device=seen.device)
            cos, sin = (part.sum(1) for part in rope.cos_sin(seen[:, None] + steps))
            sums = (cos, sin) if sums is None else (sums[0] + cos, sums[1] + sin)
        assert sums is not None
        return sums[0] / self.future, sums[1] / self.future
