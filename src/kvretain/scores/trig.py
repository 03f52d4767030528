"""TriAttention: keep what queries of the known mean direction will attend to from ahead. No query is observed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from ..cache.view import CacheView
from ..checks import check_choice, check_flag
from ..zscores import standardised
from .base import Scorer, scorers

OFFSETS = tuple(2**power for power in range(17))
"""Distances ahead of the next token at which a key is valued: 1, 2, 4, ..., 65536."""

AGGREGATES = ("mean", "max")

_BLOCK = 512
"""Keys per head that a CPU has in hand."""


def trig_scores(
    keys: Tensor,
    query_mean: Tensor,
    query_abs_mean: Tensor,
    inv_freq: Tensor,
    next_position: int | Tensor,
    *,
    offsets: Sequence[int] = OFFSETS,
    attention_scaling: float | Tensor = 1.0,
    distance: bool = True,
    norm: bool = True,
    concentration: bool = True,
    aggregate: str = "mean",
) -> Tensor:
    """What queries ahead are expected to give each key, from the mean of the queries before RoPE.

    Source: TriAttention, arXiv 2604.04921. With ``w_f`` the frequency of pair ``f``, ``c_f`` the complex mean of the
    queries' pair, ``a_f`` the mean of its length, ``k_f`` the key's pair before rotation at position ``p``, ``s`` the
    attention scaling, ``T`` the next position and ``d`` an offset::

        trig(d) = sum_f s^2 |c_f| |k_f| cos(w_f (T - p + d) + arg c_f - arg k_f)
        score   = mean over d of trig(d) + sum_f s^2 (a_f - |c_f|) |k_f|

    Cached keys ``x_f = s k_f exp(i w_f p)`` give the same without their positions: ``trig(d)`` is the real part of
    ``sum_f s c_f exp(i w_f (T + d)) conj(x_f)``, so the mean over offsets is one complex vector per query head, and a
    head's score one dot product per key plus the norm term. Angles are float64, sums float32.

    Args:
        keys: ``(B, H, N, D)``, any floating dtype, as cached: rotated, times the attention scaling. Pair ``f`` stands
            at ``f`` and ``f + D / 2`` (:meth:`kvretain.rope.Rope.halves` brings other layouts to that).
        query_mean: ``(Hq, D / 2)`` complex, ``Hq`` a multiple of ``H``.
        query_abs_mean: ``(Hq, D / 2)``.
        inv_freq: ``(D / 2,)``, the frequencies of the model, in radians per position; 0 for pairs that are not rotated.
        next_position: number of tokens seen, evicted ones included; an int, or ``(B,)`` int64 for rows that differ.
        offsets: distances ahead, in tokens.
        attention_scaling: the factor that rotation puts on queries and keys; a number, or one per pair ``(D / 2,)``.
        distance: False leaves the trigonometric term out (the authors' ablation "norm only").
        norm: False leaves the norm term out ("trig only").
        concentration: False weighs the norm term by ``a_f`` and not ``a_f - |c_f|`` ("without R").
        aggregate: over offsets, ``"mean"`` or ``"max"``; the latter costs a dot product per offset.

    Returns:
        ``(B, Hq, N)`` float32, in units of the attention logits before the model's scaling.

    Raises:
        ValueError: shapes that do not fit, an offset that is not finite or none, nothing left to score by, or an
            unknown ``aggregate``.

    Example:
        >>> keys = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])           # one pair: along its first axis, its second
        >>> trig_scores(keys, torch.tensor([[1 + 0j]]), torch.tensor([[1.0]]), torch.zeros(1), 2)
        tensor([[[1., 0.]]])
    """
    _check(keys, query_mean, query_abs_mean, inv_freq, next_position, offsets, attention_scaling)
    check_choice("trig_scores", "aggregate", aggregate, AGGREGATES)
    if not (distance or norm):
        raise ValueError("trig_scores: without distance and without norm nothing is left to score by")
    batch, heads, count, _ = keys.shape
    pairs, device = keys.shape[3] // 2, keys.device
    mean, absolute = query_mean.to(device, torch.complex64), query_abs_mean.to(device, torch.float32)
    scaling = torch.as_tensor(attention_scaling, dtype=torch.float32, device=device)
    vectors: tuple[Tensor, ...] = ()
    if distance:
        turns = _turns(inv_freq, next_position, offsets, device)  # (B or 1, O, D / 2)
        if aggregate == "mean":
            turns = turns.mean(1, keepdim=True)
        ahead = scaling * mean * turns.to(device, torch.complex64)[:, :, None]  # (B or 1, O or 1, Hq, D / 2)
        vectors = torch.cat([ahead.real, ahead.imag], -1).unbind(1)
    # Per KV head, rows of dot products: (D, G) as a transposed view is the layout that few columns are fastest in.
    vectors = tuple(_per_head(vector, batch, heads) for vector in vectors)
    weights = _per_head((scaling * (absolute - mean.abs() if concentration else absolute))[None], batch, heads)
    scores = torch.empty(batch * heads, len(mean) // heads, count, device=device)
    # A CPU is fastest while what is in hand fits its cache.
    block = min(_BLOCK if device.type == "cpu" else count, count)
    buffer = torch.empty(batch * heads, block, pairs, device=device) if norm else None
    for start in range(0, count, max(block, 1)):
        part = keys[:, :, start : start + block].to(torch.float32).reshape(batch * heads, -1, 2 * pairs)
        terms = [torch.bmm(part, vector) for vector in vectors]
        total = reduce(torch.maximum, terms) if terms else None
        if buffer is not None:
            one, other = part.split(pairs, -1)
            lengths = torch.mul(one, one, out=buffer[:, : part.shape[1]]).addcmul_(other, other).sqrt_()
            total = torch.bmm(lengths, weights) if total is None else total.baddbmm_(lengths, weights)
        assert total is not None
        scores[..., start : start + block] = total.transpose(1, 2)
    return scores.view(batch, len(mean), count)


def _per_head(vectors: Tensor, batch: int, heads: int) -> Tensor:
    """``(B or 1, Hq, D)`` as ``(B * H, D, G)``, a transposed view."""
    grouped = vectors.unflatten(1, (heads, -1)).expand(batch, -1, -1, -1)
    return grouped.reshape(batch * heads, *grouped.shape[2:]).transpose(1, 2)


def _turns(inv_freq: Tensor, next_position: int | Tensor, offsets: Sequence[int], device: torch.device) -> Tensor:
    """``exp(i w_f (T + d))``, ``(B or 1, O, D / 2)`` complex128: after 10^5 tokens a float32 angle is off by 0.01."""
    exact = torch.device("cpu") if device.type == "mps" else device  # which has no float64
    ahead = torch.as_tensor(next_position).reshape(-1, 1).to(exact, torch.float64)
    ahead = ahead + torch.tensor(tuple(offsets), dtype=torch.float64, device=exact)
    angles = ahead[..., None] * inv_freq.to(exact, torch.float64)
    return torch.polar(torch.ones_like(angles), angles)


def _check(
    keys: Tensor,
    mean: Tensor,
    absolute: Tensor,
    inv_freq: Tensor,
    next_position: int | Tensor,
    offsets: Sequence[int],
    attention_scaling: float | Tensor,
) -> None:
    if len(offsets) == 0 or not all(math.isfinite(offset) for offset in offsets):
        raise ValueError(f"trig_scores: offsets must be one or more finite numbers, not {offsets!r}")
    if keys.ndim != 4 or keys.shape[-1] % 2 or not keys.shape[1]:
        raise ValueError(f"trig_scores: keys must be (B, H, N, D), H at least 1 and D even, not {tuple(keys.shape)}")
    heads, pairs = keys.shape[1], keys.shape[-1] // 2
    fits = mean.is_complex() and mean.ndim == 2 and len(mean) > 0 and len(mean) % heads == 0 and mean.shape[1] == pairs
    if not fits:
        raise ValueError(
            f"trig_scores: query_mean must be complex (Hq, D / 2) with Hq a multiple of {heads} and D / 2 = {pairs}, "
            f"not {mean.dtype} {tuple(mean.shape)}"
        )
    if absolute.is_complex() or absolute.shape != mean.shape:
        raise ValueError(
            f"trig_scores: query_abs_mean must be real {tuple(mean.shape)}, "
            f"not {absolute.dtype} {tuple(absolute.shape)}"
        )
    if tuple(inv_freq.shape) != (pairs,):
        raise ValueError(f"trig_scores: inv_freq must be ({pairs},), not {tuple(inv_freq.shape)}")
    rows = keys.shape[0]
    if (shape := tuple(torch.as_tensor(next_position).shape)) not in ((), (1,), (rows,)):
        raise ValueError(f"trig_scores: next_position must be an int or ({rows},), not {shape}")
    if (shape := tuple(torch.as_tensor(attention_scaling).shape)) not in ((), (1,), (pairs,)):
        raise ValueError(f"trig_scores: attention_scaling must be a number or ({pairs},), not {shape}")


def group_max(scores: Tensor, heads: int) -> Tensor:
    """The largest score in the query group of each of ``heads`` KV heads, ``(B, Hq, N)`` -> ``(B, H, N)``."""
    return scores.unflatten(-2, (heads, -1)).amax(-2)


@scorers.register("trig")
@dataclass(frozen=True)
class Trig(Scorer):
    """Attention that a query of the mean direction is expected to give from ahead: TriAttention's score.

    Source: TriAttention, arXiv 2604.04921, and its code. :func:`trig_scores` per query head, each head's scores with
    mean 0 and standard deviation 1 over the candidates (population, at least 1e-6), then the maximum over a KV head's
    query group. Query statistics come from a calibration of the model (:mod:`kvretain.calibrate`); nothing is observed
    while the model runs. The authors' three modes are scopes, see :mod:`kvretain.select.triattention`: ``per_head`` is
    ``trig@aligned(combine='mean')``, ``union`` is ``trig@model(combine='max')``, ``per_layer_perhead`` is ``trig``.

    Deviations: 4 sinks are protected (none in the authors' Hugging Face code; set ``sinks=0``), protected entries are
    no candidates, ties go to the lowest position in place of seeded noise below 1e-6. Dimensions that are not rotated
    count as pairs of frequency 0: their mean logit is the same at any distance. Rotations that depend on the length
    (dynamic, long RoPE) are taken as they are for short contexts. A soft cap is ignored.

    Args:
        calibration: a file of ``kvretain calibrate``, or one that TriAttention published (``.pt``); by default the one
            in the user's cache folder, which is made if it is missing.
        offsets, distance, norm, concentration, aggregate: see :func:`trig_scores`.
        value_weight: how much the length of an entry's value counts: its logarithm, standardised over the candidates of
            the KV head, times this is added. Not TriAttention's: one of the rejected mechanisms of α's family "Scoring"
            (arXiv 2605.14292), whose definitions are not public; VATP (2406.12335) multiplies, which suits scores that
            are not signed.

    Raises:
        ValueError: a field is out of range.
    """

    calibration: str = ""
    offsets: tuple[int, ...] = OFFSETS
    distance: bool = True
    norm: bool = True
    concentration: bool = True
    aggregate: str = "mean"
    value_weight: float = 0.0

    needs: ClassVar[frozenset[str]] = frozenset({"calibration"})
    signed: ClassVar[bool] = True
    paper = "TriAttention, 2604.04921"

    def __post_init__(self) -> None:
        if not isinstance(self.calibration, str):
            raise ValueError(f"trig: calibration must be the path of a file, not {self.calibration!r}")
        for field in ("distance", "norm", "concentration"):
            check_flag("trig", field, getattr(self, field))
        check_choice("trig", "aggregate", self.aggregate, AGGREGATES)
        if not (self.distance or self.norm):
            raise ValueError("trig: distance=False and norm=False leave nothing to score by")
        weight = self.value_weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"trig: value_weight must be a number of at least 0, not {weight!r}")
        numbers = isinstance(self.offsets, tuple) and all(type(offset) in (int, float) for offset in self.offsets)
        if not numbers or not self.offsets or not all(0 <= offset < math.inf for offset in self.offsets):
            raise ValueError(f"trig: offsets must be one or more numbers of at least 0, not {self.offsets!r}")

    def score(self, view: CacheView) -> Tensor:
        """Standardised scores ``(B, H, N)`` float32, signed; 0 for entries that are no candidates.

        Raises:
            ValueError: the view has no calibration or no rotation.
        """
        if view.calibration is None or view.rope is None:
            raise ValueError(f"scorer 'trig' needs a calibration, but layer {view.layer}'s view has none")
        mean, absolute = view.calibration
        frequencies, scaling = view.rope.speeds(view.keys.shape[-1])
        raw = trig_scores(
            view.rope.halves(view.keys),
            mean,
            absolute,
            frequencies,
            view.seen,
            offsets=self.offsets,
            attention_scaling=scaling,
            distance=self.distance,
            norm=self.norm,
            concentration=self.concentration,
            aggregate=self.aggregate,
        )
        heads = view.keys.shape[1]
        candidates = view.candidates[:, :, None].expand(-1, -1, len(mean) // heads, -1).flatten(1, 2)
        scores = group_max(standardised(raw, candidates), heads)
        if not self.value_weight:
            return scores
        norms = torch.linalg.vector_norm(view.values, dim=-1, dtype=torch.float32).clamp_min(1e-6).log()
        return scores + self.value_weight * standardised(norms, view.candidates)
