"""Key norm: keys of small length attract attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..cache.view import CacheView
from .base import Scorer, scorers


@scorers.register("knorm")
@dataclass(frozen=True)
class KNorm(Scorer):
    """``-||k||_2`` of the cached key, per KV head.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv 2406.11430.
    Rotation does not change a norm, so post-RoPE keys serve. Scores are signed (<= 0); :meth:`nonnegative` subtracts
    each head's minimum over the candidates.

    Deviations: 4 sinks are protected by default; the first two layers, which the paper spares, are compressed as well.
    """

    signed: ClassVar[bool] = True
    paper = "Knorm, 2406.11430"

    def score(self, view: CacheView) -> Tensor:
        """Negative key norms ``(B, H, N)`` float32; 0 for padding."""
        norms = torch.linalg.vector_norm(view.keys, dim=-1, dtype=torch.float32)
        return -norms.masked_fill(~view.valid, 0.0)
