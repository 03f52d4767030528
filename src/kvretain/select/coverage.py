"""Coverage: greedy choice of the set that covers the context best, the slow oracle behind HubKV's one-pass discount.

The objective is facility location, ``F(S) = sum_x max_{j in S} w[x, j]`` with ``w >= 0`` and ``F({}) = 0``: every place
``x`` is served by the chosen entry that serves it best. :func:`select_coverage` works on any ``w``; the selectors
:class:`Greedy` and :class:`StochasticGreedy` build a local ``w`` from scores, which is banded, and never store it.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..scores.random import _mix, _shift, _signed
from ..slots import pack, pack_index
from .base import Selector, selectors
from .topk import select_topk

METHODS = ("greedy", "lazy", "stochastic")
"""Ways to maximise the coverage; see :func:`greedy_path`."""

SHAPES = ("box", "triangle")
"""Shapes of a local kernel; see :func:`kvretain.theory.local_kernel`."""


def coverage(kernel_matrix: Tensor, chosen: Tensor | Sequence[int]) -> Tensor:
    """``F(S) = sum_x max_{j in S} w[x, j]``, and 0 for the empty set.

    Args:
        kernel_matrix: ``w (X, N)``, finite and >= 0.
        chosen: indices ``(..., K)`` into the N entries, one set per leading index; repetitions change nothing.

    Returns:
        ``(...)`` float64.

    Raises:
        ValueError: a weight is negative or not finite, an index is out of range, or a shape or dtype does not fit.

    Example:
        >>> coverage(torch.tensor([[1.0, 0.5], [0.0, 2.0]]), [0, 1])
        tensor(3., dtype=torch.float64)
    """
    weights = check_weights("coverage", kernel_matrix)
    indices = check_indices("coverage", chosen, len(weights))
    if indices.shape[-1] == 0:
        return torch.zeros(indices.shape[:-1], dtype=torch.float64, device=kernel_matrix.device)
    return _total(weights[indices].amax(-2)).to(kernel_matrix.device)


def select_coverage(
    kernel_matrix: Tensor,
    keep: int,
    *,
    method: str = "greedy",
    epsilon: float = 0.1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Indices of ``keep`` entries that together cover much: each step adds the entry that adds most to ``F``.

    :func:`greedy_path` with the same arguments also tells the order, the gains and the number of evaluations.

    Args:
        kernel_matrix: ``w (X, N)``, finite and >= 0: how well entry ``j`` serves place ``x``.
        keep: entries to choose, 1 to N.
        method: ``"greedy"``, ``"lazy"`` (the same set, far fewer evaluations) or ``"stochastic"``.
        epsilon: for ``"stochastic"``, in (0, 1).
        generator: for ``"stochastic"``, on the CPU; default: one seeded with 0.

    Returns:
        ``(keep,)`` int64, ascending.

    Raises:
        ValueError: an argument is out of range or a weight negative or not finite.

    Example:
        Two entries that serve the same place are redundant, so the second best entry alone is not taken:

        >>> select_coverage(torch.tensor([[3.0, 2.9, 0.0], [0.0, 0.0, 1.0]]), 2)
        tensor([0, 2])
    """
    return greedy_path(kernel_matrix, keep, method=method, epsilon=epsilon, generator=generator).order.sort().values


@dataclass(frozen=True)
class GreedyPath:
    """What a greedy run did.

    Attributes:
        order: ``(keep,)`` int64, the entries in the order in which they were chosen.
        gains: ``(keep,)`` float64, what each of them added to ``F``.
        evaluations: marginal gains that were computed.
    """

    order: Tensor
    gains: Tensor
    evaluations: int


