"""IB: keep the tokens that tell the heads apart."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import between
from ._common import Rewrite, by_position
from .base import refiners

_NOTHING = 1e-9  # nats; rounding of float32 scores stays far below


@refiners.register("ib")
@dataclass(frozen=True)
class IB(Rewrite):
    """Scores times how much their position tells about the head that attends to it.

    Source: HubKV's slides reject "IB" (rewrites the scorer too far, can erase key anchors) and give only these two
    letters, so everything else is kvretain's choice. A layer's scores, divided by their sum, are taken as a joint
    distribution of head and token. In the information bottleneck's self-consistent equations (Tishby et al. 1999) a
    token ``t`` joins the background cluster, whose head distribution is the marginal ``p(h)``, with weight
    ``exp(-beta * KL(p(h|t) || p(h)))``; what is left of it is its factor:

        ``z[h, t] = s[h, t] * (1 - exp(-beta * KL(p(h|t) || p(h))))``

    A token that all heads score alike tells nothing and falls to 0, anchors included. Entries of different heads meet
    at their position; a head without an entry there counts as 0. A row in which no token tells anything (one head, or
    equal heads) keeps its scores; no gate.

    Args:
        beta: weight of information against compression, > 0.

    Raises:
        ValueError: ``beta`` is not such a number.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        if not between(sys.float_info.min, self.beta, sys.float_info.max):
            raise ValueError(f"ib: beta must be finite and > 0, not {self.beta!r}")

    def rewrite(self, scores: Tensor, positions: Tensor, excluded: Tensor) -> Tensor:
        """Reweighted scores ``(B, H, N)``."""
        grid, columns = by_position(scores.to(torch.float64), positions, excluded)
        share = grid.sum(-1, keepdim=True)
        share = share / share.sum(-2, keepdim=True)  # p(h); NaN in a row of zeros
        given = grid / grid.sum(-2, keepdim=True)  # p(h|t); NaN in a column of zeros
        information = (torch.xlogy(given, given) - torch.xlogy(given, share)).sum(-2, keepdim=True)
        information = information.where(information > _NOTHING, 0.0)  # NaN, too, tells nothing
        informed = (information > 0).any(-1, keepdim=True)
        factor = torch.where(informed, -torch.expm1(-self.beta * information), 1.0)
        return (grid * factor).gather(-1, columns).to(scores.dtype)
