"""Greedy selection on the coverage of scores spread over their neighbourhoods, without building a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import check_kernel, check_whole
from ..hashing import mix, shift, signed
from ..slots import pack, pack_index
from .base import Selector, selectors
from .coverage import check_epsilon, total
from .topk import select_topk

SHAPES = ("box", "triangle")
"""Shapes of a local kernel; see :func:`kvretain.theory.local_kernel`."""


def bump(distance: Tensor, kernel: int, shape: str) -> Tensor:
    """Local kernel at integer ``distance``, float64, in whole numbers (not normalised): 1 or 0, or 1-2-..-2-1."""
    height = kernel // 2 + 1 - distance.abs().to(torch.float64)
    return height.clamp_(0, 1 if shape == "box" else None)


def check_local(owner: str, kernel: object, shape: object) -> None:
    """Raise ``ValueError`` unless ``kernel`` is odd and ``shape`` one of :data:`SHAPES`."""
    check_kernel(owner, kernel)
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

    def select(
        self,
        scores: Tensor,
        keep: int,
        *,
        protected: Tensor,
        positions: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending; ``positions`` default to 0 to N-1, ``values`` are not read."""
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
        check_epsilon("stochastic", self.epsilon)
        check_whole("stochastic", "seed", self.seed, 0)

    def select(
        self,
        scores: Tensor,
        keep: int,
        *,
        protected: Tensor,
        positions: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending; ``positions`` default to 0 to N-1, ``values`` are not read."""
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
        gain = total((self.worth[..., None] * own - self.cover).clamp_min_(0))
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
        after = torch.where(before < 0, before, total((own - cover).clamp_min_(0)))
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
        self.state = mix(mix(torch.tensor(signed(seed), device=device), 1), head)

    def best(self, gains: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The largest gain drawn ``(R,)`` and its slot, the lowest of equals; -1 where nothing remains."""
        number = torch.arange(int(self.drawn.max()), device=gains.device)
        bits = shift(mix(mix(self.state, step)[:, None], number), 1)
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