def greedy_path(
    kernel_matrix: Tensor,
    keep: int,
    *,
    method: str = "greedy",
    epsilon: float = 0.1,
    generator: torch.Generator | None = None,
) -> GreedyPath:
    """The run behind :func:`select_coverage`, same arguments and errors.

    - ``"greedy"`` (Nemhauser, Wolsey, Fisher 1978) computes every remaining gain at every step; equal gains go to the
      lowest index. ``F(S) >= (1 - 1/e) * optimum``.
    - ``"lazy"`` (Minoux 1978) recomputes a gain only while its old value, an upper bound by submodularity, is the
      largest. The result is the same to the bit, ties included.
    - ``"stochastic"`` (Mirzasoleiman et al. 2015) takes the best of ``ceil(N / keep * ln(1 / epsilon))`` random
      remaining entries at each step. ``E[F(S)] >= (1 - 1/e - epsilon) * optimum``.

    Computed in float64 on the CPU. Sums run in one fixed order, so that a gain is the same number whoever computes it
    and never rises as the set grows: that makes lazy exact in floating point too, and the result independent of the
    device.
    """
    keep = _whole(keep)
    if method not in METHODS:
        raise ValueError(f"select_coverage: unknown method {method!r}; valid: {', '.join(METHODS)}")
    _check_epsilon("select_coverage", epsilon)
    weights = check_weights("select_coverage", kernel_matrix)
    if not 1 <= keep <= len(weights):
        raise ValueError(
            f"select_coverage: keep must be a whole number from 1 to the {len(weights)} entries there are, not {keep}"
        )
    if method == "greedy":
        order, gains, evaluations = _exact(weights, keep)
    elif method == "lazy":
        order, gains, evaluations = _lazy(weights, keep)
    else:
        order, gains, evaluations = _stochastic(weights, keep, epsilon, generator)
    device = kernel_matrix.device
    return GreedyPath(
        torch.tensor(order, device=device), torch.tensor(gains, dtype=torch.float64, device=device), evaluations
    )


_Run = tuple[list[int], list[float], int]


def _exact(weights: Tensor, keep: int) -> _Run:
    cover = weights.new_zeros(weights.shape[1])
    chosen = torch.zeros(len(weights), dtype=torch.bool)
    order: list[int] = []
    gains: list[float] = []
    for _ in range(keep):
        best, index = _gains(weights, cover).masked_fill(chosen, -1.0).max(0)  # the first of equal maxima
        order.append(int(index))
        gains.append(float(best))
        chosen[index] = True
        cover = torch.maximum(cover, weights[index])
    return order, gains, keep * len(weights) - keep * (keep - 1) // 2


def _lazy(weights: Tensor, keep: int) -> _Run:
    cover = weights.new_zeros(weights.shape[1])
    # (-gain, index, step at which it was computed): of equal gains the lowest index is on top, so it is refreshed, and
    # if it holds its gain chosen, first.
    heap = [(-gain, index, 0) for index, gain in enumerate(_gains(weights, cover).tolist())]
    heapq.heapify(heap)
    evaluations = len(weights)
    order: list[int] = []
    gains: list[float] = []
    for step in range(keep):
        while heap[0][2] < step:
            index = heap[0][1]
            heapq.heapreplace(heap, (-float(_gains(weights[index], cover)), index, step))
            evaluations += 1
        gain, index, _ = heapq.heappop(heap)
        order.append(index)
        gains.append(-gain)
        cover = torch.maximum(cover, weights[index])
    return order, gains, evaluations


def _stochastic(weights: Tensor, keep: int, epsilon: float, generator: torch.Generator | None) -> _Run:
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    size = math.ceil(len(weights) / keep * math.log(1 / epsilon))
    cover = weights.new_zeros(weights.shape[1])
    rest = torch.arange(len(weights))
    order: list[int] = []
    gains: list[float] = []
    evaluations = 0
    for _ in range(keep):
        drawn = rest[torch.randperm(len(rest), generator=generator)[:size].sort().values]
        best, at = _gains(weights[drawn], cover).max(0)
        index = int(drawn[at])
        evaluations += len(drawn)
        order.append(index)
        gains.append(float(best))
        rest = rest[rest != index]
        cover = torch.maximum(cover, weights[index])
    return order, gains, evaluations


def _gains(weights: Tensor, cover: Tensor) -> Tensor:
    """What entries with ``weights (..., X)`` add to a set that covers ``cover (X,)``."""
    return _total((weights - cover).clamp_min_(0))


def _total(values: Tensor) -> Tensor:
    """Sum over the last dimension, by halving: one order whatever the batch and the device. Overwrites ``values``.

    Rounding is monotone, hence so is this sum in each of its terms, which a library reduction does not promise.
    """
    while (size := values.shape[-1]) > 1:
        half = (size + 1) // 2
        values[..., : size - half] += values[..., half:]
        values = values[..., :half]
    return values.sum(-1)


