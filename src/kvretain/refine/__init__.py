"""Correct the scores before selection. One refiner a file; importing the package registers them all in ``refiners``."""

from .base import Refiner, refiners
from .fixed import FixedWeights
from .head_nms import HeadNMS
from .hub import Hub, hub_refine
from .ib import IB
from .nms import HardNMS
from .smd import SMD
from .smooth import CommunitySmooth
from .svd import SVD

__all__ = [
    "IB",
    "SMD",
    "SVD",
    "CommunitySmooth",
    "FixedWeights",
    "HardNMS",
    "HeadNMS",
    "Hub",
    "Refiner",
    "hub_refine",
    "refiners",
]
