"""StreamingLLM: attention sinks and the most recent tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.view import CacheView
from .base import Scorer, scorers


@scorers.register("streaming")
@dataclass(frozen=True)
class Streaming(Scorer):
    """Recency: the score is the original position, so what stays is the 4 sinks (protected) and a sliding window.

    Source: StreamingLLM, arXiv 2309.17453, section 3.2. Scores are >= 0 and exact up to 2^24 tokens (float32).

    Deviation: StreamingLLM re-numbers positions inside the cache before rotation; here keys keep their original
    rotation, as everywhere in kvretain.
    """

    paper = "StreamingLLM, 2309.17453"

    def score(self, view: CacheView) -> Tensor:
        """Positions ``(B, H, N)`` as float32, in tokens; 0 for padding."""
        return view.positions.clamp_min(0).to(torch.float32)
