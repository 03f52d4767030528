"""Correct the scores before selection. One refiner a file; importing the package registers them all in ``refiners``."""

from .base import Refiner, refiners
from .hub import Hub, hub_refine

__all__ = ["Hub", "Refiner", "hub_refine", "refiners"]
