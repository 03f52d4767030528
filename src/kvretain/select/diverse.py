"""α: the best entries that do not repeat what is kept already, by their value vectors."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import check_flag
from ..zscores import standardised
from .base import Selector, selectors
from .signatures import mean_values, unit_signatures
from .topk import select_topk

REDUNDANCY = ("max", "mean")
"""How the cosines to the chosen entries become one number; see :func:`select_diverse`."""

_GRID = 2.0**20
"""Signatures are rounded to multiples of its inverse. Cosines, and sums of thousands of them, are then exact in
float64: the same number in whatever order a device or a batch sums them."""

_TABLE = 1 << 24
"""Most cosines that are held at once, 128 MiB; beyond, each pick computes its own row. Where the kernel picks, rows are
taken in groups that fit, and one row always fits."""


def select_diverse(
    scores: Tensor,
    signatures: Tensor,
    keep: int,
    *,
    weight: float = 0.5,
    protected: Tensor | None = None,
    redundancy: str = "max",
    protected_count_as_chosen: bool = True,
    standardise: bool = False,
) -> Tensor:
    """Indices of ``keep`` entries, picked one after the other by ``score - weight * redundancy``.

    Redundancy is the largest (or the mean) cosine between an entry's signature and those of the entries chosen so far.
    It may be negative: an entry unlike all others gains. While nothing is chosen it is 0, so that the first pick is the
    largest score. Equal values go to the lowest index. ``weight=0`` *is* :func:`select_topk`.

    Source: α (arXiv 2605.14292), whose full text was not available; maximal marginal relevance (Carbonell and Goldstein
    1998) in the space of values. Readings: maximum over the chosen set, scores as they are, protected entries count as
    chosen; the arguments give the others.

    All rows pick at the same time. Signatures are rounded to multiples of 2^-20, so that their cosines are exact in
    float64: the set is the same on every device and in every batch. A row costs ``N * N * D`` products, and ``N`` per
    pick.

    Args:
        scores: ``(..., N)`` float32; -inf marks entries to be chosen only when nothing else is left (padding).
        signatures: ``(..., N, D)``, of unit length or 0, as from :func:`~kvretain.value_signatures`; padding is not
            read.
        keep: entries to keep, protected ones included; 1 to N.
        weight: how much a cosine of 1 costs, in units of the scores; at least 0.
        protected: ``(..., N)`` bool: entries that are kept whatever their score, chosen before all others.
        redundancy: ``"max"`` or ``"mean"``.
        protected_count_as_chosen: whether likeness to a protected entry costs anything.
        standardise: give the scores of each row mean 0 and standard deviation 1 (population, over the entries that are
            neither padding nor protected) before subtracting, so that ``weight`` is in units of their spread.

    Returns:
        ``(..., keep)`` int64, ascending.

    Raises:
        ValueError: ``weight`` is negative or not finite, ``redundancy`` is unknown, a signature is not finite, a shape
            does not fit, or what :func:`select_topk` refuses.

    Example:
        The second entry says what the first says, so the third is taken:

        >>> select_diverse(torch.tensor([1.0, 0.9, 0.6]), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), 2)
        tensor([0, 2])
    """
    _check("select_diverse", weight, redundancy)
    plain = select_topk(scores, keep, protected=protected)  # its errors are ours
    if weight == 0 or plain.numel() == 0:
        return plain
    size = scores.shape[-1]
    if signatures.ndim != scores.ndim + 1 or signatures.shape[:-1] != scores.shape or signatures.is_complex():
        raise ValueError(
            f"select_diverse: signatures must be {tuple(scores.shape)} and one more dimension, "
            f"not {signatures.dtype} {tuple(signatures.shape)}"
        )
    guarded = torch.zeros_like(scores, dtype=torch.bool) if protected is None else protected.expand(scores.shape)
    open_ = ~guarded & (scores > -torch.inf)
    worth = standardised(scores.to(torch.float64), open_) if standardise else scores.to(torch.float64)
    worth = worth.masked_fill(~open_, -torch.inf).reshape(-1, size)
    vectors = signatures.masked_fill(~(open_ | guarded)[..., None], 0.0).reshape(-1, size, signatures.shape[-1])
    if not vectors.isfinite().all():
        raise ValueError("select_diverse: signatures must be finite; check the model's values for NaN")

    flat_guarded, flat_open = guarded.reshape(-1, size), open_.reshape(-1, size)
    room = torch.minimum(keep - flat_guarded.sum(-1), flat_open.sum(-1))
    steps = torch.arange(int(room.max()), device=scores.device)
    if not len(steps):
        return plain
    seeds = flat_guarded if protected_count_as_chosen else torch.zeros_like(flat_guarded)
    order = _picks(worth, vectors, seeds, len(steps), float(weight), redundancy)
    # Rows that were full earlier have gone on picking; an extra column takes what they do not want.
    order = order.masked_fill(steps >= room[:, None], size)
    chosen = torch.zeros(len(worth), size + 1, dtype=torch.bool, device=worth.device).scatter_(-1, order, True)
    return select_topk(scores, keep, protected=chosen[:, :size].reshape(scores.shape) | guarded)


def _picks(worth: Tensor, vectors: Tensor, seeds: Tensor, count: int, weight: float, redundancy: str) -> Tensor:
    """``count`` greedy picks of every row, in order, ``(R, count)``, from ``worth (R, N)``, -inf where closed."""
    if redundancy == "mean":
        return _picks_by_mean(worth, _Products(vectors), seeds, count, weight)
    if (kernel := _kernel(worth)) is None:
        return _picks_by_max(worth, vectors, seeds, count, weight)
    rows = max(1, _TABLE // worth.shape[1] ** 2)
    groups = zip(worth.split(rows), vectors.split(rows), seeds.split(rows), strict=True)
    return torch.cat([_picks_by_max(*group, count, weight, kernel) for group in groups])


def _picks_by_max(
    worth: Tensor, vectors: Tensor, seeds: Tensor, count: int, weight: float, kernel: Any = None
) -> Tensor:
    """As :func:`_picks`, for the largest cosine to the entries chosen; with a ``kernel``, from a table of any size."""
    # Subtraction is monotone in floating point, too: what an entry is worth beside all that are chosen is the least of
    # what it is worth beside each.
    beside = _Products(vectors, worth, weight, whole=kernel is not None)
    now = beside.least(seeds)
    # +inf where nothing is chosen yet: the first pick is by score alone.
    pick = torch.where(now == torch.inf, worth, now).argmax(-1)
    if beside.table is not None:
        return _picks_from(beside.table, now, pick, count, kernel)
    picks = [pick]
    while len(picks) < count:
        # Beside itself, an entry is not chosen again.
        torch.minimum(now, beside.of(pick).scatter_(-1, pick[:, None], -torch.inf), out=now)
        pick = now.argmax(-1)  # the first of equal maxima
        picks.append(pick)
    return torch.stack(picks, -1)


def _picks_from(beside: Tensor, now: Tensor, pick: Tensor, count: int, kernel: Any = None) -> Tensor:
    """Picks ``(R, count)``, of which ``pick (R,)`` is the first: after each, ``now (R, N)`` falls to what entries are
    worth beside it, row ``pick`` of ``beside (R, N, N)``, where that is less; the largest is next."""
    beside.diagonal(dim1=1, dim2=2).fill_(-torch.inf)  # beside itself, an entry is not chosen again
    if kernel is not None:
        return kernel.picks_from(beside, now, pick, count)
    rows, size = now.shape
    if rows == 1 and now.device.type == "cpu":
        # Plain numbers index a list faster than tensors index a tensor.
        own, others, picks = now[0], beside[0].unbind(), pick.tolist()
        while len(picks) < count:
            torch.minimum(own, others[picks[-1]], out=own)
            picks.append(own.argmax().item())
        return torch.tensor([picks])
    flat, first = beside.flatten(0, 1), torch.arange(0, rows * size, size, device=now.device)
    order = pick.expand(count, -1).clone()
    index, found = torch.empty_like(first), torch.empty_like(now)
    for last, following in itertools.pairwise(order.unbind()):
        torch.add(first, last, out=index)
        torch.index_select(flat, 0, index, out=found)
        torch.minimum(now, found, out=now)
        torch.argmax(now, -1, out=following)  # the first of equal maxima
    return order.T


def _picks_by_mean(worth: Tensor, cosines: _Products, seeds: Tensor, count: int, weight: float) -> Tensor:
    """As :func:`_picks`, for the mean cosine to the entries chosen."""
    plain, picks = worth.clone(), []
    total, chosen = cosines.total(seeds), seeds.sum(-1, keepdim=True)
    for step in range(count):
        pick = (plain - weight * (total / (chosen + step).clamp_min(1))).argmax(-1)
        picks.append(pick)
        plain.scatter_(-1, pick[:, None], -torch.inf)
        total += cosines.of(pick)
    return torch.stack(picks, -1)


def _kernel(worth: Tensor) -> Any:
    """:mod:`._picking`, if it can pick for ``worth (R, N)``: on a GPU, with Triton, rows that are not too wide."""
    kernel = _triton() if worth.is_cuda else None
    return kernel if kernel is not None and worth.shape[1] <= kernel.WIDEST else None


@functools.cache
def _triton() -> Any:
    """:mod:`._picking`, if Triton is installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from . import _picking

    return _picking