def check_weights(owner: str, kernel_matrix: Tensor) -> Tensor:
    """``kernel_matrix (X, N)`` as ``(N, X)`` float64 on the CPU, contiguous, or a ``ValueError`` from ``owner``."""
    if kernel_matrix.ndim != 2 or kernel_matrix.is_complex() or kernel_matrix.dtype == torch.bool:
        raise ValueError(
            f"{owner}: kernel_matrix must be real of shape (X, N), "
            f"not {kernel_matrix.dtype} {tuple(kernel_matrix.shape)}"
        )
    weights = kernel_matrix.detach().to("cpu", torch.float64).T.contiguous()
    bad = weights[~(weights.isfinite() & (weights >= 0))]
    if len(bad):
        raise ValueError(f"{owner}: weights must be finite and >= 0, but one is {bad[0].item()}")
    return weights


def check_indices(owner: str, chosen: Tensor | Sequence[int], size: int) -> Tensor:
    """``chosen (..., K)`` as int64 on the CPU, or a ``ValueError`` that names ``owner``."""
    indices = chosen if isinstance(chosen, Tensor) else torch.tensor(chosen)
    if indices.numel() == 0:
        return indices.to("cpu", torch.int64)
    if indices.ndim < 1 or indices.dtype == torch.bool or indices.is_floating_point() or indices.is_complex():
        raise ValueError(
            f"{owner}: chosen must be integer indices of shape (..., K), not {indices.dtype} {tuple(indices.shape)}"
        )
    outside = indices[(indices < 0) | (indices >= size)]
    if len(outside):
        raise ValueError(f"{owner}: chosen must be from 0 to {size - 1}, but one is {outside[0].item()}")
    return indices.to("cpu", torch.int64)


def _whole(keep: int) -> int:
    try:
        if not isinstance(keep, bool):
            return operator.index(keep)
    except TypeError:
        pass
    raise ValueError(f"select_coverage: keep must be a whole number, not {keep!r}")


def _check_epsilon(owner: str, epsilon: object) -> None:
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
        raise ValueError(f"{owner}: epsilon must be in (0, 1), not {epsilon!r}")


# --- the selectors: a banded w from scores ----------------------------------------------------------


def bump(distance: Tensor, kernel: int, shape: str) -> Tensor:
    """Local kernel at integer ``distance``, float64, in whole numbers (not normalised): 1 or 0, or 1-2-..-2-1."""
    height = kernel // 2 + 1 - distance.abs().to(torch.float64)
    return height.clamp_(0, 1 if shape == "box" else None)


def check_local(owner: str, kernel: object, shape: object) -> None:
    """Raise ``ValueError`` unless ``kernel`` is odd and ``shape`` one of :data:`SHAPES`."""
    if isinstance(kernel, bool) or not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"{owner}: kernel must be an odd whole number of at least 1, not {kernel!r}")
    if shape not in SHAPES:
        raise ValueError(f"{owner}: unknown shape {shape!r}; valid: {', '.join(SHAPES)}")


@selectors.register("greedy")
@dataclass(frozen=True)
class Greedy(Selector):
    """Full greedy on the coverage that the scores themselves span: HubKV's "oracle", too slow for inference.

    Source: HubKV's slides name full greedy only; the objective is kvretain's reading of "score-weighted local
    coverage": ``w[x, j] = s_j * K(x - p_j)`` over all positions ``x``, with ``K`` a box or triangle of width
    ``kernel`` and sum 1, so that an entry alone is worth its score, ``F({i}) = s_i``. Distances are between original
    positions; each row and head chooses for itself.

    Protected entries are chosen first and count as chosen, at the scores they have. Signed scores are shifted by the
    least unprotected one, so that this one is worth 0. Equal gains go to the lowest position. Once no entry adds
    anything, the rest of the budget goes to the largest scores. With ``kernel=1`` this is top-k.

    Args:
        kernel: width of ``K`` in positions, odd.
        shape: ``"triangle"`` (1-2-3-2-1 at width 5) or ``"box"``.

    Raises:
        ValueError: a field is out of range.
    """

    kernel: int = 5
    shape: str = "triangle"

    def __post_init__(self) -> None:
        check_local("greedy", self.kernel, self.shape)

    def select(self, scores: Tensor, keep: int, *, protected: Tensor, positions: Tensor | None = None) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending; ``positions`` default to 0 to N-1."""
        return _select_local(scores, keep, protected, positions, self.kernel, self.shape, None)


@selectors.register("stochastic")
@dataclass(frozen=True)
class StochasticGreedy(Selector):
    """Stochastic greedy on the same objective as :class:`Greedy`: each step takes the best of a few random entries.

    Source: Mirzasoleiman et al. 2015, named in HubKV's slides as nearer to the oracle but no better overall. With ``n``
    unprotected entries and ``k`` places for them, each step draws ``ceil(n / k * ln(1 / epsilon))`` of the remaining
    ones. Deviations: with replacement (their bound on the miss probability is the same), and a draw that adds nothing
    leaves its place to the largest scores.

    Draws are hashes of (seed, head, step): the same on every device, in every row and layer.

    Args:
        kernel: width of ``K`` in positions, odd.
        shape: ``"triangle"`` or ``"box"``.
        epsilon: in (0, 1); smaller draws more.
        seed: any whole number of at least 0.

    Raises:
        ValueError: a field is out of range.
    """

    kernel: int = 5
    shape: str = "triangle"
    epsilon: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_local("stochastic", self.kernel, self.shape)
        _check_epsilon("stochastic", self.epsilon)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"stochastic: seed must be a whole number of at least 0, not {self.seed!r}")

    def select(self, scores: Tensor, keep: int, *, protected: Tensor, positions: Tensor | None = None) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending; ``positions`` default to 0 to N-1."""
        draw = (self.epsilon, self.seed)
        return _select_local(scores, keep, protected, positions, self.kernel, self.shape, draw)


