"""The selector's contract."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ..registry import Registry


class Selector(ABC):
    """Which entries stay? A frozen dataclass of flat hyper-parameters; no state.

    Invariants: exactly ``keep`` distinct indices, ascending; protected entries come first, then by falling worth; ties
    go to the lowest index; the same inputs give the same set on every device and dtype.
    """

    @abstractmethod
    def select(self, scores: Tensor, keep: int, *, protected: Tensor, positions: Tensor | None = None) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending, of the entries to keep.

        Args:
            scores: ``(..., N)`` float32; -inf marks an entry that must not be chosen (padding).
            keep: entries to keep, protected ones included; at most the number of scores above -inf.
            protected: ``(..., N)`` bool.
            positions: ``(..., N)`` int64, original positions, ascending; -1 is padding. Default: 0 to N-1.

        Raises:
            ValueError: more protected entries than ``keep``.
        """


selectors: Registry[Selector] = Registry("selector")
