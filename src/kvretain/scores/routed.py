"""Routed: retrieval heads keep by score, the others stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..cache.view import CacheView
from .base import scorers
from .trig import Trig


@scorers.register("routed")
@dataclass(frozen=True)
class Routed(Trig):
    """TriAttention's scores for the retrieval heads of a layer; the other heads keep their most recent entries.

    Source: the family "Routing" of α's design space (arXiv 2605.14292), whose members are not public; that some heads
    retrieve and others look at sinks and recent tokens is DuoAttention's finding (2410.10819), which learns which. The
    definition is kvretain's: the heads whose queries point in the most different directions retrieve, i.e. those with
    the lowest concentration ``R = |mean q| / mean |q|`` in the calibration, averaged over the query group. All heads
    store equally many entries, so that it frees what any policy under the scope ``head`` frees.

    Args:
        share: of a layer's KV heads that retrieve, rounded up; 1 is the scorer ``trig``.
        calibration, offsets, distance, norm, concentration, aggregate, value_weight: see :class:`Trig`.

    Raises:
        ValueError: a field is out of range.
    """

    share: float = 0.5

    comparable: ClassVar[bool] = False  # standardised scores beside distances
    least_heads: ClassVar[int] = 2
    paper: ClassVar[str] = "α's family Routing (definition ours)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(f"routed: share must be a number above 0 and at most 1, not {self.share!r}")

    def score(self, view: CacheView) -> Tensor:
        """Scores ``(B, H, N)`` float32, signed: standardised ones, or for heads that stream minus the distance to the
        last token.

        Raises:
            ValueError: the view has no calibration or no rotation, or one KV head: there is nothing to route.
        """
        scores, heads = super().score(view), view.keys.shape[1]
        self.check_heads(heads, f"layer {view.layer}")
        assert view.calibration is not None
        mean, absolute = view.calibration
        spread = mean.abs().sum(-1) / absolute.sum(-1).clamp_min(1e-30)
        order = spread.unflatten(0, (heads, -1)).mean(-1).argsort(stable=True)
        streams = torch.ones(heads, dtype=torch.bool, device=scores.device)
        streams[order[: math.ceil(self.share * heads)]] = False
        distance = (view.positions - view.seen[:, None, None]).to(torch.float32)
        return torch.where(streams[:, None], distance.masked_fill(~view.valid, 0.0), scores)
