"""Random cache views, with padding, evicted positions and protected entries; and the same view with padding added."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvretain.cache.view import CacheView
from kvretain.rope import Rope


def _angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two pairs in halves, so that two of a head's six dimensions are not rotated."""
    angles = positions[..., None] * torch.tensor([1.0, 0.1]).repeat(2)
    return angles.cos(), angles.sin()


ROPE = Rope.of(_angles)


def _spread(batch: int, heads: int, size: int, rng: torch.Generator) -> torch.Tensor:
    roots = torch.randn(batch, heads, size, size, generator=rng)
    return roots @ roots.transpose(-1, -2)


def _calibration(heads: int, pairs: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    mean = torch.complex(*torch.randn(2, heads, pairs, generator=rng))
    return mean, mean.abs() + torch.rand(heads, pairs, generator=rng)


def random_view(
    seed: int, *, seen: tuple[int, ...] = (29, 17, 23), heads: int = 2, group: int = 2, window: int = 8, kept: int = 20
) -> CacheView:
    """A batch of ``len(seen)`` rows after evictions: each head holds up to ``kept`` of the tokens seen, left-padded.

    The 4 sinks (where still there) and the last ``window // 2`` tokens are protected. Padding slots hold NaN.
    """
    rng = torch.Generator().manual_seed(seed)
    batch, size = len(seen), 6
    positions = torch.full((batch, heads, kept), -1)
    for row, total in enumerate(seen):
        count = min(total, kept)
        for head in range(heads):
            positions[row, head, kept - count :] = torch.randperm(total, generator=rng)[:count].sort().values
    tokens = torch.tensor(seen)
    padding = (positions < 0).unsqueeze(-1)
    protected = (positions >= 0) & ((positions < 4) | (positions >= tokens[:, None, None] - window // 2))
    return CacheView(
        keys=torch.randn(batch, heads, kept, size, generator=rng).masked_fill(padding, torch.nan),
        values=torch.randn(batch, heads, kept, size, generator=rng).masked_fill(padding, torch.nan),
        positions=positions,
        seen=tokens,
        budget=kept,
        protected=protected,
        queries=2 * torch.randn(batch, heads * group, window, size, generator=rng),
        query_valid=torch.arange(window).flip(0) < tokens[:, None],
        attention=torch.rand(batch, heads, kept, generator=rng).masked_fill(padding[..., 0], torch.nan),
        replay=torch.rand(batch, heads, kept, generator=rng).masked_fill(padding[..., 0], torch.nan),
        query_mean=torch.randn(batch, heads * group, size, generator=rng),
        query_covariance=_spread(batch, heads * group, size, rng),
        gate=torch.rand(batch, heads, kept, generator=torch.Generator().manual_seed(seed + 1)).masked_fill(
            padding[..., 0], torch.nan
        ),
        calibration=_calibration(heads * group, size // 2, rng),
        rope=ROPE,
        scaling=0.5,
        layer=3,
        num_layers=4,
    )


def row(view: CacheView, index: int) -> CacheView:
    """One row of ``view``, alone."""
    names = (
        "keys",
        "values",
        "positions",
        "seen",
        "protected",
        "queries",
        "query_valid",
        "attention",
        "replay",
        "gate",
        "query_mean",
    )
    names += ("query_covariance",)
    return replace(view, **{name: getattr(view, name)[index : index + 1] for name in names})


def pad(view: CacheView, before: torch.Tensor) -> CacheView:
    """``view`` with a padding slot inserted before each slot that ``before (N,)`` bool marks."""
    slots = torch.arange(len(before)) + before.cumsum(0)
    size = len(before) + int(before.sum())

    def spread(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        out = tensor.new_full((*tensor.shape[:2], size, *tensor.shape[3:]), fill)
        out[:, :, slots] = tensor
        return out

    assert view.attention is not None and view.replay is not None and view.gate is not None
    return replace(
        view,
        keys=spread(view.keys, torch.nan),
        values=spread(view.values, torch.nan),
        positions=spread(view.positions, -1),
        protected=spread(view.protected, False),
        attention=spread(view.attention, torch.nan),
        replay=spread(view.replay, torch.nan),
        gate=spread(view.gate, torch.nan),
    )


def strip(tensor: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """``tensor (B, H, N + added)`` without the slots that :func:`pad` added."""
    return tensor[:, :, torch.arange(len(before)) + before.cumsum(0)]
