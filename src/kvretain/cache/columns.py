"""Columns and positions: what the sequence seen so far consists of.

A *column* is a slot of the model's input, padding included; a *position* counts a row's real tokens::

    column      0    1    2    3    4    5
    row 0      pad  pad   A    B    C    D      positions  -1 -1  0  1  2  3      real = 4
    row 1       E    F    G    H    I    J      positions   0  1  2  3  4  5      real = 6

Columns set the logical length and index the 2-D attention mask; positions are what RoPE rotated the keys by.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class _Run:
    """Columns ``start <= column < stop``: either ``explicit`` positions ``(B, stop - start)``, or all real from ``base
    (B,)``."""

    start: int
    stop: int
    base: Tensor
    explicit: Tensor | None = None

    def positions(self, start: int, stop: int) -> Tensor:
        if self.explicit is not None:
            return self.explicit[:, start - self.start : stop - self.start]
        return self.base[:, None] + torch.arange(start - self.start, stop - self.start, device=self.base.device)


@dataclass
class Columns:
    """The columns seen by a cache. Without any padding it is two integers and no tensor work per step.

    Attributes:
        seen: columns so far, padding included: the logical length.
        real: ``(B,)`` int64 real tokens of each row, or None while every column of every row was real.
        prompt: columns seen before the first single-token step; ``prompt_real`` the same in real tokens.
    """

    seen: int = 0
    real: Tensor | None = None
    prompt: int = 0
    prompt_real: Tensor | None = None
    _decoding: bool = False
    _runs: list[_Run] = field(default_factory=list)

    def append(self, columns: int, valid: Tensor | None, batch: int) -> None:
        """Takes note of ``columns`` new columns; ``valid (B, columns)`` bool marks the real ones, None means all."""
        self._decoding |= columns == 1 and self.seen > 0
        if valid is not None and self.real is None:
            self.real = torch.full((batch,), self.seen, device=valid.device)
            if self.seen:
                self._runs.append(_Run(0, self.seen, torch.zeros_like(self.real)))
        if self.real is not None:
            start, stop = self.seen, self.seen + columns
            if valid is not None:
                explicit = (self.real[:, None] + valid.cumsum(-1) - 1).masked_fill(~valid, -1)
                self._runs.append(_Run(start, stop, self.real, explicit))
                self.real = self.real + valid.sum(-1)
            else:
                if self._runs and self._runs[-1].explicit is None:
                    self._runs[-1].stop = stop
                else:
                    self._runs.append(_Run(start, stop, self.real))
                self.real = self.real + columns
        self.seen += columns
        if not self._decoding:
            self.prompt, self.prompt_real = self.seen, self.real

    def positions(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Positions of the columns ``start <= column < stop``: ``(B, n)`` int64, or ``(1, n)`` while nothing is
        padded."""
        if self.real is None:
            return torch.arange(start, stop, device=device)[None]
        parts = [
            run.positions(max(start, run.start), min(stop, run.stop))
            for run in self._runs
            if run.start < stop and start < run.stop
        ]
        parts = parts or [torch.empty(self.real.shape[0], 0, dtype=torch.int64)]
        return torch.cat([part.to(device) for part in parts], -1)

    def counts(self, batch: int, device: torch.device) -> Tensor:
        """Real tokens seen by each row, ``(B,)`` int64."""
        if self.real is None:
            return torch.full((batch,), self.seen, device=device)
        return self.real.to(device)

    def prompt_counts(self, batch: int, device: torch.device) -> Tensor:
        """Real prompt tokens of each row, ``(B,)`` int64."""
        if self.prompt_real is None:
            return torch.full((batch,), self.prompt, device=device)
        return self.prompt_real.to(device)

    def forget(self, column: int) -> None:
        """Drops what is known of the columns before ``column``; :meth:`positions` is not asked for them again."""
        self._runs = [run for run in self._runs if run.stop > column]

    def crop(self, columns: int) -> None:
        """Takes the last ``columns`` columns back."""
        start = self.seen - columns
        if self.real is not None:
            gone = self.positions(start, self.seen, self.real.device)
            self.real = self.real - (gone >= 0).sum(-1)
            self._runs = [run for run in self._runs if run.start < start]
            for run in self._runs:
                if run.stop > start:
                    run.stop = start
                    run.explicit = run.explicit[:, : start - run.start] if run.explicit is not None else None
        self.seen = start
        if start <= self.prompt:
            self.prompt, self.prompt_real, self._decoding = start, self.real, False

    def select(self, rows: Tensor) -> None:
        """Replaces the batch by the rows at the indices ``rows``."""
        for name in ("real", "prompt_real"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[rows.to(value.device)])
        for run in self._runs:
            run.base = run.base[rows.to(run.base.device)]
            run.explicit = None if run.explicit is None else run.explicit[rows.to(run.explicit.device)]
