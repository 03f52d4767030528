"""Compiled decoding: a step of fixed shapes over a cache's own storage, evictions between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from . import support
from .cache import RetentionCache
from .layer import RetentionLayer
from .ragged import RaggedLayer


class CompiledDecoding:
    """Decodes one token per row and call, with the model compiled once: no recompilation as tokens grow.

    A layer's storage has room for ``budget + every`` entries, whatever was seen. Here attention reads all of it, with
    the slots that are empty masked, so that every step has the same shapes and addresses; where to write and the
    token's position are tensors. Evictions happen between steps, outside the compiled region, in the same storage. The
    cache stays the one it was: its trace, its positions, and passes of the model without compilation in between.

    Logits differ from those of the plain model by rounding only. The first call compiles. With CUDA graphs the next
    call overwrites the logits: clone what should outlive it.

    Args:
        model: the model that ``cache`` was made for.
        cache: with a ``budget``; one prefill at least must have gone through it. Policies that observe queries,
            attention or hidden states are refused (`kvretain policies` lists what policies need), and so are rows with
            padding, unequal heads, and models with layers of another kind than full attention.
        options: for :func:`torch.compile`; ``mode="reduce-overhead"`` replays CUDA graphs on a GPU.

    Raises:
        ValueError: what is refused above, by name.

    Example:
        >>> cache = RetentionCache.for_model(model, "keydiff", budget=256)      # doctest: +SKIP
        >>> logits = model(prompt, past_key_values=cache).logits                # doctest: +SKIP
        >>> step = CompiledDecoding(model, cache)                               # doctest: +SKIP
        >>> for _ in range(1000):                                               # doctest: +SKIP
        ...     logits = step(logits[:, -1:].argmax(-1))                        # doctest: +SKIP
    """

    def __init__(self, model: Any, cache: RetentionCache, **options: Any) -> None:
        self.model, self.cache = model, cache
        self._check()
        device = cache._retained[0].keys.device
        self._filled, self._position = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._slots = [_FixedLayer(self._filled) for _ in cache.layers]
        self._fixed = Cache(layers=list(self._slots))
        self._argument = support.cache_argument(model)
        self._run = torch.compile(self._forward, **options)

    @torch.no_grad()
    def __call__(self, token: Tensor) -> Tensor:
        """Logits ``(B, 1, V)`` after ``token (B, 1)``, which is then in the cache.

        Raises:
            ValueError: another shape, or a cache that can no longer be served, as for the class.
        """
        cache, session = self.cache, self.cache._session
        if token.shape != (session.batch, 1):
            raise ValueError(
                f"CompiledDecoding takes one token for each of {session.batch} rows, not {tuple(token.shape)}"
            )
        self._check()
        session.begin(1, len(token), None)
        assert session.budget is not None and session.budget.tokens is not None
        for layer, fixed in zip(cache._retained, self._slots, strict=True):
            layer.fix(session.budget.tokens + session.budget.every)
            fixed.adopt(layer)
        self._filled.fill_(session.kept)
        self._position.fill_(session.columns.seen - 1)
        torch.compiler.cudagraph_mark_step_begin()
        logits = self._run(token)
        for layer in cache._retained:
            layer.extend(1)
        cache.end_pass()
        return logits

    def _forward(self, token: Tensor) -> Tensor:
        positions = self._position.expand(len(token), 1)
        # The mask is made for what is stored, so slots count and not tokens seen; positions are given for that reason.
        output = self.model(token, position_ids=positions, use_cache=True, **{self._argument: self._fixed})
        return output.logits if "logits" in output else output.last_hidden_state

    def _check(self) -> None:
        cache, session = self.cache, self.cache._session
        if support.decoder_of(self.model) is not cache._attachment.decoder:
            raise ValueError("CompiledDecoding needs the model that the cache was made for")
        reason = None
        if session.budget is None or session.budget.tokens is None:
            reason = "its storage has no fixed size: give RetentionCache.for_model a budget"
        elif not all(type(layer) is RetentionLayer for layer in cache.layers):
            other = next(layer for layer in cache.layers if type(layer) is not RetentionLayer)
            kind = "unequal heads" if isinstance(other, RaggedLayer) else f"a {type(other).__name__}"
            reason = f"it has {kind}, whose storage is not plain keys of a fixed shape"
        elif cache.policy.collects or cache.policy.tapped:
            reason = f"its policy {str(cache.policy)!r} observes every pass, which a compiled one does not show"
        elif session.mask is not None:
            reason = "its rows have padding"
        elif session.columns.seen == 0:
            reason = "it is empty: run the prompt through the model first"
        if reason:
            raise ValueError(f"this RetentionCache cannot decode compiled: {reason}")


class _FixedLayer(CacheLayerMixin):
    """A retention layer's whole storage, as a compiled model sees it; ``filled (1,)`` int64 is where the next token
    goes."""

    is_compileable = True
    is_sliding = False

    def __init__(self, filled: Tensor) -> None:
        super().__init__()
        self.filled = filled
        self.is_initialized = True

    def adopt(self, layer: RetentionLayer) -> None:
        """Takes the layer's storage, if that is another than before."""
        if self.keys is layer.storage[0]:
            return
        self.keys, self.values = layer.storage
        for storage in layer.storage:
            # Attention reads empty slots before it masks them, and 0 * NaN is NaN.
            storage[:, :, int(layer.kept) :] = 0
            torch._dynamo.mark_static_address(storage)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes one entry ``(B, H, 1, D)`` and returns all slots."""
        assert self.keys is not None and self.values is not None
        self.keys.index_copy_(2, self.filled, key_states)
        self.values.index_copy_(2, self.filled, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Entries stored, a tensor: the mask shows the slots up to the one that is being written."""
        return self.filled[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All slots, the first at 0."""
        assert self.keys is not None
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        """The number of slots."""
        assert self.keys is not None
        return self.keys.shape[2]
