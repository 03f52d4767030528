"""What the figures measure, as pure functions on scores. No model, no files.

Scores are those of the entries that compete: sinks and the recent window are cut off, so the last axis is a stretch of
``M`` consecutive positions. Leading axes are free (layers, heads).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..refine import Refiner, refiners
from ..select import select_topk
from ..select.signatures import unit_signatures

RULES = ("top-k", "hard NMS", "SMD", "random")
"""What :func:`kept_by` can choose by: plain scores, the refiners ``nms`` and ``smd``, and the dice."""

SIGNATURES = {"mean of all heads": False, "mean of unit vectors": True}
"""α's signatures by name: whether each head's value vector is normalised before the mean."""

FEWEST = 128
"""Fewest tokens that can be observed: enough for all lags and a few segments."""


def coverage_curve(scores: Tensor, radius: int) -> Tensor:
    """``C(K)``: the share of positions within ``radius`` of one of the ``K`` best entries, for ``K = 0 ... M``.

    Entries are taken by falling score, equal scores from the lowest position on, as :func:`~kvretain.select_topk` does.

    Args:
        scores: ``(..., M)``.
        radius: largest distance that still counts as covered, at least 0.

    Returns:
        ``(..., M + 1)`` float64, from 0 to 1, rising.
    """
    size = scores.shape[-1]
    rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    # A position is covered once the best entry of its surroundings has been taken.
    padded = torch.nn.functional.pad(rank, (radius, radius), value=size)
    covered_at = padded.unfold(-1, 2 * radius + 1, 1).amin(-1) + 1
    newly = torch.zeros(*scores.shape[:-1], size + 1, dtype=torch.float64, device=scores.device)
    newly.scatter_add_(-1, covered_at, torch.ones_like(covered_at, dtype=torch.float64))
    return newly.cumsum(-1) / size


def marginal_gains(curve: Tensor, step: int) -> Tensor:
    """``C(K + step) - C(K)`` at ``K = 0, step, 2 step, ...`` of ``curve (..., M + 1)``, as far as whole steps go."""
    return curve[..., ::step].diff(dim=-1)


def shuffled(scores: Tensor, generator: torch.Generator) -> Tensor:
    """``scores (..., M)`` with positions permuted, the same way for all heads.

    That destroys where scores stand and nothing else: the values of each head and what heads have in common stay, so
    the spread of a mean over heads is that of the real scores.
    """
    order = torch.randperm(scores.shape[-1], generator=generator)
    return scores[..., order.to(scores.device)]


def autocorrelation(scores: Tensor, lags: int) -> Tensor:
    """``sum_i (s_i - m)(s_{i+lag} - m) / sum_i (s_i - m)^2`` for ``lag = 1 ... lags``, ``m`` the mean of all ``M``.

    Args:
        scores: ``(..., M)``.
        lags: the largest lag, below ``M``.

    Returns:
        ``(..., lags)`` float64; 0 where all scores are equal.
    """
    centred = scores.to(torch.float64)
    centred = centred - centred.mean(-1, keepdim=True)
    total = centred.square().sum(-1)
    products = [(centred[..., :-lag] * centred[..., lag:]).sum(-1) for lag in range(1, lags + 1)]
    constant = (scores == scores[..., :1]).all(-1, keepdim=True)
    return (torch.stack(products, -1) / total[..., None]).masked_fill(constant, 0.0)


def permutation_band(
    scores: Tensor, lags: int, *, permutations: int, generator: torch.Generator, level: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Where the autocorrelation's mean over heads lies, with probability ``level`` per lag, if position means nothing.

    Returns:
        Low and high quantile over ``permutations`` of :func:`shuffled` scores, ``(lags,)`` each.
    """
    draws = [autocorrelation(shuffled(scores, generator), lags).reshape(-1, lags).mean(0) for _ in range(permutations)]
    tail = (1 - level) / 2
    low, high = torch.stack(draws).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    return low, high


