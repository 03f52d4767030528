"""One layer's storage: written in place, evicted physically.

::

    logical   0  1  2  3  4  5  6  7  8  9 10 11        seen = 12 columns set positions, RoPE and the mask's columns
    stored    0  1        4        7        10 11        kept = 6 entries, in position order, rotated as they were
    mask      kv_length = kept + q,  kv_offset = seen - kept: slot i is read at column kv_offset + i
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..rope import Rope
from . import tap
from .session import Session
from .view import CacheView


class RetentionLayer(CacheLayerMixin):
    """Keys and values ``(B, H, kept, D)`` of one full-attention layer.

    After a multi-token pass the storage is exactly as large as what is kept. The first single-token pass reserves
    ``budget + every`` entries once; from then on tokens are written in place and evictions compact in place.
    Tensors are stored detached: the cache is for inference.

    Attributes:
        index: the layer's index in the model; ``rank`` its index among the retention layers.
        kept: entries stored per head; ``seen`` columns seen (padding and evicted ones included).
    """

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, session: Session, index: int, rank: int) -> None:
        super().__init__()
        self.session = session
        self.index = index
        self.rank = rank
        self.rope: Rope | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets everything and frees the storage."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.is_initialized = False
        self._filled = 0
        self.seen = 0
        self.evicted: float = 0
        self.nbytes = 0
        self._transient = False
        # Positions are stored for the entries that survived an eviction; later ones are the last columns seen.
        self._positions: Tensor | None = None
        self._tail = 0
        self._window: Tensor | None = None
        self._window_valid: Tensor | None = None
        self._oldest = 0
        self._attention: Tensor | None = None
        # Real queries so far (B, 1, 1), their sum (B, Hq, D) and the sum of their outer products (B, Hq, D, D).
        self._moments: tuple[Tensor, ...] | None = None
        self._scaling = 1.0
        self._softcap: float | None = None
        self._observed = 0

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether any token can be taken back: not once a policy may evict."""
        return self.session.budget is None

    # Storage

    @property
    def kept(self) -> float:
        """Entries stored per head."""
        return self._filled

    def _get_keys(self) -> Tensor | None:
        return None if self._keys is None else self._keys[:, :, : self._filled]

    def _get_values(self) -> Tensor | None:
        return None if self._values is None else self._values[:, :, : self._filled]

    def _set_keys(self, keys: Tensor | None) -> None:
        self._keys = keys

    def _set_values(self, values: Tensor | None) -> None:
        self._values = values

    # transformers assigns these in its own methods (offloading), hence the setters.
    keys = property(
        _get_keys, _set_keys, doc="``(B, H, kept, D)`` view of the stored keys; None before the first pass."
    )
    values = property(_get_values, _set_values, doc="``(B, H, kept, Dv)`` view of the stored values.")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes shapes, dtype and device from the first keys ``(B, H, n, D)`` and values ``(B, H, n, Dv)``."""
        self._empty(key_states, value_states)
        self.device = key_states.device
        self.is_initialized = True

    def _empty(self, keys: Tensor, values: Tensor) -> None:
        """Storage for no entry, with the shapes and dtypes of ``keys`` and ``values`` otherwise."""
        self._store(*(t.new_empty(*t.shape[:2], 0, t.shape[3]) for t in (keys, values)))

    def _store(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self.nbytes = keys.untyped_storage().nbytes() + values.untyped_storage().nbytes()

    def _reserve(self, capacity: int) -> None:
        """Moves the entries into storage for ``capacity`` of them."""
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        larger = [old.new_empty(*old.shape[:2], capacity, old.shape[3]) for old in (keys, values)]
        for new, old in zip(larger, (keys, values), strict=True):
            new[:, :, : self._filled] = old
        self._store(*larger)

    def _capacity(self, target: int) -> int:
        """Slots to reserve for decoding when ``target`` entries fit the budget."""
        return max(target, self._filled) + (self.session.budget.every if self.session.budget else 128)

    @property
    def settled(self) -> bool:
        """Whether the layer has evicted in the pass under way."""
        return self._tail == self.seen

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores new keys ``(B, H, n, D)`` and values ``(B, H, n, Dv)``; returns what the attention of this pass sees.

        Raises:
            ValueError: outside a forward pass of the cache's own model, or shapes, dtype or device that do not fit.
        """
        plan = self.session.plan
        if plan is None:
            raise ValueError(
                "this RetentionCache was updated outside a forward pass of the model that it was made for: "
                "call RetentionCache.for_model with the model that you run"
            )
        key_states, value_states = key_states.detach(), value_states.detach()
        self._check(key_states, value_states)
        new, total = plan.columns, self._filled + plan.columns
        assert self._keys is not None and self._values is not None
        if total > self._keys.shape[2] and not plan.prefill:
            self._reserve(self._capacity(plan.target))
        if total <= self._keys.shape[2]:
            self._keys[:, :, self._filled : total] = key_states
            self._values[:, :, self._filled : total] = value_states
        elif plan.evict and self._filled == 0:
            # Most of it is about to go: no copy is made of the model's own tensors.
            self._store(key_states, value_states)
            self._transient = True
        else:
            self._store(
                torch.cat([self._keys[:, :, : self._filled], key_states], 2),
                torch.cat([self._values[:, :, : self._filled], value_states], 2),
            )
            self._transient = plan.evict
        self._filled = total
        self.seen += new
        keys, values = self._keys[:, :, :total], self._values[:, :, :total]
        if self.session.policy.tapped:
            tap.expect(self, keys)
        elif plan.evict and self._transient and not self.session.policy.deferred:
            # Attention holds the long tensors; the layer lets go of them now, so that only one layer's are alive at a
            # time. What was written in place is still being read and is compacted when the pass ends.
            self.session.evict([self])
        return keys, values

    def _check(self, keys: Tensor, values: Tensor) -> None:
        plan, batch = self.session.plan, self.session.batch
        assert plan is not None
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self._keys is not None and self._values is not None
        for name, new, old in (("keys", keys, self._keys), ("values", values, self._values)):
            expected = (batch, old.shape[1], plan.columns, old.shape[3])
            if tuple(new.shape) != expected or new.dtype != old.dtype or new.device != old.device:
                raise ValueError(
                    f"layer {self.index} got {name} {tuple(new.shape)} {new.dtype} on {new.device}; this cache holds "
                    f"{expected} {old.dtype} on {old.device}: is it used with the model it was made for?"
                )

    # Observation (through the tap) and eviction

    frozen = False
    """Whether entries are stored that the keys returned by :meth:`update` do not hold."""

    def observe(self, query: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None) -> None:
        """Called after the attention of this pass with its queries ``(B, Hq, n, D)``; then evicts if it is time."""
        session = self.session
        plan = session.plan
        scorer: Any = session.policy.scorer
        assert plan is not None
        self._scaling, self._softcap, self._observed = scaling, softcap, self.seen
        query = query.detach()
        valid = None
        if session.columns.real is not None or "moments" in scorer.needs:
            positions = session.columns.positions(self.seen - plan.columns, self.seen, query.device)
            valid = positions >= 0 if bool((positions < 0).any()) else None
        if "queries" in scorer.needs:
            self._remember(query, valid, scorer.window)
        if "moments" in scorer.needs:
            with torch.autocast(query.device.type, enabled=False):
                self._measure(query, positions, scorer.first)
        if "attention" in scorer.needs:
            with torch.autocast(query.device.type, enabled=False):
                self._accumulate(query, valid, sinks)
        if plan.evict and not session.policy.deferred:
            session.evict([self])

    def _remember(self, query: Tensor, valid: Tensor | None, size: int) -> None:
        """Keeps the last ``size`` real queries of each row, in a ring."""
        batch, heads, _, width = query.shape
        if self._window is None or self._window_valid is None:
            self._window = query.new_zeros(batch, heads, size, width)
            self._window_valid = torch.zeros(batch, size, dtype=torch.bool, device=query.device)
        if valid is not None:
            order = torch.arange(size, device=query.device).add(self._oldest).remainder(size)
            queries = torch.cat([self._window[:, :, order], query], 2)
            real = torch.cat([self._window_valid[:, order], valid], 1)
            last = real.to(torch.int8).argsort(stable=True, dim=1)[:, -size:]
            self._window = queries.gather(2, last[:, None, :, None].expand(-1, heads, -1, width))
            self._window_valid = real.gather(1, last)
            self._oldest = 0
            return
        if query.shape[2] == 1:
            self._window[:, :, self._oldest] = query[:, :, 0]
            self._window_valid[:, self._oldest] = True
            self._oldest = (self._oldest + 1) % size
            return
        query = query[:, :, -size:]
        slots = torch.arange(query.shape[2], device=query.device).add(self._oldest).remainder(size)
        self._window[:, :, slots] = query
        self._window_valid[:, slots] = True
        self._oldest = (self._oldest + query.shape[2]) % size

    def _measure(self, query: Tensor, positions: Tensor, first: int, block: int = 1024) -> None:
        """Adds queries ``(B, Hq, n, D)`` at ``positions (B or 1, n)``, before RoPE, to the moments; the first tokens do
        not count."""
        assert self.rope is not None
        for part, at in zip(query.split(block, 2), positions.split(block, 1), strict=True):
            cos, sin = self.rope.cos_sin(at.clamp_min(0))
            plain = self.rope.unrotate(part.to(torch.float32), cos[:, None], sin[:, None])
            counted = (at >= first).expand(query.shape[0], -1)
            plain = plain.masked_fill(~counted[:, None, :, None], 0.0)
            new = (
                counted.sum(-1).to(torch.float32)[:, None, None],
                plain.sum(2),
                torch.matmul(plain.transpose(-1, -2), plain),
            )
            old = self._moments
            self._moments = new if old is None else tuple(a + b for a, b in zip(old, new, strict=True))

    def _statistics(self) -> dict[str, Any]:
        """Mean, covariance and rotation, by their names in :class:`CacheView`."""
        if self._moments is None:
            return {}
        count, total, outer = self._moments
        count = count.clamp_min(1)
        mean = total / count
        covariance = outer / count[..., None] - mean[..., :, None] * mean[..., None, :]
        return {"query_mean": mean, "query_covariance": covariance, "rope": self.rope}

    def _accumulate(self, query: Tensor, valid: Tensor | None, sinks: Tensor | None, block: int = 256) -> None:
        """Adds the attention weights of the new queries to what each entry has received, in blocks of ``block``
        queries."""
        keys = self.keys
        assert keys is not None
        batch, heads, kept, _ = keys.shape
        new = query.shape[2]
        grown = torch.zeros(batch, heads, self._keys.shape[2], device=keys.device)  # type: ignore[union-attr]
        if self._attention is None or self._attention.shape[2] < kept:
            if self._attention is not None:
                grown[:, :, : kept - new] = self._attention[:, :, : kept - new]
            self._attention = grown
        else:
            self._attention[:, :, kept - new : kept] = 0
        view = self.view()
        slots = torch.arange(kept, device=keys.device)
        for start in range(0, new, block):
            stop = min(start + block, new)
            logits = view.logits(query[:, :, start:stop])  # (B, H, G, n, N)
            own = torch.arange(start, stop, device=keys.device) + (kept - new)
            logits = logits.masked_fill(slots > own[:, None], -torch.inf)
            logits = logits.masked_fill(~view.valid[:, :, None, None], -torch.inf)
            if sinks is not None:
                # Learned sinks (GPT-OSS) take their share of the softmax and hold no entry.
                sink = sinks.to(torch.float32).reshape(1, heads, -1, 1, 1).expand(*logits.shape[:-1], 1)
                logits = torch.cat([logits, sink], -1)
            weights = logits.softmax(-1)[..., :kept]
            if valid is not None:
                weights = weights.nan_to_num(0.0) * valid[:, None, None, start:stop, None]
            self._attention[:, :, :kept] += weights.sum((2, 3))

    def view(self) -> CacheView:
        """The layer's entries as a scorer sees them now."""
        session, (keys, values) = self.session, self._all()
        assert session.plan is not None
        batch, device, plan = keys.shape[0], keys.device, session.plan
        positions, seen = self.positions, session.columns.counts(batch, device)
        sinks, recent = (torch.tensor(n, device=device)[:, None, None] for n in (plan.sinks, plan.recent))
        protected = (positions < sinks) | (positions >= seen[:, None, None] - recent)
        if plan.prompt:
            protected |= positions < session.columns.prompt_counts(batch, device)[:, None, None]
        size = self._window.shape[2] if self._window is not None else 1
        order = torch.arange(size, device=device).add(self._oldest).remainder(size)
        return CacheView(
            keys=keys,
            values=values,
            positions=positions,
            seen=seen,
            budget=max(plan.counts) if isinstance(plan.counts, tuple) else plan.counts,
            protected=protected & (positions >= 0),
            queries=None if self._window is None else self._window[:, :, order],
            query_valid=None if self._window_valid is None else self._window_valid[:, order],
            **self._numbers(),  # type: ignore[arg-type]
            **self._statistics(),
            scaling=self._scaling,
            softcap=self._softcap,
            layer=self.index,
            num_layers=session.num_layers,
        )

    def _numbers(self) -> dict[str, Tensor]:
        """The number per entry that the scorer asked for, ``(B, H, N)`` float32, by its name in :class:`CacheView`."""
        if self._attention is None:
            return {}
        scorer = self.session.policy.scorer
        name = "replay" if scorer is not None and "replay" in scorer.needs else "attention"
        return {name: self._attention[:, :, : self._filled]}

    # Replay (see `replay.py`)

    def start_replay(self) -> None:
        """Makes room for a number for every entry; those that came since the last eviction start at 0."""
        assert self._keys is not None
        old, self._attention = (
            self._attention,
            torch.zeros(*self._keys.shape[:2], self._filled, device=self._keys.device),
        )
        if old is not None:
            known = self._filled - (self.seen - self._tail)
            self._attention[:, :, :known] = old[:, :, :known]

    def raise_numbers(self, least: Tensor) -> None:
        """Raises the numbers of the entries to ``least (B, H, N)`` at least."""
        assert self._attention is not None
        own = self._attention.shape[2]
        torch.maximum(self._attention, least[:, :, least.shape[2] - own :], out=self._attention)

    def rewind(self, seen: int) -> None:
        """Drops the columns after ``seen``."""
        self._filled -= self.seen - seen
        self.seen = seen

    def _all(self) -> tuple[Tensor, Tensor]:
        """All stored keys ``(B, H, N, D)`` and values, in position order."""
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        return keys, values

    def keep(self, index: Tensor) -> None:
        """Evicts all entries but those at ``index (B, H or 1, K)``, ascending; a leading -1 is a padding slot."""
        plan = self.session.plan
        assert plan is not None and self._keys is not None and self._values is not None
        positions, slots = self._positions_shared(), index.clamp_min(0)
        heads, kept = self._keys.shape[1], index.shape[2]
        if index.shape[1] != positions.shape[1]:
            positions = positions.expand(-1, max(index.shape[1], positions.shape[1]), -1)
        self._positions = positions.gather(2, slots.expand(-1, positions.shape[1], -1)).masked_fill(index < 0, -1).int()
        wide = slots.expand(-1, heads, -1)
        attention = None if self._attention is None else self._attention.gather(2, wide)
        chosen = [t.gather(2, wide[..., None].expand(-1, -1, -1, t.shape[3])) for t in (self._keys, self._values)]
        # A replay has left storage for its own tokens, too.
        if plan.prefill or "replay" in self.session.policy.needs:
            self._store(*chosen)
            self._attention = attention
        else:
            self._keys[:, :, :kept], self._values[:, :, :kept] = chosen
            if self._attention is not None and attention is not None:
                self._attention[:, :, :kept] = attention
        self._transient = False
        self.evicted = self._filled - kept
        self._filled = kept
        self._tail = self.seen

    # Positions and lengths

    def _positions_shared(self) -> Tensor:
        """``(B, H or 1, kept)`` int64."""
        assert self._keys is not None
        batch, columns = self._keys.shape[0], self.session.columns
        tail = columns.positions(self._tail, self.seen, self._keys.device).expand(batch, -1)[:, None]
        if self._positions is None:
            return tail
        return torch.cat([self._positions.long(), tail.expand(-1, self._positions.shape[1], -1)], 2)

    @property
    def positions(self) -> Tensor:
        """Original positions ``(B, H, kept)`` int64 among each row's real tokens, ascending; -1 is padding.

        Padding slots lead after an eviction; padding that came in later stands where it came in.
        """
        if self._keys is None:
            return torch.empty(self.session.batch or 0, 0, 0, dtype=torch.int64)
        return self._positions_shared().expand(-1, self._keys.shape[1], -1)

    def get_seq_length(self) -> int:
        """Columns seen: the logical length, which sets positions and RoPE."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """``(kept + query_length, seen - kept)``: how many entries attention sees, and the mask column of the first."""
        return self._filled + query_length, self.seen - self._filled

    def get_max_length(self) -> int:
        """-1: any number of tokens can be fed."""
        return -1

    # Batch

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last ``-tokens_to_remove`` columns back; the session has checked that this can be right."""
        if tokens_to_remove < 0 and self.is_initialized:
            self._filled += tokens_to_remove
            self.seen += tokens_to_remove

    def select(self, rows: Tensor) -> None:
        """Replaces the batch by the rows at the indices ``rows``."""
        if not self.is_initialized:
            return
        assert self._keys is not None and self._values is not None
        rows = rows.to(self._keys.device)
        self._store(self._keys.index_select(0, rows), self._values.index_select(0, rows))
        for name in ("_positions", "_window", "_window_valid", "_attention"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.index_select(0, rows))
        if self._moments is not None:
            self._moments = tuple(moment.index_select(0, rows) for moment in self._moments)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Beam search: as :meth:`select`."""
        self.select(beam_idx)
