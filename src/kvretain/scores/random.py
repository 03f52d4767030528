"""Random retention: the baseline that every table must carry."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.view import CacheView
from ._common import check_whole
from .base import Scorer, scorers


def _signed(value: int) -> int:
    """The int64 with the bits of ``value`` modulo 2^64."""
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _FIRST, _SECOND = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int64 (torch's ``>>`` keeps the sign)."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(state: Tensor, value: int | Tensor) -> Tensor:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) that absorbs ``value`` into ``state``; int64 wraps around."""
    state = state + value + _GOLDEN
    state = (state ^ _shift(state, 30)) * _FIRST
    state = (state ^ _shift(state, 27)) * _SECOND
    return state ^ _shift(state, 31)


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
        seed = torch.tensor(_signed(self.seed), device=device)
        heads = torch.arange(view.positions.shape[1], device=device)
        bits = _mix(_mix(_mix(_mix(seed, 0), view.layer), heads)[:, None], view.positions)
        return _shift(bits, 40).to(torch.float32) / (1 << 24)
