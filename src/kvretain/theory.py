"""The theory behind HubKV as functions: what its discount approximates and how far it moves scores.

Setting: weights ``w (X, N) >= 0``, coverage ``F(S) = sum_x max_{j in S} w[x, j]`` (:func:`kvretain.coverage`), and
``s_i = F({i}) = sum_x w[x, i]``. HubKV's sources do not say which ``w`` they mean; :func:`local_weights`
is a natural one.

Sources: the slides of HubKV and facts derived from them, each marked in its docstring. ``docs/theory.md`` lists what
may be claimed and which test shows it. Nothing here is needed to run a policy.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import between, check_kernel, check_scores, check_share, check_whole
from .refine.hub import Hub
from .select.coverage import check_indices, check_weights, coverage, integral, whole
from .select.local import bump, check_local

__all__ = [
    "Optimum",
    "Sandwich",
    "ScoreFactors",
    "best_subset",
    "coverage",
    "dominance_pairs",
    "effective_discount",
    "local_kernel",
    "local_overlap",
    "local_weights",
    "marginal_gains",
    "marginal_sandwich",
    "overlap",
    "score_factors",
]

MAX_SUBSETS = 2_000_000
"""The most sets that :func:`best_subset` tries."""

MAX_WEIGHTS = 1 << 28
"""The most weights that :func:`local_weights` lays out: 2 GiB."""


# --- the objective ----------------------------------------------------------------------------------


def local_kernel(kernel: int = 5, shape: str = "triangle") -> Tensor:
    """``K (kernel,)`` float64 with sum 1: ``"box"`` is flat, ``"triangle"`` is 1-2-3-2-1 at width 5.

    Args:
        kernel: width, odd.
        shape: ``"triangle"`` or ``"box"``.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> local_kernel(3)
        tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    check_local("local_kernel", kernel, shape)
    weights = bump(torch.arange(kernel) - kernel // 2, kernel, shape)
    return weights / weights.sum()


def local_weights(
    scores: Tensor, kernel: int = 5, shape: str = "triangle", *, positions: Tensor | None = None
) -> Tensor:
    """``w[x, j] = s_j * K(x - p_j)`` over all places ``x`` that an entry reaches, so that ``F({j}) = s_j`` exactly.

    Entries at the ends reach beyond them. A reading of kvretain: the source says "score-weighted local coverage" only.

    Args:
        scores: ``(N,)`` with ``N >= 1``, real, finite and >= 0.
        kernel: width of ``K``, odd.
        shape: see :func:`local_kernel`.
        positions: ``(N,)`` integers; default 0 to N-1.

    Returns:
        ``(X, N)`` float64 on the CPU with ``X = max p - min p + kernel``; row 0 is the place ``min p - kernel // 2``.

    Raises:
        ValueError: an argument is out of range, a shape or dtype does not fit, or ``X * N`` is above
            :data:`MAX_WEIGHTS`.
    """
    check_local("local_weights", kernel, shape)
    _check_head("local_weights", scores)
    if len(scores) == 0:
        raise ValueError("local_weights: scores must hold at least one entry")
    places = _places(scores, positions)
    first, last = int(places.min()), int(places.max())
    if (count := (last - first + kernel) * len(scores)) > MAX_WEIGHTS:
        raise ValueError(
            f"local_weights: positions from {first} to {last} need {count:,} weights; at most {MAX_WEIGHTS:,} are made"
        )
    places = places - first
    reach = torch.arange(-(kernel // 2), last - first + kernel // 2 + 1)
    shares = bump(reach[:, None] - places, kernel, shape)
    weights = scores.to("cpu", torch.float64) * (shares / shares.sum(0))
    check_weights("local_weights", weights)
    return weights


def _places(scores: Tensor, positions: Tensor | None) -> Tensor:
    """``positions (N,)`` as int64 on the CPU, default 0 to N-1, or a ``ValueError`` from ``local_weights``."""
    if positions is None:
        return torch.arange(len(scores))
    if not isinstance(positions, Tensor):
        raise ValueError(f"local_weights: positions must be a tensor, not {type(positions).__name__}")
    if not integral(positions):
        raise ValueError(f"local_weights: positions must be integers, not {positions.dtype}")
    if positions.shape != scores.shape:
        raise ValueError(f"local_weights: positions must be {tuple(scores.shape)}, not {tuple(positions.shape)}")
    return positions.to("cpu", torch.int64)


def _check_head(owner: str, scores: Tensor) -> None:
    """Raise ``ValueError`` unless ``scores`` are a real tensor ``(N,)``."""
    if not isinstance(scores, Tensor):
        raise ValueError(f"{owner}: scores must be a tensor, not {type(scores).__name__}")
    if scores.ndim != 1 or scores.is_complex() or scores.dtype == torch.bool:
        raise ValueError(
            f"{owner}: scores must be real of shape (N,), one head, not {scores.dtype} {tuple(scores.shape)}"
        )


def marginal_gains(kernel_matrix: Tensor, chosen: Tensor | Sequence[int]) -> Tensor:
    """``F(S + j) - F(S)`` for every entry ``j``; 0 for those in ``S``.

    Args:
        kernel_matrix: ``w (X, N)``, finite and >= 0.
        chosen: ``S``, indices ``(K,)``.

    Returns:
        ``(N,)`` float64. By submodularity it never rises as ``S`` grows.

    Raises:
        ValueError: a weight is negative or not finite, an index is out of range, or a shape or dtype does not fit.
    """
    weights = check_weights("marginal_gains", kernel_matrix)
    indices = check_indices("marginal_gains", chosen, len(weights))
    if indices.ndim != 1:
        raise ValueError(f"marginal_gains: chosen must be one set (K,), not {tuple(indices.shape)}")
    cover = weights[indices].amax(0) if len(indices) else weights.new_zeros(weights.shape[1])
    return (weights - cover).clamp_min(0).sum(-1).to(kernel_matrix.device)


@dataclass(frozen=True)
class Optimum:
    """The best set: ``chosen (keep,)`` int64, ascending, and its coverage ``value``."""

    chosen: Tensor
    value: float


def best_subset(kernel_matrix: Tensor, keep: int) -> Optimum:
    """The set of ``keep`` entries with the largest coverage, by trying all; the first in lexicographic order of equals.

    Args:
        kernel_matrix: ``w (X, N)``, finite and >= 0.
        keep: entries in the set, 1 to N.

    Raises:
        ValueError: more than :data:`MAX_SUBSETS` sets, ``keep`` is no whole number from 1 to N, or a weight is negative
            or not finite.
    """
    size = len(check_weights("best_subset", kernel_matrix))
    keep = whole("best_subset", "keep", keep)
    if not 1 <= keep <= size:
        raise ValueError(f"best_subset: keep must be from 1 to the {size} entries there are, not {keep}")
    if (count := math.comb(size, keep)) > MAX_SUBSETS:
        raise ValueError(f"best_subset: {count:,} sets of {keep} out of {size}; at most {MAX_SUBSETS:,} are tried")
    best: Optimum | None = None
    sets = itertools.combinations(range(size), keep)
    while block := list(itertools.islice(sets, 4096)):
        indices = torch.tensor(block)
        value, at = coverage(kernel_matrix, indices).max(0)
        if best is None or float(value) > best.value:
            best = Optimum(indices[at], float(value))
    assert best is not None
    return best


# --- the local marginal sandwich --------------------------------------------------------------------


def overlap(kernel_matrix: Tensor, i: int, h: int) -> float:
    """``rho(i, h) = sum_x min(w[x, i], w[x, h]) / s_i``, the share of ``i``'s worth that ``h`` covers, in [0, 1].

    Source: HubKV's slides.

    Args:
        kernel_matrix: ``w (X, N)``, finite and >= 0.
        i, h: entries, 0 to N-1.

    Raises:
        ValueError: ``s_i`` is 0, which leaves the overlap undefined; ``i`` or ``h`` is no entry; or a weight is
            negative or not finite.
    """
    weights = check_weights("overlap", kernel_matrix)
    i, h = _entry("i", i, len(weights)), _entry("h", h, len(weights))
    own = float(weights[i].sum())
    if own == 0:
        raise ValueError(f"overlap: entry {i} has no weight, so its overlap is undefined")
    return float(torch.minimum(weights[i], weights[h]).sum()) / own


def _entry(field: str, index: int, size: int) -> int:
    """``index`` as an ``int``, or a ``ValueError`` from ``overlap`` unless it is from 0 to ``size - 1``."""
    index = whole("overlap", field, index)
    if not 0 <= index < size:
        raise ValueError(f"overlap: {field} must be from 0 to {size - 1}, not {index}")
    return index


def local_overlap(distance: int, score_ratio: float = 1.0, kernel: int = 5, shape: str = "triangle") -> float:
    """``rho(i, h)`` for the weights of :func:`local_weights`, at a distance and a ratio ``s_h / s_i``.

    Args:
        distance: between the two positions, a whole number >= 0; from ``kernel`` up the overlap is 0.
        score_ratio: finite and >= 0.
        kernel: width of the local kernel, odd.
        shape: see :func:`local_kernel`.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> round(local_overlap(2, 1.25), 3)
        0.472
    """
    check_local("local_overlap", kernel, shape)
    check_whole("local_overlap", "distance", distance, 0)
    _check_factor("local_overlap", "score_ratio", score_ratio)
    scores = torch.tensor([1.0, score_ratio], dtype=torch.float64)
    weights = local_weights(scores, kernel, shape, positions=torch.tensor([0, min(distance, kernel)]))
    return overlap(weights, 0, 1)


def _check_factor(owner: str, field: str, value: object) -> None:
    """Raise ``ValueError`` unless ``value`` is a finite number >= 0."""
    if not between(0, value, sys.float_info.max):
        raise ValueError(f"{owner}: {field} must be finite and >= 0, not {value!r}")


@dataclass(frozen=True)
class Sandwich:
    """How well ``discount * s_i`` stands for the true marginal gain of ``i`` beside one chosen hub ``h``.

    Attributes:
        gain: ``F({h, i}) - F({h}) = (1 - overlap) * s_i``.
        proxy: ``discount * s_i``, the score that HubKV gives ``i`` before head weight and gate.
        overlap: ``rho(i, h)``.
        slack: ``|1 - rho - discount|``, the least ``eta`` for which the sandwich ``|gain - proxy| <= eta * s_i`` holds;
            it then holds with equality.
    """

    gain: float
    proxy: float
    overlap: float
    slack: float


def marginal_sandwich(kernel_matrix: Tensor, i: int, h: int, discount: float = 0.5) -> Sandwich:
    """The Local Marginal Sandwich of ``i`` beside ``h``.

    Source: HubKV's slides state the bound; that it is an equality is derived. Claims nothing once more than ``h`` is
    chosen, except from above: ``0 <= F(S + i) - F(S) <= (discount + slack) * s_i`` for every ``S`` that contains ``h``.

    Args:
        kernel_matrix: ``w (X, N)``, finite and >= 0.
        i, h: entries, 0 to N-1.
        discount: in [0, 1].

    Raises:
        ValueError: as :func:`overlap`, or ``discount`` is out of range.
    """
    check_share("marginal_sandwich", "discount", discount)
    rho = overlap(kernel_matrix, i, h)
    own = float(coverage(kernel_matrix, [i]))
    gain = float(coverage(kernel_matrix, [i, h]) - coverage(kernel_matrix, [h]))
    return Sandwich(gain, discount * own, rho, abs(1 - rho - discount))


# --- local hub dominance ----------------------------------------------------------------------------


def dominance_pairs(scores: Tensor, kernel: int = 5) -> Tensor:
    """The pairs that Local Hub Dominance speaks of: ``h`` the only maximum of its window, ``i`` another entry in it.

    For them ``s_h > discount * s_i``; moreover ``i`` is no hub, and ``z_h > z_i`` after any positive head weight and
    any gate up to 1 (derived). Claims nothing across heads, for tied peaks, or for protected entries.

    Args:
        scores: ``(N,)``, one head, real, finite and >= 0; its positions are 0 to N-1.
        kernel: window width, odd.

    Returns:
        ``(M, 2)`` int64 rows ``(h, i)``.

    Raises:
        ValueError: ``kernel`` is out of range, a score is negative or not finite, or a shape or dtype does not fit.
    """
    check_kernel("dominance_pairs", kernel)
    _check_head("dominance_pairs", scores)
    check_scores("dominance_pairs", scores)
    size = len(scores)
    apart = (torch.arange(size)[:, None] - torch.arange(size)).abs().to(scores.device)
    near = (apart <= kernel // 2) & (apart > 0)
    unique = (~near | (scores[:, None] > scores)).all(-1, keepdim=True)
    return (near & unique).nonzero()


# --- bounded perturbation ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreFactors:
    """By how much HubKV multiplies scores, over all head weights that its clip allows.

    Attributes:
        gate: ``alpha = ratio ** gate_exponent``.
        hub: least and largest factor of a hub, ``1 + alpha * (beta - 1)``.
        other: least and largest factor of a non-hub, ``1 - alpha * (1 - discount * beta)``.
        other_neutral: factor of a non-hub at ``beta = 1``.
    """

    gate: float
    hub: tuple[float, float]
    other: tuple[float, float]
    other_neutral: float

    @property
    def change(self) -> tuple[float, float]:
        """Bounds of ``(z - s) / s`` over all entries."""
        return min(self.hub[0], self.other[0]) - 1, max(self.hub[1], self.other[1]) - 1

    @property
    def flip_same_head(self) -> float:
        """Within one head of weight 1, a non-hub falls behind a hub that it outscores by less than this factor."""
        return _quotient(1, self.other_neutral)

    @property
    def flip_any(self) -> float:
        """Two entries keep their order if one outscores the other by more than this factor, in whatever heads."""
        return _quotient(max(self.hub[1], self.other[1]), min(self.hub[0], self.other[0]))


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.inf


def score_factors(
    ratio: float,
    *,
    discount: float = 0.5,
    weight_clip: tuple[float, float] = (0.8, 1.2),
    gate_exponent: float = 2.0,
) -> ScoreFactors:
    """The factors at one ``ratio`` (fraction removed), with the defaults of :func:`kvretain.hub_refine`.

    Source: Bounded Perturbation is on HubKV's slides as ``|z - s| = alpha * |u - s|``; the numbers follow from it. It
    bounds how far the ranking can move, not whether the move helps.

    Args:
        ratio: fraction of entries removed, in [0, 1).
        discount: factor of non-hubs, in [0, 1].
        weight_clip: smallest and largest head weight, finite, ``0 <= low <= high``.
        gate_exponent: exponent of ``ratio``, finite and >= 0.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> score_factors(0.5).other
        (0.85, 0.9)
    """
    if not between(0, ratio, 1) or ratio == 1:
        raise ValueError(f"score_factors: ratio is the fraction removed and must be in [0, 1), not {ratio!r}")
    Hub(discount=discount, weight_clip=weight_clip, gate_exponent=gate_exponent)  # its errors are ours
    low, high = weight_clip
    gate = ratio**gate_exponent if ratio > 0 else 0.0

    def other(weight: float) -> float:
        return 1 - gate * (1 - discount * weight)

    return ScoreFactors(gate, (1 + gate * (low - 1), 1 + gate * (high - 1)), (other(low), other(high)), other(1.0))


def effective_discount(gate: float, weight: float = 1.0, discount: float = 0.5) -> float:
    """A non-hub's factor over a hub's, in one head: all that head weight and gate change within a head (derived).

    At ``gate = 1`` the weight cancels. Below it calibration moves the discount a little (with the defaults and a ratio
    of 0.75 it is between 0.697 and 0.746), and so can change what a head keeps.

    Args:
        gate: ``alpha``, in [0, 1].
        weight: ``beta``, finite and >= 0.
        discount: in [0, 1].

    Raises:
        ValueError: an argument is out of range, or a hub's own factor is 0 (at gate 1 and weight 0).

    Example:
        >>> effective_discount(1.0, 0.8) == effective_discount(1.0, 1.2) == 0.5
        True
    """
    check_share("effective_discount", "gate", gate)
    check_share("effective_discount", "discount", discount)
    _check_factor("effective_discount", "weight", weight)
    hub = 1 - gate + gate * weight
    if not hub > 0:
        raise ValueError(
            f"effective_discount: at gate {gate} and weight {weight} a hub's own factor is {hub}, not above 0"
        )
    return (1 - gate + gate * weight * discount) / hub