def _select_local(
    scores: Tensor,
    keep: int,
    protected: Tensor,
    positions: Tensor | None,
    kernel: int,
    shape: str,
    draw: tuple[float, int] | None,
) -> Tensor:
    """Greedy picks of every row, the rest by score; ``draw`` is ``(epsilon, seed)`` of the stochastic variant."""
    if positions is None:
        positions = torch.arange(scores.shape[-1], device=scores.device)
        real = scores > -torch.inf
    else:
        positions = positions.to(torch.int64)
        real = positions >= 0
        scores = scores.masked_fill(~(real | protected), -torch.inf)
    select_topk(scores, keep, protected=protected)  # its errors are ours
    size = scores.shape[-1]
    open_ = (real & ~protected & (scores > -torch.inf)).expand(scores.shape)
    worth = scores.to(torch.float64)
    shift = worth.masked_fill(~open_, 0.0).amin(-1, keepdim=True).clamp_max(0)
    worth = (worth - shift).nan_to_num(0.0, neginf=0.0).clamp_min_(0)

    # Real entries side by side, so that all within reach of each other are within `kernel - 1` slots.
    real = (open_ | (protected & (positions >= 0))).reshape(-1, size)
    slots = pack_index(real)
    packed = [pack(t.expand(scores.shape).reshape(-1, size), slots) for t in (worth, open_, protected, positions)]
    inside = torch.arange(size, device=scores.device) < real.sum(-1, keepdim=True)
    worth, open_, shut, places = packed
    if bool(((places.diff() <= 0) & inside[:, 1:]).any()):
        raise ValueError("positions must ascend strictly over the entries that are not padding")
    picks = _Picks(worth, open_, shut & inside, places.masked_fill(~inside, 1 << 60), kernel, shape)
    heads = scores.shape[-2] if scores.ndim > 1 else 1
    room = keep - protected.expand(scores.shape).sum(-1).flatten()
    chosen = picks.run(room, heads, draw).gather(-1, slots).view(scores.shape)
    return select_topk(scores, keep, protected=protected | chosen)