def refined_by(rule: str, scores: Tensor, keep: int) -> Tensor:
    """``scores (L, H, M)`` as ``rule`` ("top-k", "hard NMS" or "SMD") sees them when ``keep`` of ``M`` stay."""
    if rule == "top-k":
        return scores
    refiner: Refiner = refiners[{"hard NMS": "nms", "SMD": "smd"}[rule]]()
    positions = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
    open_ = torch.zeros_like(scores, dtype=torch.bool)
    return refiner.refine(scores, 1 - keep / scores.shape[-1], positions=positions, protected=open_)


def kept_by(rule: str, scores: Tensor, keep: int, generator: torch.Generator) -> Tensor:
    """The ``keep`` entries per head that ``rule`` (see :data:`RULES`) leaves of ``scores (L, H, M)``.

    Returns:
        ``(L, H, keep)`` int64, ascending.
    """
    if rule == "random":
        return select_topk(torch.rand(scores.shape, generator=generator), keep).to(scores.device)
    return select_topk(refined_by(rule, scores, keep), keep)


def segment_coverage(kept: Tensor, total: int, size: int) -> Tensor:
    """The share of segments that hold at least one kept entry.

    Args:
        kept: ``(..., K)`` indices in ``[0, total)``.
        total: positions there are; cut into segments of ``size`` from the first on, the last may be shorter.
        size: positions per segment.

    Returns:
        ``(...)`` float64.
    """
    segments = -(-total // size)
    hit = torch.zeros(*kept.shape[:-1], segments, dtype=torch.float64, device=kept.device)
    return hit.scatter_(-1, kept // size, 1.0).mean(-1)


def selectivity(scores: Tensor) -> Tensor:
    """How unequally a head spreads its scores: coefficient of variation, population std / mean, as HubKV's head weight.

    ``scores (..., M)``, >= 0, give ``(...)`` float64; 0 for an all-zero head.
    """
    precise = scores.to(torch.float64)
    mean = precise.mean(-1)
    return torch.where(mean > 0, precise.std(-1, correction=0) / mean, 0.0)


def head_weights(spread: Tensor, *, exponent: float = 0.5, clip: tuple[float, float] = (0.8, 1.2)) -> Tensor:
    """HubKV's head weights of ``spread (L, H)``, the :func:`selectivity` of each head; relative to the layer's mean."""
    typical = spread.mean(-1, keepdim=True)
    return torch.where(typical > 0, (spread / typical).pow(exponent).clamp(*clip), 1.0)


def cosines(vectors: Tensor, *, centre: bool, most: int = 4000) -> tuple[Tensor, Tensor]:
    """Cosines between α's signatures of ``vectors (M, D)``, mean values; of at most ``most`` entries, evenly spread.

    Args:
        vectors: as in :attr:`~kvretain.observe.collect.Observation.values`.
        centre: subtract the mean over all ``M`` first.
        most: beyond it entries are left out, since pairs grow with the square.

    Returns:
        Those of all pairs ``(n (n - 1) / 2,)``, and each entry's largest to any other ``(n,)``; float32.
    """
    signatures = unit_signatures(vectors, centre=centre)
    count = min(len(signatures), most)
    taken = signatures[torch.arange(count) * len(signatures) // count]
    table = taken @ taken.T
    pairs = table[tuple(torch.triu_indices(count, count, 1))]
    return pairs, table.fill_diagonal_(-torch.inf).amax(-1)


def mean_interval(
    values: Tensor, *, generator: torch.Generator, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float, float]:
    """The mean of ``values (L, H)`` over all heads and its bootstrap interval (percentiles) over *layers*.

    Layers are drawn, not heads, because heads of a layer read the same hidden states. It says how much the mean depends
    on which layers a model has, not how it would differ on another text.

    Returns:
        Mean, low, high.
    """
    per_layer = values.to(torch.float64).mean(-1)
    draws = torch.randint(len(per_layer), (resamples, len(per_layer)), generator=generator)
    means = per_layer[draws].mean(-1)
    tail = (1 - level) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return per_layer.mean().item(), low, high
