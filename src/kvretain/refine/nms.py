"""Hard NMS: HubKV's discount taken to the end."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..checks import check_kernel
from .base import Refiner, refiners
from .hub import hub_refine


@refiners.register("nms")
@dataclass(frozen=True)
class HardNMS(Refiner):
    """One-dimensional non-maximum suppression: hubs keep their score, everything else falls to 0, at any ratio.

    Source: the "1D-NMS" of HubKV's figure on context coverage; the slides keep its "useful core" as a soft discount. It
    is ``hub(discount=0.0, calibrate=False, gate_exponent=0.0)``, whose readings of hub and window it shares. A budget
    larger than the number of hubs is filled from the lowest positions, as all suppressed scores are equal.

    Args:
        kernel: window width in positions, odd.

    Raises:
        ValueError: ``kernel`` is not odd.
    """

    kernel: int = 5

    def __post_init__(self) -> None:
        check_kernel("nms", self.kernel)

    def refine(self, scores: Tensor, ratio: float | Tensor, *, positions: Tensor, protected: Tensor) -> Tensor:
        """Refined scores ``(B, H, N)``; of ``ratio``, a number or ``(B,)``, only whether it is 0 matters."""
        return hub_refine(
            scores,
            ratio,
            kernel=self.kernel,
            discount=0.0,
            gate_exponent=0.0,
            calibrate=False,
            positions=positions,
            protected=protected,
        )
