"""Rotary position embeddings as tensors: rotating, taking a rotation back, averaging rotations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """A layer's rotation. ``x~ = x * cos + turn(x) * sin`` on the first ``size`` of the head's dimensions.

    Attributes:
        cos_sin: positions ``(B, n)`` int64 -> cos and sin ``(B, n, size)`` float32, attention scaling included.
        size: rotated dimensions; the others pass unchanged (partial rotary).
        interleaved: pairs are (0, 1), (2, 3), ... (GPT-J, Cohere) and not (0, size / 2), ... (Llama).
    """

    cos_sin: Callable[[Tensor], tuple[Tensor, Tensor]]
    size: int
    interleaved: bool

    def turn(self, x: Tensor) -> Tensor:
        """A quarter turn of each pair of ``x (..., size)``."""
        if self.interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x (..., D)`` rotated by ``cos`` and ``sin (..., size)``; linear in all three, so a mean rotation will
        do."""
        part = x[..., : self.size]
        return torch.cat([part * cos + self.turn(part) * sin, x[..., self.size :]], -1)

    def unrotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The inverse of :meth:`rotate`; attention scaling is divided out."""
        scale = cos.square() + sin.square()
        return self.rotate(x, cos / scale, -sin / scale)

    @classmethod
    def of(cls, cos_sin: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Rope:
        """Reads size and layout off the angles at position 1, where each pair has its own.

        Angles that come once for each pair (GPT-OSS) are those of a head's halves.
        """
        cos, _ = (part[0, 0] for part in cos_sin(torch.ones(1, 1, dtype=torch.int64)))
        size = cos.shape[-1]
        if size % 2 == 0 and torch.equal(cos[: size // 2], cos[size // 2 :]):
            return cls(cos_sin, size, False)
        if size % 2 == 0 and torch.equal(cos[::2], cos[1::2]):
            return cls(cos_sin, size, True)

        def twice(positions: Tensor) -> tuple[Tensor, Tensor]:
            once = cos_sin(positions)
            return torch.cat([once[0]] * 2, -1), torch.cat([once[1]] * 2, -1)

        return cls(twice, 2 * size, False)
