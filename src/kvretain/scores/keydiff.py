"""KeyDiff: keep the keys that differ most from the average key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from ..cache.view import CacheView
from .base import Scorer, scorers


@scorers.register("keydiff")
@dataclass(frozen=True)
class KeyDiff(Scorer):
    """``-cos(k, anchor)`` per KV head, the anchor being the mean of the L2-normalised keys of all real entries.

    Source: KeyDiff, arXiv 2504.15364. No attention is read. Scores are signed, in [-1, 1]; :meth:`nonnegative`
    subtracts each head's minimum over the candidates.

    Deviations: 4 sinks are protected by default (the paper protects none); protected entries count in the anchor, since
    they are part of the cache.
    """

    signed: ClassVar[bool] = True
    paper = "KeyDiff, 2504.15364"

    def score(self, view: CacheView) -> Tensor:
        """Negative cosines ``(B, H, N)``, computed in float32; 0 for padding."""
        padding = ~view.valid
        directions = normalize(view.keys.to(torch.float32), dim=-1).masked_fill(padding.unsqueeze(-1), 0.0)
        anchor = directions.sum(-2, keepdim=True)  # a cosine does not need the division that makes this a mean
        return -cosine_similarity(directions, anchor, dim=-1)
