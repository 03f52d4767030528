"""Rotary position embeddings as tensors: rotating, taking a rotation back, averaging rotations, pairs."""

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
        frequencies: ``(size / 2,)`` float64 on the CPU, radians by which each pair turns per position. Where they
            depend on the length (dynamic and long RoPE) they are those of short contexts.
        scaling: the attention scaling inside cos and sin (not 1 with YaRN).
    """

    cos_sin: Callable[[Tensor], tuple[Tensor, Tensor]]
    size: int
    interleaved: bool
    frequencies: Tensor
    scaling: float

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

    def halves(self, x: Tensor) -> Tensor:
        """``x (..., D)`` with its dimensions reordered so that pair ``f`` is at ``f`` and ``f + D / 2``.

        Rotated pairs come first. Dimensions that are not rotated pair up likewise and turn by 0 per position. Where all
        of a head is rotated in halves (Llama), that is ``x`` itself.
        """
        size = x.shape[-1]
        if not self.interleaved and self.size == size:
            return x
        order = torch.arange(size, device=x.device)
        rotated, rest = order[: self.size], order[self.size :]
        half = self.size // 2
        first, second = (rotated[::2], rotated[1::2]) if self.interleaved else (rotated[:half], rotated[half:])
        middle = len(rest) // 2
        return x[..., torch.cat([first, rest[:middle], second, rest[middle:]])]

    def speeds(self, size: int) -> tuple[Tensor, Tensor]:
        """Of each pair of :meth:`halves` of a head with ``size`` dimensions: frequency ``(size / 2,)`` float64 and
        attention scaling ``(size / 2,)`` float32, on the CPU."""
        still = size // 2 - len(self.frequencies)
        frequencies = torch.cat([self.frequencies, self.frequencies.new_zeros(still)])
        return frequencies, torch.tensor([self.scaling] * len(self.frequencies) + [1.0] * still)

    def move(self, x: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Keys ``x (B, H, N, D)`` that were rotated at the positions ``old``, as if at ``new``; in the dtype of ``x``.

        Kept keys need it only where a program counts positions by the entries that it stores. Positions are int64,
        ``(B, N)`` or ``(B, H, N)``, size 1 where all are alike; what stands at negative ones means nothing.
        """
        turns = []
        for positions in (old, new):
            by_head = positions[:, None] if positions.ndim == 2 else positions
            cos, sin = self.cos_sin(by_head.flatten(0, 1).clamp_min(0))
            turns.append((cos.unflatten(0, by_head.shape[:2]), sin.unflatten(0, by_head.shape[:2])))
        return self.rotate(self.unrotate(x.to(torch.float32), *turns[0]), *turns[1]).to(x.dtype)

    @classmethod
    def plain(cls, frequencies: Tensor, *, interleaved: bool = False, scaling: float = 1.0) -> Rope:
        """The rotation by ``frequencies (R / 2,)`` of the first ``R`` of a head's dimensions.

        Args:
            frequencies: radians per position of each pair, a model's ``inv_freq``: for a plain rotation of base
                ``theta`` that is ``theta ** (-torch.arange(0, R, 2) / R)``.
            interleaved: pairs are (0, 1), (2, 3), ... and not (0, R / 2), ...
            scaling: what rotation multiplies queries and keys with (YaRN).

        Raises:
            ValueError: ``frequencies`` is not a float vector.

        Example:
            >>> rope = Rope.plain(10000.0 ** (-torch.arange(0, 64, 2) / 64))
            >>> rope.move(torch.ones(1, 2, 3, 64), torch.tensor([[0, 4, 9]]), torch.tensor([[0, 1, 2]])).shape
            torch.Size([1, 2, 3, 64])
        """
        if not isinstance(frequencies, Tensor) or frequencies.ndim != 1 or not frequencies.is_floating_point():
            raise ValueError("frequencies must be a float vector, one number for each pair of dimensions")
        frequencies = frequencies.detach().double().cpu()

        def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
            angles = positions.to(torch.float32)[..., None] * frequencies.to(positions.device, torch.float32)
            both = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
            return both.cos() * scaling, both.sin() * scaling

        return cls(cos_sin, 2 * len(frequencies), interleaved, frequencies, scaling)

    @classmethod
    def of(cls, cos_sin: Callable[[Tensor], tuple[Tensor, Tensor]], frequencies: Tensor | None = None) -> Rope:
        """Reads size, layout, frequencies and scaling off the angles at position 1, where each pair has its own.

        Angles that come once for each pair (GPT-OSS) are those of a head's halves. ``frequencies``, if given and in
        agreement with the angles, are taken as more exact.
        """
        cos, sin = (part[0, 0].double().cpu() for part in cos_sin(torch.ones(1, 1, dtype=torch.int64)))
        size = cos.shape[-1]
        half, interleaved, rotation = size // 2, False, cos_sin
        if size % 2 == 0 and torch.equal(cos[:half], cos[half:]):
            cos, sin = cos[:half], sin[:half]
        elif size % 2 == 0 and torch.equal(cos[::2], cos[1::2]):
            cos, sin, interleaved = cos[::2], sin[::2], True
        else:

            def twice(positions: Tensor) -> tuple[Tensor, Tensor]:
                once = cos_sin(positions)
                return torch.cat([once[0]] * 2, -1), torch.cat([once[1]] * 2, -1)

            size, rotation = 2 * size, twice
        measured, scaling = torch.atan2(sin, cos), float(torch.hypot(cos, sin).mean())
        given = measured if frequencies is None else frequencies.detach().double().cpu()
        agree = given.shape == measured.shape and torch.allclose(given, measured, rtol=1e-3)
        return cls(rotation, size, interleaved, given if agree else measured, scaling)
