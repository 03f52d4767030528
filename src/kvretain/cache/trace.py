"""What the cache held at every step: the record that budgets are matched and claims are checked by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """One forward pass, after its evictions.

    Attributes:
        step: index of the forward pass, from 0.
        tokens: columns fed in this pass (padding included); 0 for an eviction by ``RetentionCache.compress``.
        seen: columns seen so far, this pass included.
        kept: per retention layer, entries kept per KV head.
        evicted: per retention layer, entries per KV head evicted at the end of this pass.
        nbytes: per retention layer, bytes of the allocated key and value storage.
    """

    step: int
    tokens: int
    seen: int
    kept: tuple[float, ...]
    evicted: tuple[float, ...]
    nbytes: tuple[int, ...]


@dataclass
class _Span:
    """``steps`` consecutive passes of ``tokens`` columns each without eviction or reallocation, the first as given."""

    first: Step
    steps: int = 1

    def __iter__(self) -> Iterator[Step]:
        first = self.first
        for i in range(self.steps):
            grown = i * first.tokens
            kept = tuple(k + grown for k in first.kept)
            yield Step(first.step + i, first.tokens, first.seen + grown, kept, first.evicted, first.nbytes)


class Trace:
    """Entries, bytes and evictions at every forward pass of a cache; always on.

    Passes between two evictions are stored as one span, so that the record costs an integer increment per token and a
    few hundred bytes per eviction, whatever the length of the run.

    Lengths are entries per KV head *after* the pass and its evictions, averaged over the retention layers
    (sliding-window layers are not counted). :attr:`peak_attended` is what attention had to look at, before eviction.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        """Indices in the model of the layers that are recorded."""
        self._spans: list[_Span] = []

    def record(
        self, tokens: int, seen: int, kept: tuple[float, ...], evicted: tuple[float, ...], nbytes: tuple[int, ...]
    ) -> None:
        """Adds a pass; see :class:`Step` for the meaning of the numbers."""
        if self._spans and not any(evicted):
            last = self._spans[-1]
            first, grown = last.first, last.steps * tokens
            if (
                first.tokens == tokens
                and first.seen + grown == seen
                and first.nbytes == nbytes
                and not any(first.evicted)
                and all(abs(a + grown - b) < 1e-6 for a, b in zip(first.kept, kept, strict=True))
            ):
                last.steps += 1
                return
        self._spans.append(_Span(Step(len(self), tokens, seen, kept, evicted, nbytes)))

    def __len__(self) -> int:
        """Forward passes recorded."""
        return self._spans[-1].first.step + self._spans[-1].steps if self._spans else 0

    def __iter__(self) -> Iterator[Step]:
        for span in self._spans:
            yield from span

    @property
    def mean_length(self) -> float:
        """Entries kept per KV head, averaged over retention layers and over all forward passes; 0.0 before the
        first."""
        total = 0.0
        for span in self._spans:
            kept = span.first.kept
            total += span.steps * (sum(kept) / len(kept)) + span.first.tokens * span.steps * (span.steps - 1) / 2
        return total / len(self) if self._spans else 0.0

    @property
    def peak_length(self) -> float:
        """The most entries kept per KV head in any layer after any pass."""
        return max((max(s.first.kept) + (s.steps - 1) * s.first.tokens for s in self._spans), default=0)

    @property
    def peak_attended(self) -> float:
        """The most entries per KV head that attention looked at in any layer and pass, before eviction."""
        return max(
            (
                max(k + e for k, e in zip(s.first.kept, s.first.evicted, strict=True)) + (s.steps - 1) * s.first.tokens
                for s in self._spans
            ),
            default=0,
        )

    @property
    def peak_nbytes(self) -> int:
        """The most bytes of key and value storage over all retention layers after any pass."""
        return max((sum(span.first.nbytes) for span in self._spans), default=0)

    @property
    def evicted(self) -> int:
        """Entries evicted so far per KV head, averaged over retention layers and rounded down."""
        return int(sum(sum(s.first.evicted) for s in self._spans) / len(self.layers) + 1e-6)

    @property
    def evictions(self) -> int:
        """Forward passes that ended with an eviction."""
        return sum(any(span.first.evicted) for span in self._spans)

    def to_dict(self) -> dict[str, list[float]]:
        """Columns of equal length, one row per pass and layer: step, layer, tokens, seen, kept, evicted, nbytes."""
        table: dict[str, list[float]] = {
            n: [] for n in ("step", "layer", "tokens", "seen", "kept", "evicted", "nbytes")
        }
        for s in self:
            for row in zip(self.layers, s.kept, s.evicted, s.nbytes, strict=True):
                for name, value in zip(table, (s.step, row[0], s.tokens, s.seen, *row[1:]), strict=True):
                    table[name].append(value)
        return table

    def to_arrow(self) -> Any:
        """:meth:`to_dict` as a ``pyarrow.Table``.

        Raises:
            ImportError: pyarrow is not installed.
        """
        try:
            import pyarrow
        except ImportError:
            raise ImportError('Trace.to_arrow needs pyarrow: pip install "kvretain[arrow]"') from None
        return pyarrow.table(self.to_dict())

    def __repr__(self) -> str:
        return f"Trace({len(self)} passes, mean length {self.mean_length:.1f}, peak {self.peak_length})"
