"""Fast KVzip: keep what a learned gate says of a token's hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..cache.view import CacheView
from ..checks import check_share, check_whole
from .base import Scorer, scorers


@scorers.register("fastkvzip")
@dataclass(frozen=True)
class FastKVzip(Scorer):
    """KVzip's score as a small gate guesses it from the hidden state that enters the layer's attention.

    Source: Fast KVzip, arXiv 2601.17668, and its code; :class:`kvretain.gate.LayerGate` is the network. A token is
    scored once, in the pass that brings it, and the number stays with the entry; nothing is read twice. The last
    ``share`` of the tokens are protected, ``window_size`` of them from ``long`` tokens on, as in the authors' prefill.

    Deviations: the gate runs in float32 (the model's dtype there); 4 sinks and the window are protected, not given the
    score 1, and at least one token is (2 % of fewer than 50 are none there); heads keep equal numbers of entries unless
    the scope says otherwise (the authors let all heads of the model compete: ``fastkvzip@model-heads``); tokens that
    are decoded follow the same window and the cache's cadence (128 tokens and a window of 128 there).

    Args:
        gate: a gate file: our own or a published ``.pt``. Default: the one that ``kvretain train-gate`` made for the
            model, else the published one.
        share: fraction of the tokens seen that is protected at the end, in [0, 1].
        window_size: protected last tokens of a long context, >= 1.
        long: tokens from which on a context is long, >= 1.

    Raises:
        ValueError: a field is out of range.
    """

    gate: str = ""
    share: float = 0.02
    window_size: int = 4096
    long: int = 16000

    needs: ClassVar[frozenset[str]] = frozenset({"hidden"})
    paper = "Fast KVzip, 2601.17668"

    def __post_init__(self) -> None:
        if not isinstance(self.gate, str):
            raise ValueError(f"fastkvzip: gate must be the path of a file, not {self.gate!r}")
        check_share("fastkvzip", "share", self.share)
        check_whole("fastkvzip", "window_size", self.window_size, 1)
        check_whole("fastkvzip", "long", self.long, 1)

    def local(self, seen: int) -> int:
        """The window, at least 1."""
        return max(1, int(self.share * seen)) if seen < self.long else self.window_size

    def score(self, view: CacheView) -> Tensor:
        """The gate's scores ``(B, H, N)`` float32 in [0, 1]; 0 for padding.

        Raises:
            ValueError: ``view.gate`` is None.
        """
        if view.gate is None:
            raise ValueError(f"scorer 'fastkvzip' needs a gate's scores, but layer {view.layer}'s view has gate=None")
        return view.gate.to(torch.float32).masked_fill(~view.valid, 0.0)
