"""The selector's contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ..registry import Registry
from .signatures import mean_values


class Selector(ABC):
    """Which entries stay? A frozen dataclass of flat hyper-parameters; no state.

    Invariants: exactly ``keep`` distinct indices, ascending; protected entries come first, then by falling worth; ties
    go to the lowest index; the same inputs give the same set on every device and dtype.
    """

    needs_values: ClassVar[bool] = False
    """Whether :meth:`select` compares value vectors."""

    space: str = "values"
    """What those vectors are taken from: ``"values"`` or ``"keys"`` (as stored, rotated)."""

    def mean_values(self, values: Sequence[Tensor]) -> Tensor:
        """One vector per entry, ``(B, N, D)`` float32, for the layers and heads that share a set: ``values`` has a
        ``(B, H, N, D)`` a layer. An entry's vector must not depend on the other entries."""
        return mean_values(values)

    @abstractmethod
    def select(
        self,
        scores: Tensor,
        keep: int,
        *,
        protected: Tensor,
        positions: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending, of the entries to keep.

        Args:
            scores: ``(..., N)`` float32; -inf marks an entry that must not be chosen (padding).
            keep: entries to keep, protected ones included; at most the number of scores above -inf.
            protected: ``(..., N)`` bool.
            positions: ``(..., N)`` int64, original positions, ascending; -1 is padding. Default: 0 to N-1.
            values: ``(..., N, D)`` float32, from :meth:`mean_values`; what stands at padding is not read. None unless
                ``needs_values``.

        Raises:
            ValueError: more protected entries than ``keep``.
        """


selectors: Registry[Selector] = Registry("selector")
