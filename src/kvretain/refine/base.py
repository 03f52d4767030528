"""The refiner's contract."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from ..registry import Registry


class Refiner(ABC):
    """Corrects scores just before selection. A frozen dataclass of flat hyper-parameters; no state.

    Invariants: the shape and the float32 dtype stay; entries marked ``protected`` neither change nor influence the
    others; refinement always starts from fresh scores, so corrections never compound over evictions.
    """

    def check_heads(self, heads: int, where: str) -> None:  # noqa: B027 - most refiners take any number of heads
        """Raises ValueError if ``heads`` KV heads are not the number that it is made for; ``where`` is who has them."""

    @abstractmethod
    def refine(self, scores: Tensor, ratio: float | Tensor, *, positions: Tensor, protected: Tensor) -> Tensor:
        """Refined scores.

        Args:
            scores: ``(B, H, N)`` float32, finite, >= 0.
            ratio: fraction removed, in [0, 1); a number or one per row, ``(B,)``.
            positions: ``(B, H, N)`` int64, original positions, ascending; -1 is padding.
            protected: ``(B, H, N)`` bool, entries to leave out (protected or padding).
        """


refiners: Registry[Refiner] = Registry("refiner")
