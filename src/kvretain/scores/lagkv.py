"""LagKV: keep what differs from what comes next."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cache.view import CacheView
from ..checks import check_flag, check_whole
from ..slots import pack_index
from .base import Scorer, scorers


@scorers.register("lagkv")
@dataclass(frozen=True)
class LagKV(Scorer):
    """How unevenly a token's key and value stand out from the next partition of tokens; no attention is read.

    Source: LagKV, arXiv 2504.04704. The entries after the sinks are cut into partitions of ``lag``. The channels of a
    token's key are scaled to the minimum and maximum that they have in the *next* partition; the sample standard
    deviation over channels goes through a softmax within the token's partition. The same for its value; the mean of
    both ranks the tokens of a partition, and ``rank / lag`` is the score, so that every partition keeps its equal
    share. The last full partition and the remainder after it have no next one: they score 1.0, above all others.

    Deviations, needed under a fixed budget (the paper lets the cache grow and compresses a partition once):

    - Partitions are cut anew at every eviction, over the entries that are still stored.
    - They hold ``min(lag, budget // 4)`` entries, and at least 2, so that the unscored tail, which can be almost twice
      as long, leaves half of a small budget to scored entries. From a budget of 512 on this is the published 128.
    - The last partition is protected by default; so are the sinks, and a prompt if asked for. Protected entries that
      lead are left out of the partitions.
    - Equal ranks in different partitions are broken in favour of the older one.
    - A channel that is constant in the next partition is divided by 1e-6 instead of 0.

    With fewer than two full partitions nothing can be compared, and the score is recency, as in the authors' code.

    Args:
        lag: entries in a partition, >= 2.
        cross: scores are the means of the softmaxes, not ranks, so that partitions compete.

    Raises:
        ValueError: ``lag`` is out of range.
    """

    lag: int = 128
    cross: bool = False

    paper = "LagKV, 2504.04704"

    def __post_init__(self) -> None:
        check_whole("lagkv", "lag", self.lag, 2)
        check_flag("lagkv", "cross", self.cross)

    def recent(self, budget: int) -> int:
        """One partition."""
        return max(2, min(self.lag, budget // 4))

    def score(self, view: CacheView) -> Tensor:
        """Scores ``(B, H, N)`` float32 in [0, 1]; 1 for the tail, 0 for padding and the protected entries that lead."""
        sizes = [self.recent(budget) for budget in view.budgets or (view.budget,) * len(view.seen)]
        # From the first entry that may go: what is protected before it (sinks, a prompt) belongs to no partition.
        rows = view.keys, view.values, view.valid & (view.candidates.cumsum(-1) > 0)
        if len(set(sizes)) == 1:
            return self._score(*rows, sizes[0])
        parts = zip(*(tensor.split(1) for tensor in rows), sizes, strict=True)
        return torch.cat([self._score(*part) for part in parts])

    def _score(self, keys: Tensor, values: Tensor, body: Tensor, size: int) -> Tensor:
        """Scores of the entries in ``body (B, H, N)``, cut into partitions of ``size``; 0 elsewhere."""
        slots, count, entries = pack_index(body), body.sum(-1, keepdim=True), body.shape[-1]
        short = -entries % size

        def cut(states: Tensor) -> Tensor:
            """``(B, H, N, D)`` to ``(B, H, P, size, D)``: the body's entries, packed, then zeros."""
            clean = states.to(torch.float32).masked_fill(~body.unsqueeze(-1), 0.0)
            packed = torch.empty_like(clean).scatter_(2, slots.unsqueeze(-1).expand_as(clean), clean)
            return pad(packed, (0, 0, 0, short)).unflatten(2, (-1, size))

        worth = (_lag_relative(cut(keys)) + _lag_relative(cut(values))) / 2
        if not self.cross:
            # Of equal entries the older ranks higher.
            order = worth.argsort(dim=-1, descending=True, stable=True).argsort(-1)
            worth = (size - 1 - order).to(torch.float32) / size
        place, full = torch.arange(entries, device=body.device), count // size
        scores = torch.where(place < (full - 1) * size, worth.flatten(-2)[..., :entries], 1.0)
        scores = torch.where(full < 2, place / count.clamp_min(1), scores)
        return scores.gather(-1, slots).masked_fill(~body, 0.0)


def _lag_relative(states: Tensor) -> Tensor:
    """Softmax within partitions of the spread of ``states (B, H, P, L, D)`` relative to the next partition: ``(B, H, P,
    L)``; the last partition, which has no next one, gets 0."""
    here, after = states[:, :, :-1], states[:, :, 1:]
    low, high = after.amin(-2, keepdim=True), after.amax(-2, keepdim=True)
    relative = (here - low) / (high - low).clamp_min(1e-6)
    scores = relative.std(-1).softmax(-1)
    return torch.cat([scores, torch.zeros_like(states[:, :, :1, :, 0])], 2)
