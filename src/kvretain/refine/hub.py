"""HubKV: discount the neighbours of local peaks before top-k."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import between, check_flag, check_kernel, check_scores, check_share
from ..slots import pack, pack_index, unexpanded
from ._common import broadcasts, gate_of
from .base import Refiner, refiners

NEIGHBOURS = ("position", "hub")
SELECTIVITY = ("cv", "peak", "entropy")

_FLAT = 1e-5  # a coefficient of variation below this is taken for rounding: the head is flat


def hub_refine(
    scores: Tensor,
    ratio: float | Tensor,
    *,
    kernel: int = 5,
    discount: float = 0.5,
    weight_exponent: float = 0.5,
    weight_clip: tuple[float, float] = (0.8, 1.2),
    gate_exponent: float = 2.0,
    calibrate: bool = True,
    positions: Tensor | None = None,
    protected: Tensor | None = None,
    neighbours: str = "position",
    selectivity: str = "cv",
) -> Tensor:
    """Scores corrected for local redundancy and for the sharpness of their head, so that top-k stops keeping clusters.

    Source: HubKV, "Redundancy-Penalized KV Cache Compression via Submodular Marginal Discounting" (method figure, setup
    and slides; the method's equations are not public). With ``s`` one head's scores:

    1. *Hub*: an entry without a strictly larger score in its window and without an equal score at an earlier position
       of the window. Two hubs are at least ``kernel // 2 + 1`` positions apart, and a plateau has one hub per window.
    2. *Discount*: ``q = s`` for hubs, ``discount * s`` for every other entry, near a hub or not.
    3. *Head weight*: ``beta = clip((selectivity / mean selectivity) ** weight_exponent, *weight_clip)``. Selectivity is
       the coefficient of variation (population std / mean); the mean runs over the heads (dim -2) whose scores are not
       all zero. An all-zero head weighs 1; if all heads are flat (selectivity below 1e-5), all weigh 1.
    4. *Gate*: ``z = s + alpha * (beta * q - s)`` with ``alpha = ratio ** gate_exponent``. So every score is multiplied
       by one of two factors per head: ``1 + alpha * (beta - 1)`` for hubs, ``1 - alpha * (1 - discount * beta)`` else.

    Steps 1 (ties, sequence ends), 2 (all non-hubs) and 3 (statistic and its mean) are kvretain's readings where the
    source is silent. Deviation: the source sets protected entries to 1; here they keep their score and the selector
    takes them first.

    Args:
        scores: ``(..., H, N)``, any floating dtype, finite and >= 0 (except where protected). Computed in float32
            (float64 stays float64), returned in its own dtype.
        ratio: fraction of entries *removed*, in [0, 1): a number, or a tensor that broadcasts to ``scores.shape[:-2]``,
            one per row. During decoding that is ``1 - budget / tokens seen``, not the small fraction of one eviction.
        kernel: window width in positions, odd; the window of an entry at position ``p`` holds those at most
            ``kernel // 2`` away from ``p``, and is cut at the sequence's ends.
        discount: factor of non-hubs, in [0, 1]; 0 is hard non-maximum suppression.
        weight_exponent: exponent of the relative selectivity, >= 0.
        weight_clip: smallest and largest head weight.
        gate_exponent: exponent of ``ratio``, >= 0. A ratio of 0 changes nothing, whatever the exponent.
        calibrate: whether heads are weighted; False sets every ``beta`` to 1.
        positions: integers that broadcast to ``scores``, strictly ascending over the entries that are not protected.
            Default: 0 to N-1. A negative position is padding and treated as protected.
        protected: bool, broadcasts to ``scores``. Protected entries keep their score, never count as neighbours and are
            left out of the head statistics.
        neighbours: who is discounted: ``"position"``, every non-hub; or ``"hub"``, only non-hubs within
            ``kernel // 2`` positions of a hub (the abstract's wording; they differ on slopes, where hubs are far).
        selectivity: the statistic of step 3: ``"cv"``, population std / mean; ``"peak"``, max / mean; ``"entropy"``,
            1 - entropy / log(entries) of the scores taken as shares.

    Returns:
        ``(..., H, N)`` refined scores. With a ``ratio`` of 0 that is ``scores`` itself (rows whose ratio is 0 in a
        ratio tensor are bitwise unchanged).

    Raises:
        ValueError: a hyper-parameter or ``ratio`` is out of range, a shape or dtype does not fit, unprotected scores
            are negative or not finite, or unprotected positions do not ascend.

    Example:
        >>> hub_refine(torch.tensor([[0.1, 0.4, 0.9, 0.3, 0.0]]), 0.5, calibrate=False)
        tensor([[0.0875, 0.3500, 0.9000, 0.2625, 0.0000]])
    """
    _check_parameters(kernel, discount, weight_exponent, weight_clip, gate_exponent, calibrate, neighbours, selectivity)
    _check_tensors(scores, positions, protected)
    gate = gate_of("hub_refine", ratio, gate_exponent, scores)

    # Scores >= 0 order like their bit patterns, and masks of -1 and 0 are words of the same width: whole numbers take a
    # fraction of the time that `where` and comparisons take on a CPU.
    precise = scores if scores.dtype == torch.float64 else scores.to(torch.float32)
    whole = torch.int64 if precise.dtype == torch.float64 else torch.int32
    bits = precise.view(whole)
    excluded = None if protected is None else unexpanded(protected)
    gaps = (1, 1)
    if positions is not None and positions.numel():
        positions = unexpanded(positions)
        gaps, padded = _gaps(positions)
        if padded:
            excluded = positions < 0 if excluded is None else (positions < 0) | excluded
    included = None if excluded is None else excluded.to(whole).sub_(1)
    # At 0 an excluded entry beats no positive score, and a zero score is the same whether discounted or not.
    open_bits = bits if included is None else bits & included
    open_scores = open_bits.view(precise.dtype)
    largest = check_scores("hub_refine", open_scores)
    if isinstance(gate, float) and gate == 0.0:
        return scores

    if calibrate:
        weight = _head_weights(open_scores, included, weight_exponent, weight_clip, selectivity)
    else:
        weight = open_scores.new_ones(*scores.shape[:-1], 1)
    hub_factor = 1 + gate * (weight - 1)
    other_factor = 1 - gate * (1 - discount * weight)
    other_factor = (other_factor - hub_factor) + hub_factor
    hub_bits = hub_factor.view(whole)
    swap = hub_bits ^ other_factor.view(whole)
    factor = _beaten(open_bits, kernel // 2, positions, gaps, included, neighbours == "hub")
    if included is None:
        factor.bitwise_and_(swap).bitwise_xor_(hub_bits)
    else:
        # The factor of an excluded entry is 1.
        one = precise.new_ones(()).view(whole)
        factor.bitwise_and_(swap).bitwise_xor_(hub_bits ^ one).bitwise_and_(included).bitwise_xor_(one)
    refined = factor.view(precise.dtype).mul_(precise).to(scores.dtype)
    highest = torch.finfo(scores.dtype).max
    if largest * max(1.0, weight_clip[1]) > highest:  # finite scores stay finite
        refined = torch.where(refined.isinf() & scores.isfinite(), highest, refined)
    return refined


def _gaps(positions: Tensor) -> tuple[tuple[int, int], bool]:
    """The smallest and the largest step of ``positions (..., N)``, and whether some may be padding (negative)."""
    first = positions[..., 0].amin()
    if positions.shape[-1] < 2:
        return (1, 1), bool(first < 0)
    low, high = (positions[..., 1:] - positions[..., :-1]).aminmax()
    lowest, highest, least = torch.stack([low, high, first]).tolist()  # one device synchronisation
    return (lowest, highest), lowest <= 0 or least < 0


def _beaten(
    bits: Tensor, radius: int, positions: Tensor | None, gaps: tuple[int, int], included: Tensor | None, near_hub: bool
) -> Tensor:
    """-1 for entries that are not hubs, else 0 (undefined where ``bits (..., H, N)`` is 0); with ``near_hub``, -1 only
    for those with a hub in their window."""
    lowest, highest = gaps
    # Strictly ascending positions put all neighbours within `radius` slots; padding before them is no obstacle.
    if positions is None or lowest > 0 or bool(((positions.diff() > 0) | (positions[..., :-1] < 0)).all()):
        return _beaten_slots(bits, radius, positions if highest > 1 else None, near_hub)
    # Padding, or protected entries out of order, stand between the others: set them aside.
    assert included is not None
    inside = included.expand(bits.shape) != 0
    slots = pack_index(inside)
    positions = pack(positions, slots)
    later = torch.arange(1, bits.shape[-1], device=bits.device) < inside.sum(-1, keepdim=True)
    if bool(((positions.diff() <= 0) & later).any()):
        raise ValueError("hub_refine: positions must ascend strictly over the entries that are not protected")
    return _beaten_slots(pack(bits, slots), radius, positions, near_hub).gather(-1, slots)


def _beaten_slots(bits: Tensor, radius: int, positions: Tensor | None, near_hub: bool) -> Tensor:
    """:func:`_beaten` when all neighbours lie within ``radius`` slots; slots are the positions if these are None."""
    size = bits.shape[-1]
    pad = min(radius, size - 1)
    if pad < 1:
        return torch.zeros_like(bits)
    padded = bits.new_empty(*bits.shape[:-1], size + 2 * pad)
    padded[..., :pad], padded[..., pad + size :] = 0, 0
    own = padded[..., pad : pad + size]
    torch.clamp(bits, min=0, out=own)  # -0.0 is the least of all whole numbers
    if positions is not None:
        positions = positions.to(bits.dtype)
    largest = _neighbours(padded, pad, radius, positions, 1)
    beaten = torch.sub(own, largest, out=largest).clamp_(-1, 0)
    if not near_hub:
        return beaten
    # A peak of 0 is no hub: there is nothing to be redundant with.
    own &= ~beaten
    return beaten & _neighbours(padded, pad, radius, positions, 0).neg_().clamp_(-1, 0)


def _neighbours(padded: Tensor, pad: int, radius: int, positions: Tensor | None, handicap: int) -> Tensor:
    """The largest of each entry's neighbours, with ``handicap`` added to those at earlier positions (1 makes a tie
    theirs), ``(..., N)``, at least 0; ``padded (..., pad + N + pad)`` are the entries between zeros."""
    size = padded.shape[-1] - 2 * pad
    if positions is None:
        # Maxima over windows of a width that doubles until it is `pad`.
        window, width = padded, 1
        while width < pad:
            step = min(width, pad - width)
            window = torch.maximum(window[..., :-step], window[..., step:])
            width += step
        largest = window[..., :size] + handicap
        return torch.maximum(largest, window[..., pad + 1 :], out=largest)
    own = padded[..., pad : pad + size]
    largest, earlier, until = torch.zeros_like(own), own + handicap, positions + radius
    for offset in range(1, pad + 1):
        near = (positions[..., offset:] - until[..., :-offset]).sub_(1).clamp_(-1, 0)
        front, back = largest[..., :-offset], largest[..., offset:]
        torch.maximum(front, own[..., offset:] & near, out=front)
        torch.maximum(back, earlier[..., :-offset] & near, out=back)
    return largest


def _head_weights(
    scores: Tensor, included: Tensor | None, exponent: float, clip: tuple[float, float], statistic: str
) -> Tensor:
    """Head weights ``(..., H, 1)`` of ``scores (..., H, N)``, which are 0 where the mask ``included`` is 0, not -1."""
    if included is None:
        count = torch.tensor(scores.shape[-1], dtype=scores.dtype, device=scores.device)
    else:
        count = included.sum(-1, keepdim=True, dtype=torch.int32).neg_().to(scores.dtype)
    total = scores.sum(-1, keepdim=True)
    alive = total > 0
    if statistic == "cv":
        relative = (scores / (total / count)).sub_(1)  # dividing first keeps squares in range, whatever the scale
        if included is not None:
            relative.view(included.dtype).bitwise_and_(included)
        selectivity = torch.linalg.vector_norm(relative, dim=-1, keepdim=True) / count.sqrt()
    elif statistic == "peak":
        selectivity = scores.amax(-1, keepdim=True) / (total / count)
    else:
        entropy = torch.special.entr(scores / total).sum(-1, keepdim=True)
        selectivity = 1 - entropy / count.log()
    selectivity = torch.where(alive & (selectivity > _FLAT), selectivity, 0.0)
    typical = selectivity.sum(-2, keepdim=True) / alive.sum(-2, keepdim=True).clamp_min(1)
    weight = (selectivity / typical).pow(exponent).clamp(*clip)
    return torch.where(alive & (typical > 0), weight, 1.0)


def _check_parameters(
    kernel: int,
    discount: float,
    weight_exponent: float,
    weight_clip: tuple[float, float],
    gate_exponent: float,
    calibrate: bool,
    neighbours: str,
    selectivity: str,
) -> None:
    largest = sys.float_info.max
    check_kernel("hub_refine", kernel)
    check_share("hub_refine", "discount", discount)
    if not between(0, weight_exponent, largest):
        raise ValueError(f"hub_refine: weight_exponent must be finite and >= 0, not {weight_exponent!r}")
    pair = isinstance(weight_clip, tuple | list) and len(weight_clip) == 2
    if not pair or not between(0, weight_clip[1], largest) or not between(0, weight_clip[0], weight_clip[1]):
        raise ValueError(f"hub_refine: weight_clip must be (low, high) with 0 <= low <= high, not {weight_clip!r}")
    if not between(0, gate_exponent, largest):
        raise ValueError(f"hub_refine: gate_exponent must be finite and >= 0, not {gate_exponent!r}")
    check_flag("hub_refine", "calibrate", calibrate)
    for name, value, valid in (("neighbours", neighbours, NEIGHBOURS), ("selectivity", selectivity, SELECTIVITY)):
        if value not in valid:
            raise ValueError(f"hub_refine: unknown {name} {value!r}; valid: {', '.join(map(repr, valid))}")


def _check_tensors(scores: Tensor, positions: Tensor | None, protected: Tensor | None) -> None:
    for name, given in (("scores", scores), ("positions", positions), ("protected", protected)):
        if not isinstance(given, Tensor) and (given is not None or name == "scores"):
            raise ValueError(f"hub_refine: {name} must be a tensor, not {type(given).__name__}")
    if scores.ndim < 2 or not scores.is_floating_point():
        raise ValueError(
            f"hub_refine: scores must be floating point of shape (..., H, N), not {scores.dtype} {tuple(scores.shape)}"
        )
    if positions is not None:
        if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise ValueError(f"hub_refine: positions must be integers, not {positions.dtype}")
        _check_broadcast("positions", positions, scores)
    if protected is not None:
        if protected.dtype != torch.bool:
            raise ValueError(f"hub_refine: protected must be bool, not {protected.dtype}")
        _check_broadcast("protected", protected, scores)


def _check_broadcast(name: str, given: Tensor, scores: Tensor) -> None:
    if not broadcasts(given, scores.shape) or given.ndim < 1 or given.shape[-1] != scores.shape[-1]:
        raise ValueError(
            f"hub_refine: {name} of shape {tuple(given.shape)} do not fit scores of shape {tuple(scores.shape)}"
        )


@refiners.register("hub")
@dataclass(frozen=True)
class Hub(Refiner):
    """HubKV as a refiner: :func:`hub_refine` with these hyper-parameters, whose source and readings are stated there.

    Args:
        kernel: window width in positions, odd.
        discount: factor of non-hubs, in [0, 1].
        weight_exponent: exponent of a head's relative selectivity, >= 0.
        weight_clip: smallest and largest head weight.
        gate_exponent: exponent of the ratio, >= 0.
        calibrate: whether heads are weighted.
        neighbours: who is discounted, ``"position"`` or ``"hub"``.
        selectivity: the heads' statistic, ``"cv"``, ``"peak"`` or ``"entropy"``.

    Raises:
        ValueError: a field is out of range.
    """

    kernel: int = 5
    discount: float = 0.5
    weight_exponent: float = 0.5
    weight_clip: tuple[float, float] = (0.8, 1.2)
    gate_exponent: float = 2.0
    calibrate: bool = True
    neighbours: str = "position"
    selectivity: str = "cv"

    def __post_init__(self) -> None:
        _check_parameters(**dataclasses.asdict(self))

    def refine(self, scores: Tensor, ratio: float | Tensor, *, positions: Tensor, protected: Tensor) -> Tensor:
        """Refined scores ``(B, H, N)``; ``ratio`` is a number or ``(B,)``."""
        return hub_refine(scores, ratio, **dataclasses.asdict(self), positions=positions, protected=protected)
