"""Random retention: the baseline that every table must carry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.view import CacheView
from ..checks import check_whole
from ..hashing import mix, shift, signed
from .base import Scorer, scorers


@scorers.register("random")
@dataclass(frozen=True)
class Random(Scorer):
    """A fixed random priority in [0, 1) for each (seed, layer, KV head, position).

    The priority is an integer hash (SplitMix64, top 24 bits, so exact in float32): the same on every device, for every
    row of a batch, and at every eviction. A token therefore keeps its priority for life, and the entries kept at any
    moment are a uniform sample, without replacement, of *all* tokens that the row has seen (protected ones aside).
    Redrawing at each eviction, as random baselines usually do, makes a token survive one lottery per eviction instead:
    old tokens die out geometrically and the baseline turns into a soft recency window.

    Rows share priorities at equal positions; choose another ``seed`` for an independent sample.

    Args:
        seed: any whole number of at least 0.

    Raises:
        ValueError: ``seed`` is not such a number.
    """

    seed: int = 0

    paper = "random (baseline)"

    def __post_init__(self) -> None:
        check_whole("random", "seed", self.seed, 0)

    def score(self, view: CacheView) -> Tensor:
        """Priorities ``(B, H, N)`` float32 in [0, 1); reads positions and the layer's index only."""
        device = view.positions.device
        seed = torch.tensor(signed(self.seed), device=device)
        heads = torch.arange(view.positions.shape[1], device=device)
        bits = mix(mix(mix(mix(seed, 0), view.layer), heads)[:, None], view.positions)
        return shift(bits, 40).to(torch.float32) / (1 << 24)