class _Products:
    """Inner products of each row's ``vectors (R, N, D)``; with ``worth (R, N)``, what each entry is worth beside
    another, ``worth - weight * product``. As a table ``(R, N, N)`` if it is small enough, or ``whole``."""

    def __init__(
        self, vectors: Tensor, worth: Tensor | None = None, weight: float = 1.0, *, whole: bool = False
    ) -> None:
        self.vectors = vectors.to(torch.float64).mul_(_GRID).round_().div_(_GRID)
        self.worth, self.weight = worth, weight
        rows, size, _ = vectors.shape
        self.first = torch.arange(0, rows * size, size, device=vectors.device)
        self.table = self._with(self.vectors) if whole or rows * size * size <= _TABLE else None

    def _with(self, others: Tensor) -> Tensor:
        """Rows ``(R, n, N)`` of the table for ``others (R, n, D)``."""
        if others.device.type != "cpu" or others.shape[1] == 1:
            products = torch.bmm(others, self.vectors.transpose(1, 2))
            return products if self.worth is None else products.mul_(-self.weight).add_(self.worth[:, None])
        # On a CPU core one product after the other takes half the time; both are exact.
        products = others.new_empty(*others.shape[:2], self.vectors.shape[1])
        for row, product in enumerate(products):
            torch.mm(others[row], self.vectors[row].T, out=product)
            if self.worth is not None:
                product.mul_(-self.weight).add_(self.worth[row])
        return products

    def of(self, pick: Tensor) -> Tensor:
        """Row ``pick (R,)`` of each table, ``(R, N)``."""
        index = self.first + pick
        if self.table is not None:
            return self.table.flatten(0, 1).index_select(0, index)
        return self._with(self.vectors.flatten(0, 1).index_select(0, index)[:, None])[:, 0]

    def least(self, seeds: Tensor) -> Tensor:
        """The least over the table's rows at ``seeds (R, N)``, ``(R, N)``; +inf where there is none."""
        least = torch.full(seeds.shape, torch.inf, dtype=torch.float64, device=seeds.device)
        for part, some in self._blocks(seeds):
            torch.minimum(least, part.masked_fill(~some[..., None], torch.inf).amin(1), out=least)
        return least

    def total(self, seeds: Tensor) -> Tensor:
        """The sum over the table's rows at ``seeds (R, N)``, ``(R, N)``."""
        total = torch.zeros(seeds.shape, dtype=torch.float64, device=seeds.device)
        for part, some in self._blocks(seeds):
            total += part.masked_fill(~some[..., None], 0.0).sum(1)
        return total

    def _blocks(self, seeds: Tensor, block: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
        """Stretches of the tables' rows that hold seeds, and which of them are seeds."""
        for number in sorted({entry // block for entry in seeds.any(0).nonzero()[:, 0].tolist()}):
            stretch = slice(number * block, (number + 1) * block)
            part = self._with(self.vectors[:, stretch]) if self.table is None else self.table[:, stretch]
            yield part, seeds[:, stretch]


def _check(owner: str, weight: object, redundancy: object) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"{owner}: weight must be a number of at least 0, not {weight!r}")
    if redundancy not in REDUNDANCY:
        raise ValueError(f"{owner}: unknown redundancy {redundancy!r}; valid: {', '.join(REDUNDANCY)}")


@selectors.register("diverse")
@dataclass(frozen=True)
class Diverse(Selector):
    """α's selection: large scores, minus likeness to what is chosen; see :func:`select_diverse`.

    Source: α (arXiv 2605.14292). What is compared are mean value vectors: over all layers and heads for the scope
    ``model`` (α's own), over the layer's heads for ``layer``, over layers for ``aligned``, each head's own for
    ``head``. Only ``model`` is the paper's; the others are kvretain's extension.

    Args:
        weight: cost of a cosine of 1, in units of the scores; 0 is top-k, 0.5 the paper's choice on top of TriAttention
            scores.
        redundancy: ``"max"`` or ``"mean"`` over the chosen entries.
        centre: subtract the mean over the row's entries before comparing, without which a component that all share
            makes the penalty nearly the same for all.
        standardise: scores in units of their spread, see :func:`select_diverse`; for scorers whose scores are not of
            order 1, such as attention weights.
        protected_count_as_chosen: whether likeness to sinks, recent window or prompt costs anything.
        normalise_heads: unit length for each head's vector before the mean.
        space: ``"values"``, or ``"keys"``: rotated keys in their place, one of the rejected mechanisms of α's family
            "Scoring" (whose definitions are not public; R-KV's redundancy is in key space as well).

    Raises:
        ValueError: a field is out of range.
    """

    needs_values: ClassVar[bool] = True

    weight: float = 0.5
    redundancy: str = "max"
    centre: bool = False
    standardise: bool = False
    protected_count_as_chosen: bool = True
    normalise_heads: bool = False
    space: str = "values"

    def __post_init__(self) -> None:
        _check("diverse", self.weight, self.redundancy)
        if self.space not in ("values", "keys"):
            raise ValueError(f"diverse: unknown space {self.space!r}; valid: values, keys")
        for name in ("centre", "standardise", "protected_count_as_chosen", "normalise_heads"):
            check_flag("diverse", name, getattr(self, name))

    def mean_values(self, values: Sequence[Tensor]) -> Tensor:
        """The mean over layers and heads, see :func:`kvretain.select.signatures.mean_values`."""
        return mean_values(values, normalise_heads=self.normalise_heads)

    def select(
        self,
        scores: Tensor,
        keep: int,
        *,
        protected: Tensor,
        positions: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Indices ``(..., keep)`` int64, ascending; ``positions`` only say what is padding (-1)."""
        if values is None:
            raise ValueError("the selector 'diverse' compares value vectors: give values=")
        real = (scores > -torch.inf) | protected
        if positions is not None:
            real = real & (positions >= 0)
        return select_diverse(
            scores.masked_fill(~real, -torch.inf),
            unit_signatures(values, centre=self.centre, valid=real),
            keep,
            weight=self.weight,
            protected=protected,
            redundancy=self.redundancy,
            protected_count_as_chosen=self.protected_count_as_chosen,
            standardise=self.standardise,
        )
