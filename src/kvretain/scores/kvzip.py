"""KVzip: keep what the model looks at when it repeats the context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache.view import CacheView
from ..checks import check_flag, check_whole
from .base import Scorer, scorers


@scorers.register("kvzip")
@dataclass(frozen=True)
class KVzip(Scorer):
    """The largest attention weight that an entry receives while the model, teacher-forced, reads its tokens again.

    Source: KVzip, arXiv 2505.23416, and its code. The tokens are fed a second time after the cached context, chunk by
    chunk; later chunks are led in by the last ``lead`` tokens of the one before. An entry's score is the maximum, over
    the query group of its KV head and over its chunk's repeated queries, of the softmax over the ``first`` tokens, the
    entry's chunk and the repetition itself (causal). The cache runs the repetition just before it evicts and takes it
    back (:mod:`kvretain.cache.replay`); tokens generated since the last eviction are repeated like any chunk.

    Deviations: scores are float32 (the model's dtype there, where ties are common); no "repeat the context" prompt is
    fed unless its token ids are given; heads keep equal numbers of entries unless the scope says otherwise (KVzip lets
    all heads of the model compete: ``kvzip@model-heads``). The cost is one more pass over the tokens (KVzip: 2 to 3 x
    prefill).

    *KVzip+* (``normalise=True``; what KVzap, arXiv 2601.07891, is trained to guess, and an option of kvpress' KVzip):
    before the maximum, each weight is divided by the length of its query's hidden state as it enters the layer's
    attention (after the input norm, as in that code) and multiplied by the length of the value vector after the query
    head's slice of the output projection, without its bias. Such scores are >= 0 and not bounded by 1. Models whose
    output projection cannot be told are refused by name.

    Args:
        chunk: tokens repeated at a time, >= 1.
        lead: tokens of the chunk before that lead in, >= 0.
        first: first tokens that every softmax includes, >= 0.
        prompt: token ids fed before each repetition.
        normalise: whether weights are rescaled as in KVzip+.

    Raises:
        ValueError: a field is out of range.
    """

    chunk: int = 2000
    lead: int = 8
    first: int = 4
    prompt: tuple[int, ...] = ()
    normalise: bool = False

    paper = "KVzip, 2505.23416"

    def __post_init__(self) -> None:
        check_whole("kvzip", "chunk", self.chunk, 1)
        check_whole("kvzip", "lead", self.lead, 0)
        check_whole("kvzip", "first", self.first, 0)
        if not isinstance(self.prompt, tuple) or not all(type(token) is int and token >= 0 for token in self.prompt):
            raise ValueError(f"kvzip: prompt must be a tuple of token ids, not {self.prompt!r}")
        check_flag("kvzip", "normalise", self.normalise)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """A replay, and for KVzip+ the lengths of the hidden states in it."""
        return frozenset({"replay", "norms"}) if self.normalise else frozenset({"replay"})

    def score(self, view: CacheView) -> Tensor:
        """Largest weights ``(B, H, N)`` float32, in [0, 1] unless normalised; 0 for padding.

        Raises:
            ValueError: ``view.replay`` is None.
        """
        if view.replay is None:
            raise ValueError(f"scorer 'kvzip' needs a replay, but layer {view.layer}'s view has replay=None")
        return view.replay.to(torch.float32).masked_fill(~view.valid, 0.0)
