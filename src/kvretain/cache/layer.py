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

from ..gate import LayerGate
from ..merge.base import taken
from ..policy import PER_ENTRY
from ..rope import Rope
from . import tap
from .budget import protected_entries
from .session import Session
from .view import CacheView


class RetentionLayer(CacheLayerMixin):
    """Keys and values ``(B, H, kept, D)`` of one full-attention layer.

    After a multi-token pass the storage is exactly as large as what is kept. The first single-token pass reserves
    ``budget + every`` entries once; from then on tokens are written in place and evictions compact in place.
    Tensors are stored detached: the cache is for inference.

    Attributes:
        index: the layer's index in the model; ``rank`` its index among the retention layers.
        rope, calibration: the layer's rotation and its part of a calibration, if the policy needs them.
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
        self.calibration: tuple[Tensor, Tensor] | None = None
        self.gate: LayerGate | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets everything and frees the storage."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._types: tuple[torch.dtype, ...] = ()
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
        # One number per entry, by the policy's need: attention received, the replay's maximum, or the gate's score.
        self._attention: Tensor | None = None
        self._gated: Tensor | None = None
        # Real queries so far (B, 1, 1), their sum (B, Hq, D) and the sum of their outer products (B, Hq, D, D).
        self._moments: tuple[Tensor, ...] | None = None
        # Sums over queries before RoPE (see `Rope.halves`): of themselves (B, Hq, D), of the lengths of their pairs
        # (B, Hq, D / 2), of their own lengths (B, Hq, 1).
        self.pair_sums: tuple[Tensor, ...] | None = None
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
        self._types = keys.dtype, values.dtype
        self._store(*(t.new_empty(*t.shape[:2], 0, t.shape[3]) for t in (keys, values)))

    def _parts(self) -> tuple[Tensor, ...]:
        """What is stored, tensors ``(B, H, capacity, ...)``."""
        assert self._keys is not None and self._values is not None
        return self._keys, self._values

    def _pack(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Keys and values as :meth:`_parts`."""
        return keys, values

    def _store(self, *parts: Tensor) -> None:
        """Makes ``parts`` the storage."""
        self._keys, self._values = parts[:2]
        self.nbytes = sum(part.untyped_storage().nbytes() for part in parts)

    def _reserve(self, capacity: int) -> None:
        """Moves the entries into storage for ``capacity`` of them."""
        larger = [old.new_empty(*old.shape[:2], capacity, old.shape[3]) for old in self._parts()]
        for new, old in zip(larger, self._parts(), strict=True):
            new[:, :, : self._filled] = old[:, :, : self._filled]
        self._store(*larger)

    def _capacity(self, target: int) -> int:
        """Slots to reserve for decoding when ``target`` entries fit the budget."""
        return max(target, self._filled) + (self.session.budget.every if self.session.budget else 128)

    def fix(self, capacity: int) -> None:
        """Makes the storage at least ``capacity`` entries long."""
        assert self._keys is not None
        if self._keys.shape[2] < capacity:
            self._reserve(capacity)

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """Keys ``(B, H, capacity, D)`` and values, empty slots included."""
        assert self._keys is not None and self._values is not None
        return self._keys, self._values

    def extend(self, columns: int) -> None:
        """Counts ``columns`` new entries that were written into the storage from outside."""
        self._filled += columns
        self.seen += columns

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
        keys, values = self._append(key_states, value_states)
        self._filled += plan.columns
        self.seen += plan.columns
        if self.gate is not None:
            self._take_gated(plan.columns)
        if self.session.policy.tapped:
            tap.expect(self, keys)
        elif plan.evict and self._transient and not self.session.policy.deferred:
            # Attention holds the long tensors; the layer lets go of them now, so that only one layer's are alive at a
            # time. What was written in place is still being read and is compacted when the pass ends.
            self.session.evict([self])
        return keys, values

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new columns; returns keys and values of all entries, and says whether they are not the storage
        that later passes write to."""
        plan = self.session.plan
        assert plan is not None and self._keys is not None and self._values is not None
        total = self._filled + plan.columns
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
        return self._keys[:, :, :total], self._values[:, :, :total]

    def _check(self, keys: Tensor, values: Tensor) -> None:
        plan, batch = self.session.plan, self.session.batch
        assert plan is not None
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self._keys is not None and self._values is not None
        pairs = zip(("keys", "values"), (keys, values), (self._keys, self._values), self._types, strict=True)
        for name, new, old, dtype in pairs:
            expected = (batch, old.shape[1], plan.columns, old.shape[3])
            if tuple(new.shape) != expected or new.dtype != dtype or new.device != old.device:
                raise ValueError(
                    f"layer {self.index} got {name} {tuple(new.shape)} {new.dtype} on {new.device}; this cache holds "
                    f"{expected} {dtype} on {old.device}: is it used with the model it was made for?"
                )

    # Hidden states

    def look(self, hidden: Tensor) -> None:
        """Called before the attention of this pass with its input ``(B, n, E)``: the gate scores the new tokens."""
        assert self.gate is not None
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            self._gated = self.gate.on(hidden.device)(hidden)

    def _take_gated(self, new: int) -> None:
        """Puts the gate's scores of the ``new`` last entries beside them."""
        scores, self._gated = self._gated, None
        assert self._keys is not None
        expected = (*self._keys.shape[:2], new)
        if scores is None or tuple(scores.shape) != expected:
            found = None if scores is None else tuple(scores.shape)
            raise ValueError(
                f"the gate of layer {self.index} gave {found} scores for {expected} new entries: the policy "
                f"{str(self.session.policy)!r} cannot serve this model"
            )
        self._make_room(new)[:, :, self._filled - new : self._filled] = scores

    def _make_room(self, new: int) -> Tensor:
        """A number for every entry that is stored or has a slot; those of the ``new`` last entries are 0."""
        assert self._keys is not None
        old, past = self._attention, self._filled - new
        if old is None or old.shape[2] < self._filled:
            self._attention = torch.zeros(self._keys.shape[:3], device=self._keys.device)
            if old is not None:
                self._attention[:, :, :past] = old[:, :, :past]
            return self._attention
        old[:, :, past : self._filled] = 0
        return old

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
        unrotated = scorer.needs & {"moments", "pairs"}
        if session.columns.real is not None or unrotated:
            positions = session.columns.positions(self.seen - plan.columns, self.seen, query.device)
            valid = positions >= 0 if bool((positions < 0).any()) else None
        if "queries" in scorer.needs:
            self._remember(query, valid, scorer.window)
        if unrotated:
            with torch.autocast(query.device.type, enabled=False):
                self._measure(query, positions, scorer.first, pairs="pairs" in unrotated)
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

    def _measure(self, query: Tensor, positions: Tensor, first: int, *, pairs: bool, block: int = 1024) -> None:
        """Adds queries ``(B, Hq, n, D)`` at ``positions (B or 1, n)``, before RoPE, to the moments, or to the sums over
        ``pairs``; the first tokens do not count."""
        assert self.rope is not None
        for part, at in zip(query.split(block, 2), positions.split(block, 1), strict=True):
            cos, sin = self.rope.cos_sin(at.clamp_min(0))
            plain = self.rope.unrotate(part.to(torch.float32), cos[:, None], sin[:, None])
            counted = (at >= first).expand(query.shape[0], -1)
            plain = plain.masked_fill(~counted[:, None, :, None], 0.0)
            if pairs:
                halves = self.rope.halves(plain)
                lengths = torch.hypot(*halves.chunk(2, -1))
                sums = halves.sum(2), lengths.sum(2), plain.norm(dim=-1, keepdim=True).sum(2)
                self.pair_sums = _added(self.pair_sums, sums)
                continue
            new = (
                counted.sum(-1).to(torch.float32)[:, None, None],
                plain.sum(2),
                torch.matmul(plain.transpose(-1, -2), plain),
            )
            self._moments = _added(self._moments, new)

    def _statistics(self) -> dict[str, Any]:
        """Mean and covariance, by their names in :class:`CacheView`."""
        if self._moments is None:
            return {}
        count, total, outer = self._moments
        count = count.clamp_min(1)
        mean = total / count
        covariance = outer / count[..., None] - mean[..., :, None] * mean[..., None, :]
        return {"query_mean": mean, "query_covariance": covariance}

    def _calibration(self) -> tuple[Tensor, Tensor] | None:
        """The calibration on the device of the keys."""
        if self.calibration is not None and self._keys is not None:
            mean, absolute = self.calibration
            self.calibration = mean.to(self._keys.device), absolute.to(self._keys.device)
        return self.calibration

    def _accumulate(self, query: Tensor, valid: Tensor | None, sinks: Tensor | None, block: int = 256) -> None:
        """Adds the attention weights of the new queries to what each entry has received, in blocks of ``block``
        queries."""
        keys = self.keys
        assert keys is not None
        _, heads, kept, _ = keys.shape
        new = query.shape[2]
        received = self._make_room(new)
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
            received[:, :, :kept] += weights.sum((2, 3))

    def view(self) -> CacheView:
        """The layer's entries as a scorer sees them now."""
        session, (keys, values) = self.session, self._all()
        assert session.plan is not None
        batch, device, plan = keys.shape[0], keys.device, session.plan
        positions, seen = self._positions_shared(), session.columns.counts(batch, device)
        prompts = session.columns.prompt_counts(batch, device) if plan.prompt else None
        protected = protected_entries(positions, seen, plan.sinks, plan.recent, prompts)
        size = self._window.shape[2] if self._window is not None else 1
        order = torch.arange(size, device=device).add(self._oldest).remainder(size)
        return CacheView(
            keys=keys,
            values=values,
            positions=positions.expand(-1, keys.shape[1], -1),
            seen=seen,
            budget=max(plan.counts) if isinstance(plan.counts, tuple) else plan.counts,
            budgets=plan.counts if isinstance(plan.counts, tuple) else None,
            protected=protected.expand(-1, keys.shape[1], -1),
            queries=None if self._window is None else self._window[:, :, order],
            query_valid=None if self._window_valid is None else self._window_valid[:, order],
            **self._named_numbers(),
            **self._statistics(),
            calibration=self._calibration(),
            rope=self.rope,
            scaling=self._scaling,
            softcap=self._softcap,
            layer=self.index,
            num_layers=session.num_layers,
        )

    def _numbers(self) -> Tensor | None:
        """The number that is kept with every entry, ``(B, H, N)`` float32, if the cache's policy needs one."""
        return None if self._attention is None else self._attention[:, :, : self._filled]

    def _named_numbers(self) -> dict[str, Tensor]:
        """:meth:`_numbers` by the name in :class:`CacheView` under which the policy of the moment reads them."""
        numbers, names = self._numbers(), {"hidden": "gate"}
        needs = self.session.policy.needs & PER_ENTRY
        return {} if numbers is None else {names.get(need, need): numbers for need in needs}

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
        wide = slots.expand(-1, heads, -1)
        attention = None if self._attention is None else self._attention.gather(2, wide)
        if (merger := self.session.policy.merger) is not None:
            at = index.expand(-1, heads, -1)
            chosen = self._pack(*merger.merge(*self._all(), at, positions.expand(-1, heads, -1)))
        else:
            chosen = tuple(taken(part, wide) for part in self._parts())
        self._positions = positions.gather(2, slots.expand(-1, positions.shape[1], -1)).masked_fill(index < 0, -1).int()
        # A replay has left storage for its own tokens, too.
        if plan.prefill or "replay" in self.session.policy.needs:
            self._store(*chosen)
            self._attention = attention
        else:
            for part, new in zip(self._parts(), chosen, strict=True):
                part[:, :, :kept] = new
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
        self._store(*(part.index_select(0, rows) for part in self._parts()))
        for name in ("_positions", "_window", "_window_valid", "_attention"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value.index_select(0, rows))
        for name in ("_moments", "pair_sums"):
            sums = getattr(self, name)
            setattr(self, name, None if sums is None else tuple(part.index_select(0, rows) for part in sums))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Beam search: as :meth:`select`."""
        self.select(beam_idx)


def _added(old: tuple[Tensor, ...] | None, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return new if old is None else tuple(a + b for a, b in zip(old, new, strict=True))
