"""An integer hash on tensors (SplitMix64): reproducible random numbers that depend on nothing but their inputs."""

from __future__ import annotations

from torch import Tensor


def signed(value: int) -> int:
    """The int64 with the bits of ``value`` modulo 2^64."""
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _FIRST, _SECOND = (signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int64 (torch's ``>>`` keeps the sign)."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def mix(state: Tensor, value: int | Tensor) -> Tensor:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) that absorbs ``value`` into ``state``; int64 wraps around."""
    state = state + value + _GOLDEN
    state = (state ^ shift(state, 30)) * _FIRST
    state = (state ^ shift(state, 27)) * _SECOND
    return state ^ shift(state, 31)
