"""The scorer's contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ..cache.view import CacheView
from ..registry import Registry

NEEDS = frozenset({"queries", "attention", "replay", "norms", "moments", "pairs", "calibration", "hidden"})
"""What a scorer can ask for, see :attr:`Scorer.needs`."""


class Scorer(ABC):
    """How useful is each entry? A pure function of a :class:`~kvretain.cache.view.CacheView`.

    A subclass is a frozen dataclass whose fields are its hyper-parameters (flat: numbers, strings, booleans, None),
    validated in ``__post_init__`` with a ``ValueError``. It holds no state and imports no model.

    Invariants: scores are float32, finite, higher = keep; a row's scores do not depend on the other rows of the batch,
    nor on padding entries.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """What the cache must collect: ``"queries"`` (the last ``window``), ``"attention"`` (accumulated weights), or
    ``"replay"`` (the tokens are read a second time before an eviction), with ``"norms"`` (of the hidden states in it
    and of projected values), or ``"moments"`` (mean and covariance of the queries before RoPE, which needs a model with
    rotary positions), or ``"pairs"`` (sums over their rotary pairs, for a calibration), or ``"calibration"`` (collects
    nothing: the file that the scorer's field ``calibration`` names), or ``"hidden"`` (what the gate file that the
    scorer's field ``gate`` names says of each token's hidden state)."""

    signed: ClassVar[bool] = False
    """Whether scores can be negative; if so, refiners see them through :meth:`nonnegative`."""

    comparable: ClassVar[bool] = True
    """Whether scores of different heads mean the same, so that scopes may combine them or let heads compete."""

    least_heads: ClassVar[int] = 1
    """KV heads that a layer must have, see :meth:`check_heads`."""

    sinks: ClassVar[int] = 4
    """Default number of protected first tokens."""

    paper: ClassVar[str] = ""
    """Where the method comes from, for tables: a short name and an arXiv number."""

    @property
    def window(self) -> int:
        """Queries that :meth:`score` reads: at least 1 if ``needs`` names ``"queries"``, else 0."""
        return 0

    def recent(self, budget: int) -> int:
        """Default number of protected last tokens under ``budget``."""
        return 0

    def local(self, seen: int) -> int:
        """As :meth:`recent`, by the tokens ``seen``; the larger number counts."""
        return 0

    def check_seen(self, seen: int) -> None:  # noqa: B027 - most scorers can value any number of tokens
        """Raises ValueError if ``seen`` tokens are too few to be valued; asked of the longest row that loses any."""

    def check_heads(self, heads: int, where: str) -> None:
        """Raises ValueError if ``heads`` KV heads are too few to be told apart; ``where`` is who has them."""
        if heads < self.least_heads:
            raise ValueError(
                f"scorer {scorers.name_of(self)!r} needs layers with at least {self.least_heads} KV heads, but {where} "
                f"has {heads}: choose another one (`kvretain policies` lists them)"
            )

    @abstractmethod
    def score(self, view: CacheView) -> Tensor:
        """Scores ``(B, H, N)`` float32 of the entries in ``view``."""

    def nonnegative(self, scores: Tensor, candidates: Tensor) -> Tensor:
        """``scores (B, H, N)`` shifted to be >= 0, for refiners that discount by multiplication.

        Signed scores lose their per-head minimum over ``candidates (B, H, N)``; entries that are not candidates are
        clamped at 0 (they are never discounted). Scores of a scorer that is not ``signed`` come back as they are.
        """
        if not self.signed:
            return scores
        lowest = scores.masked_fill(~candidates, torch.inf).amin(-1, keepdim=True)
        return (scores - torch.where(lowest.isfinite(), lowest, 0)).clamp_min(0)


scorers: Registry[Scorer] = Registry("scorer")
