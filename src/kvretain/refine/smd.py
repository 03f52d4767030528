"""SMD: HubKV without its head weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Refiner, refiners
from .hub import Hub


@refiners.register("smd")
@dataclass(frozen=True)
class SMD(Refiner):
    """Submodular marginal discounting alone, for the ablation "base + SMD only": ``hub(calibrate=False)``.

    Source and readings: :func:`~kvretain.refine.hub.hub_refine`, steps 1, 2 and 4.

    Args:
        kernel: window width in positions, odd.
        discount: factor of non-hubs, in [0, 1].
        gate_exponent: exponent of the ratio, >= 0.

    Raises:
        ValueError: a field is out of range.
    """

    kernel: int = 5
    discount: float = 0.5
    gate_exponent: float = 2.0

    def __post_init__(self) -> None:
        self._hub()

    def _hub(self) -> Hub:
        return Hub(kernel=self.kernel, discount=self.discount, gate_exponent=self.gate_exponent, calibrate=False)

    def refine(self, scores: Tensor, ratio: float | Tensor, *, positions: Tensor, protected: Tensor) -> Tensor:
        """Refined scores ``(B, H, N)``; ``ratio`` is a number or ``(B,)``."""
        return self._hub().refine(scores, ratio, positions=positions, protected=protected)
