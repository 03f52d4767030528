"""Fixed head weights: what HubKV's head weights would be if they did not look at the scores."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import between
from ._common import Rewrite
from .base import refiners


@refiners.register("fixed")
@dataclass(frozen=True)
class FixedWeights(Rewrite):
    """Each head's scores times a constant.

    Source: HubKV's slides reject "fixed head weights" (mediocre) and say no more. kvretain's reading: one number per KV
    head for all layers and inputs, no discount, no clip, no gate. It can matter only where heads share a budget or are
    averaged; with the scope ``head`` it is the identity.

    Args:
        weights: one per KV head, >= 0. Default: an even ramp from 0.8 (first head) to 1.2 (last), the range of HubKV's
            clip, blind to what the heads do.

    Raises:
        ValueError: a weight is negative or not finite; on use, also if there are not as many weights as heads.
    """

    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        given = self.weights
        if given is not None and not (
            isinstance(given, tuple) and given and all(between(0, w, sys.float_info.max) for w in given)
        ):
            raise ValueError(f"fixed: weights must be a tuple of finite numbers >= 0, one per head, not {given!r}")

    def check_heads(self, heads: int, where: str) -> None:
        """Raises ValueError if there are not as many weights as heads."""
        if self.weights is not None and len(self.weights) != heads:
            raise ValueError(f"fixed: {len(self.weights)} weights were given, but {where} has {heads} KV heads")

    def rewrite(self, scores: Tensor, positions: Tensor, excluded: Tensor) -> Tensor:
        """Weighted scores ``(B, H, N)``.

        Raises:
            ValueError: there are not as many weights as heads.
        """
        heads = scores.shape[1]
        self.check_heads(heads, "the layer")
        if self.weights is not None:
            weights = torch.tensor(self.weights)
        else:
            weights = torch.linspace(0.8, 1.2, heads) if heads > 1 else torch.ones(1)
        return scores * weights.to(scores.device, scores.dtype)[:, None]
