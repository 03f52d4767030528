"""A layer that stores its entries in 8 bits: half the memory of bfloat16, on top of what the budget saves."""

from __future__ import annotations

import torch
from torch import Tensor

from .layer import RetentionLayer
from .session import Session

STORAGES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Types of stored entries, with the largest number that each holds."""


def quantise(states: Tensor, storage: str) -> tuple[Tensor, Tensor]:
    """``states (..., D)`` in 8 bits, and scales ``(..., 1)`` float32: an entry's largest component takes the largest
    number there is.

    ``int8`` is off by at most half a step, 1/254 of that component; ``fp8`` (e4m3) by at most 1/16 of each component
    that is not tiny.
    """
    kind, most = STORAGES[storage]
    precise = states.to(torch.float32)
    scales = precise.abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
    scaled = precise / scales
    if kind == torch.int8:
        return scaled.round().to(kind), scales
    # As bytes: few operations know 8-bit floating point.
    return scaled.to(kind).view(torch.uint8), scales


def restored(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What the result of :func:`quantise` stands for, in ``dtype``."""
    numbers = stored.view(torch.float8_e4m3fn) if stored.dtype == torch.uint8 else stored
    return (numbers.to(torch.float32) * scales).to(dtype)


class QuantisedLayer(RetentionLayer):
    """Entries are quantised once, when their pass stores them, one scale per entry and head.

    The attention of a pass sees the pass's own tokens exactly and earlier ones as they are stored; what is read is
    restored for one layer at a time. Evictions move the stored numbers, so that errors do not add up; a merger's
    averages are quantised anew. Scores are of what is stored.

    Args:
        session, index, rank: as for :class:`RetentionLayer`.
        storage: a key of :data:`STORAGES`.
    """

    def __init__(self, session: Session, index: int, rank: int, storage: str) -> None:
        self.storage_type = storage
        super().__init__(session, index, rank)

    def reset(self) -> None:
        """Forgets everything and frees the storage."""
        super().reset()
        self._scales: tuple[Tensor, Tensor] | None = None

    def _read(self, part: int) -> Tensor | None:
        stored = (self._keys, self._values)[part]
        if stored is None or self._scales is None:
            return None
        return restored(stored[:, :, : self._filled], self._scales[part][:, :, : self._filled], self._types[part])

    keys = property(lambda self: self._read(0), RetentionLayer._set_keys, doc="``(B, H, kept, D)``, restored: a copy.")
    values = property(lambda self: self._read(1), RetentionLayer._set_values, doc="``(B, H, kept, Dv)``, restored.")

    def _empty(self, keys: Tensor, values: Tensor) -> None:
        self._types = keys.dtype, values.dtype
        self._store(*self._pack(keys[:, :, :0], values[:, :, :0]))

    def _parts(self) -> tuple[Tensor, ...]:
        """Keys and values, ``(B, H, capacity, D)``, and their scales ``(B, H, capacity, 1)``."""
        assert self._scales is not None
        return *super()._parts(), *self._scales

    def _pack(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        (keys, first), (values, second) = (quantise(t, self.storage_type) for t in (keys, values))
        return keys, values, first, second

    def _store(self, *parts: Tensor) -> None:
        super()._store(*parts)
        self._scales = parts[2], parts[3]

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        plan, earlier = self.session.plan, (self.keys, self.values)
        assert plan is not None and self._keys is not None
        total = self._filled + plan.columns
        if total > self._keys.shape[2]:
            self._reserve(total if plan.prefill else self._capacity(plan.target))
        for part, new in zip(self._parts(), self._pack(key_states, value_states), strict=True):
            part[:, :, self._filled : total] = new
        self._transient = plan.evict
        given = (key_states, value_states)
        keys, values = (
            torch.cat([old, new], 2) if old is not None else new for old, new in zip(earlier, given, strict=True)
        )
        return keys, values
