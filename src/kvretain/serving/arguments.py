"""What :func:`kvretain.retain` was given, read and checked: one thing for one layer, or a list with one a layer."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..slots import unexpanded


def listed(name: str, value: Any, layers: int | None) -> list[Any]:
    """One item a layer; ``layers`` is None if one layer was given, and not as a list."""
    if layers is None:
        return [value]
    if not isinstance(value, list | tuple) or len(value) != layers:
        found = f"{len(value)} items" if isinstance(value, list | tuple) else said(value)
        raise ValueError(f"{name} must be a list with one item for each of the {layers} layers, not {found}")
    return list(value)


def said(value: Any) -> str:
    """What ``value`` is, for messages."""
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def floats(name: str, value: Any, shape: Sequence[int | str], device: torch.device | None = None) -> Tensor:
    """``value``, detached, and on a ``device`` float32. A word in ``shape`` stands for any size of at least 1.

    Raises:
        ValueError: not a float tensor of that shape.
    """
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == len(shape)
    pairs = zip(shape, value.shape, strict=True) if fits else ()
    if not fits or any(n < 1 if isinstance(size, str) else n != size for size, n in pairs):
        raise ValueError(f"{name} must be a float tensor ({', '.join(map(str, shape))}), not {said(value)}")
    return value.detach() if device is None else value.detach().to(device, torch.float32)


def row_numbers(name: str, value: Any, batch: int) -> list[int]:
    """One whole number a row.

    Raises:
        ValueError: not whole numbers of at least 0, or not one for each of ``batch`` rows.
    """
    found = value.tolist() if isinstance(value, Tensor) else value
    found = [found] * batch if isinstance(found, numbers.Integral) else found
    whole = isinstance(found, list | tuple) and len(found) == batch
    if not whole or any(isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 0 for n in found):
        raise ValueError(
            f"{name} must be a whole number of at least 0, or one for each of the {batch} rows, not {value!r}"
        )
    return [int(n) for n in found]


def entry_positions(name: str, value: Tensor | None, keys: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """Positions ``(B, H or 1, N)`` int64 of the entries in ``keys``, -1 at padding.

    Raises:
        ValueError: the wrong shape or kind of number, real positions that do not rise, or lengths that do not fit.
    """
    batch, heads, size, _ = keys.shape
    wide = torch.arange(size, device=keys.device) if value is None else value
    if not isinstance(wide, Tensor) or wide.is_floating_point() or wide.is_complex() or wide.dtype == torch.bool:
        raise ValueError(f"{name} must be an int tensor, not {said(value)}")
    shape = tuple(wide.shape)
    if shape not in ((size,), (1, size), (batch, size), (batch, heads, size)):
        raise ValueError(f"{name} must be ({size},), ({batch}, {size}) or ({batch}, {heads}, {size}), not {shape}")
    wide = wide.detach().to(keys.device, torch.int64)
    if len(shape) < 3:
        wide = wide[..., None, :]  # all heads alike
    wide = wide.expand(batch, -1, -1)
    if lengths is not None:
        if batch and max(lengths) > size:
            raise ValueError(f"lengths of up to {max(lengths)} do not fit the {size} entries")
        real = torch.tensor(lengths, device=keys.device)[:, None, None]
        wide = wide.masked_fill(torch.arange(size, device=keys.device) >= real, -1)
    if value is not None:
        here = unexpanded(wide)
        running = torch.where(here < 0, -1, here).cummax(-1).values
        if bool((here < -1).any()) or not bool(((here[..., 1:] > running[..., :-1]) | (here[..., 1:] < 0)).all()):
            raise ValueError(f"{name} must rise strictly from entry to entry (-1 is padding): sort the entries first")
    return wide


@dataclass(frozen=True)
class Rows:
    """What is known of each row.

    Attributes:
        seen: tokens seen, evicted ones included.
        stored: real entries per head, a mean over heads and layers where they differ.
        prompts: first tokens that are protected.
        uneven: whether rows differ or slots are padding.
    """

    seen: tuple[int, ...]
    stored: tuple[float, ...]
    prompts: tuple[int, ...]
    uneven: bool

    @classmethod
    def of(cls, positions: Sequence[Tensor], seen: Any, prompt: Any, *, ragged: bool) -> Rows:
        """Reads them off the ``positions (B, H or 1, N)`` of each layer.

        Args:
            positions: -1 is padding.
            seen, prompt: as in :func:`kvretain.retain`.
            ragged: whether heads and layers may hold different numbers of entries.

        Raises:
            ValueError: they do and may not, or a row has seen fewer tokens than it holds.
        """
        batch = positions[0].shape[0]
        counts = [(layer >= 0).sum(-1).cpu() for layer in positions]
        for at, count in enumerate(counts):
            if not ragged and not torch.equal(count, counts[0][:, :1].expand_as(count)):
                raise ValueError(
                    f"the heads of layer {at} hold {count.tolist()} entries, those before {counts[0][:, 0].tolist()}: "
                    "only policies with @shared, @model-heads or a pyramid can go on from unequal numbers"
                )
        stored = torch.stack([count.double().mean(-1) for count in counts]).mean(0).tolist()
        ends = [layer.flatten(1).amax(-1).cpu() + 1 for layer in positions if layer.shape[2]]
        least = torch.stack(ends).amax(0).tolist() if ends else [0] * batch
        tokens = least if seen is None else row_numbers("seen", seen, batch)
        for row, (given, held) in enumerate(zip(tokens, least, strict=True)):
            if given < held:
                raise ValueError(f"row {row} holds an entry at position {held - 1}, so it has seen more than {given}")
        whole = all(bool((count == layer.shape[2]).all()) for count, layer in zip(counts, positions, strict=True))
        uneven = not whole or len(set(zip(tokens, stored, strict=True))) > 1
        return cls(tuple(tokens), tuple(stored), tuple(row_numbers("prompt", prompt, batch)), uneven)
