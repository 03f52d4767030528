"""Value norm: what has a large value moves the output most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.view import CacheView
from ..checks import check_choice
from .base import Scorer, scorers


@scorers.register("value-norm")
@dataclass(frozen=True)
class ValueNorm(Scorer):
    """The length of the cached value, per KV head; a large one stays.

    Source: no paper proposes the norm alone; it is the value factor of VATP (arXiv 2406.12335), which multiplies
    attention by the L1 norm. The direction is theirs, and VaSE's (2606.03928), which reports that evicting the largest
    values ends in repetition: what attention adds to the output is weight times value, so at equal weight the longer
    value matters more. Attention sinks are the exception (much weight, short values): do not take away the 4 that are
    protected by default.

    Args:
        order: ``"l2"`` (default) or ``"l1"``, VATP's.

    Raises:
        ValueError: ``order`` is neither.
    """

    order: str = "l2"

    paper = "value norm (baseline; VATP, 2406.12335)"

    def __post_init__(self) -> None:
        check_choice("value-norm", "order", self.order, ("l1", "l2"))

    def score(self, view: CacheView) -> Tensor:
        """Norms ``(B, H, N)`` float32, >= 0; 0 for padding."""
        order = 1 if self.order == "l1" else 2
        norms = torch.linalg.vector_norm(view.values, ord=order, dim=-1, dtype=torch.float32)
        return norms.masked_fill(~view.valid, 0.0)