class _Picks:
    """Greedy picks in ``R`` rows at once. The band of ``w`` around each entry is all that its gain depends on."""

    def __init__(self, worth: Tensor, open_: Tensor, shut: Tensor, places: Tensor, kernel: int, shape: str) -> None:
        self.kernel, self.shape, self.size = kernel, shape, worth.shape[-1]
        self.reach = kernel - 1
        pad = (self.reach, self.reach)
        self.worth = torch.nn.functional.pad(worth.masked_fill(~(open_ | shut), 0.0), pad)
        self.places = torch.nn.functional.pad(places, pad, value=-(1 << 60))
        self.steps = torch.arange(kernel, device=worth.device) - kernel // 2
        self.cover = self._shadow(torch.nn.functional.pad(shut, pad))
        own = bump(self.steps, kernel, shape)
        gain = _total((self.worth[..., None] * own - self.cover).clamp_min_(0))
        self.gain = gain.masked_fill(~torch.nn.functional.pad(open_, pad), -1.0)

    def _shadow(self, shut: Tensor) -> Tensor:
        """``(R, L, kernel)``: how well protected entries cover the cells around each entry."""
        cover = self.worth.new_zeros(*self.worth.shape, self.kernel)
        if not bool(shut.any()):
            return cover
        length = self.worth.shape[-1]
        for offset in range(-self.reach, self.reach + 1):
            here = slice(max(0, -offset), length - max(0, offset))
            there = slice(max(0, offset), length + min(0, offset))
            apart = self.places[:, here] - self.places[:, there]
            lent = bump(apart[..., None] + self.steps, self.kernel, self.shape)
            lent *= (self.worth[:, there] * shut[:, there])[..., None]
            cover[:, here] = torch.maximum(cover[:, here], lent)
        return cover

    def run(self, room: Tensor, heads: int, draw: tuple[float, int] | None) -> Tensor:
        """``(R, N)`` bool: up to ``room (R,)`` picks per row, none that adds nothing."""
        chosen = torch.zeros_like(self.gain, dtype=torch.bool)
        sample = None if draw is None else _Sample(self.gain >= 0, room, heads, *draw)
        for step in range(int(room.max()) if room.numel() else 0):
            if sample is None:
                gain, slot = self.gain.max(-1)  # the first of equal maxima
            else:
                gain, slot = sample.best(self.gain, step)
            active = (gain > 0) & (step < room)
            if sample is not None:
                sample.remove(slot, active)
            elif not bool(active.any()):
                break
            chosen |= torch.zeros_like(chosen).scatter_(-1, slot[:, None], active[:, None])
            self._add(slot, active)
        return chosen[:, self.reach : self.reach + self.size]

    def _add(self, slot: Tensor, active: Tensor) -> None:
        """Count ``slot (R,)`` as chosen in the ``active (R,)`` rows."""
        slot = slot[:, None]
        near = slot + torch.arange(-self.reach, self.reach + 1, device=slot.device)
        near = near.clamp(0, self.worth.shape[-1] - 1)
        apart = self.places.gather(-1, near) - self.places.gather(-1, slot)
        lent = bump(apart[..., None] + self.steps, self.kernel, self.shape)
        lent *= (self.worth.gather(-1, slot) * active[:, None])[..., None]
        band = near[..., None].expand(-1, -1, self.kernel)
        cover = torch.maximum(self.cover.gather(1, band), lent)
        self.cover.scatter_(1, band, cover)
        own = self.worth.gather(-1, near)[..., None] * bump(self.steps, self.kernel, self.shape)
        before = self.gain.gather(-1, near)
        after = torch.where(before < 0, before, _total((own - cover).clamp_min_(0)))
        after = after.masked_fill((near == slot) & active[:, None], -2.0)
        self.gain.scatter_(-1, near, after)


class _Sample:
    """The random candidates of each step."""

    def __init__(self, open_: Tensor, room: Tensor, heads: int, epsilon: float, seed: int) -> None:
        device = open_.device
        # Remaining slots of each row stand in front of `rest`.
        slots = torch.arange(open_.shape[-1], device=device).expand(open_.shape)
        self.rest = pack(slots, pack_index(open_))
        self.count = open_.sum(-1)
        self.drawn = (self.count / room.clamp_min(1) * math.log(1 / epsilon)).ceil().long().clamp_min(1)
        head = torch.arange(len(open_), device=device) % heads
        self.state = _mix(_mix(torch.tensor(_signed(seed), device=device), 1), head)

    def best(self, gains: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The largest gain drawn ``(R,)`` and its slot, the lowest of equals; -1 where nothing remains."""
        number = torch.arange(int(self.drawn.max()), device=gains.device)
        bits = _shift(_mix(_mix(self.state, step)[:, None], number), 1)
        self.at = bits % self.count[:, None].clamp_min(1)
        slots = self.rest.gather(-1, self.at)
        drawn = gains.gather(-1, slots).masked_fill((number >= self.drawn[:, None]) | (self.count == 0)[:, None], -1.0)
        best = drawn.amax(-1)
        return best, slots.masked_fill(drawn < best[:, None], gains.shape[-1]).amin(-1)

    def remove(self, slot: Tensor, active: Tensor) -> None:
        """Take ``slot (R,)`` out of the ``active (R,)`` rows' remaining ones."""
        here = (self.rest.gather(-1, self.at) == slot[:, None]).to(torch.int8).argmax(-1, keepdim=True)
        hole = self.at.gather(-1, here)
        last = self.rest.gather(-1, (self.count - 1).clamp_min(0)[:, None])
        self.rest.scatter_(-1, hole, torch.where(active[:, None], last, self.rest.gather(-1, hole)))
        self.count = self.count - active.long()
