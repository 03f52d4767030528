"""A layer whose heads hold different numbers of entries, in memory that is as large as what they hold.

::

    flat   row 0: head 0 | head 1 ............ | head 2 ..    what survived the last eviction, one tensor (T, D)
    tail   (B, H, n, D): the columns seen since then, written in place; every head has them all

Attention sees both parts: all of ``flat`` is real and past, so only the tail needs the model's mask.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from .layer import RetentionLayer


class RaggedLayer(RetentionLayer):
    """Entries per head differ. The base class stores the tail; attention over both parts is :meth:`attend`."""

    def reset(self) -> None:
        """Forgets everything and frees the storage."""
        super().reset()
        self._flat: tuple[Tensor, Tensor] | None = None
        self._flat_positions: Tensor | None = None
        self._flat_numbers: Tensor | None = None
        self._counts: tuple[int, ...] = ()  # entries of each (row, head), row by row

    @property
    def frozen(self) -> bool:  # type: ignore[override]
        """Whether anything is stored beside the tail, so that attention needs :meth:`attend`."""
        return self._flat is not None

    @property
    def kept(self) -> float:
        """Entries stored per head, averaged over heads and rows."""
        return self._filled + (sum(self._counts) / len(self._counts) if self._counts else 0)

    def _store(self, *parts: Tensor) -> None:
        super()._store(*parts)
        if self._flat is not None:
            self.nbytes += sum(part.untyped_storage().nbytes() for part in self._flat)

    def _capacity(self, target: int) -> int:
        """Slots of the tail until the next eviction, which comes when heads store ``target + every`` on average."""
        session = self.session
        every = session.budget.every if session.budget else 128
        return self._filled + max(target + every - session.kept, 1)

    def _segments(self) -> list[tuple[int, int]]:
        """Start and end in ``flat`` of each (row, head)."""
        ends = list(accumulate(self._counts))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def attend(
        self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of new queries ``(B, Hq, n, D)`` over both parts; returns ``(B, n, Hq, Dv)``.

        Args:
            query: as the model gives it to its attention function.
            mask: the model's over the tail: None (causal), bool or additive ``(B, 1, n, t)``, or padding ``(B, t)``.
            scaling, softcap: logits are ``softcap * tanh(scaling * q . k / softcap)``.
            sinks: learned sinks ``(Hq,)`` (GPT-OSS) that take their share of the softmax.
        """
        assert self._flat is not None and self._keys is not None and self._values is not None
        batch, query_heads, new, _ = query.shape
        heads, tail = self._keys.shape[1], self._filled
        groups = query_heads // heads
        own = torch.arange(new, device=query.device)[:, None] + (tail - new)
        bias = torch.zeros(1, 1, new, tail, device=query.device)
        bias = bias.masked_fill(torch.arange(tail, device=query.device) > own, -torch.inf)
        if mask is not None:
            mask = mask[:, None, None, -tail:] != 0 if mask.ndim == 2 else mask[..., -tail:]
            # An additive mask hides with its dtype's lowest number.
            hidden = ~mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
            bias = bias.masked_fill(hidden, -torch.inf)
        out = query.new_empty(batch, heads, groups, new, self._values.shape[3])
        # A CPU multiplies a few rows in half precision many times slower than it converts and multiplies in float32.
        wide = torch.promote_types(query.dtype, torch.float32) if query.device.type == "cpu" else query.dtype
        grouped = query.detach().unflatten(1, (heads, groups))
        for at, (start, end) in enumerate(self._segments()):
            row, head = divmod(at, heads)
            keys, values = self._flat[0][start:end].to(wide), self._flat[1][start:end].to(wide)
            tail_keys, tail_values = (part[row, head, :tail].to(wide) for part in (self._keys, self._values))
            q = grouped[row, head].to(wide)  # (G, n, D)
            logits = torch.cat([q @ keys.T, q @ tail_keys.T], -1) * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits.to(torch.float32)
            logits[..., end - start :] += bias[row if len(bias) > 1 else 0, 0]
            if sinks is not None:
                sink = sinks.reshape(heads, groups, 1, 1)[head].to(logits).expand(groups, new, 1)
                logits = torch.cat([logits, sink], -1)
            weights = logits.softmax(-1).to(values.dtype)
            middle, last = end - start, end - start + tail
            out[row, head] = (weights[..., :middle] @ values + weights[..., middle:last] @ tail_values).nan_to_num(0.0)
        return out.flatten(1, 2).transpose(1, 2)

    # Eviction

    def _padded(self, flat: Tensor, fill: float) -> tuple[Tensor, Tensor]:
        """``flat (T, ...)`` as ``(B, H, N, ...)`` with padding in front, and which slots are real."""
        assert self._keys is not None
        batch, heads = self._keys.shape[:2]
        counts = torch.tensor(self._counts, device=flat.device).reshape(batch, heads, 1)
        size = max(self._counts)
        real = torch.arange(size, device=flat.device) >= size - counts
        padded = flat.new_full((batch, heads, size, *flat.shape[1:]), fill)
        padded[real] = flat
        return padded, real

    def _all(self) -> tuple[Tensor, Tensor]:
        """Keys ``(B, H, N, D)`` and values of both parts, padded in front."""
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        if self._flat is None:
            return keys, values
        parts = (self._padded(part, 0)[0] for part in self._flat)
        first, second = (torch.cat([part, tail], 2) for part, tail in zip(parts, (keys, values), strict=True))
        return first, second

    def _numbers(self) -> Tensor | None:
        """As in the base class, over both parts."""
        tail = super()._numbers()
        if tail is None or self._flat_numbers is None:
            return tail
        padded, _ = self._padded(self._flat_numbers, 0)
        return torch.cat([padded, tail], 2)

    def _positions_shared(self) -> Tensor:
        """``(B, H or 1, N)`` int64, both parts; -1 in front of shorter heads."""
        tail = super()._positions_shared()
        if self._flat_positions is None:
            return tail
        padded, _ = self._padded(self._flat_positions, -1)
        return torch.cat([padded.long(), tail.expand(-1, padded.shape[1], -1)], 2)

    def keep(self, index: Tensor) -> None:
        """Evicts all entries but those where ``index (B, H, N)`` is True, over the slots of :meth:`view`.

        Indices ``(B, H or 1, K)`` int64 do as well, with -1 for padding slots, which are not stored here.
        """
        plan, mask = self.session.plan, index
        assert plan is not None and self._keys is not None and self._values is not None
        before = self.kept
        keys, values = self._all()
        positions = self._positions_shared().expand(-1, keys.shape[1], -1)
        if mask.dtype != torch.bool:
            mask = torch.zeros_like(positions, dtype=torch.bool).scatter_(
                2, index.clamp_min(0).expand(-1, keys.shape[1], -1), index.expand(-1, keys.shape[1], -1) >= 0
            )
            mask &= positions >= 0
        if (numbers := self._numbers()) is not None:
            self._flat_numbers = numbers[mask]
        self._attention = None if self._attention is None else self._attention[:, :, :0]
        self._flat = keys[mask], values[mask]
        self._flat_positions = positions[mask].int()
        self._counts = tuple(mask.sum(-1).flatten().tolist())
        self._filled = 0
        self._tail = self.seen
        self._transient = False
        if plan.prefill or "replay" in self.session.policy.needs:
            # The tail's storage goes; the first single-token pass reserves it anew.
            self._empty(keys, values)
        else:
            self._store(self._keys, self._values)
        self.evicted = before - self.kept

    # Batch

    def select(self, rows: Tensor) -> None:
        """Replaces the batch by the rows at the indices ``rows``."""
        if self._flat is not None and self._keys is not None:
            heads, segments = self._keys.shape[1], self._segments()
            order = [segments[row * heads + head] for row in rows.tolist() for head in range(heads)]
            index = torch.cat([torch.arange(start, end) for start, end in order]).to(self._keys.device)
            self._flat = self._flat[0][index], self._flat[1][index]
            assert self._flat_positions is not None
            self._flat_positions = self._flat_positions[index]
            self._flat_numbers = None if self._flat_numbers is None else self._flat_numbers[index]
            self._counts = tuple(end - start for start, end in order)
        super().select(rows)
