"""Scores for a wider scope: several heads, or layers, that must agree on one set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COMBINE = ("zscore", "mean", "max")
"""Ways to combine the heads of a layer."""


def combine_heads(scores: Tensor, candidates: Tensor, method: str = "zscore") -> Tensor:
    """One score per entry for all heads of a layer.

    ``"zscore"``: each head's scores are standardised over its candidates (population standard deviation, at least 1e-6,
    as in TriAttention's code) and averaged over heads, so that no head's scale dominates. ``"mean"`` and ``"max"`` take
    the scores as they are. Followed by :func:`combine_layers`, this is "one set for the model"; alone, "one set per
    layer".

    Args:
        scores: ``(B, H, N)`` float32; what stands at entries that are not candidates is never read.
        candidates: ``(B, H, N)`` bool, entries that compete (neither padding nor protected). An entry that competes in
            some heads only is averaged (or maximised) over those.
        method: ``"zscore"``, ``"mean"`` or ``"max"``.

    Returns:
        ``(B, 1, N)`` in the dtype of ``scores``; 0 where no head has a candidate. Signed for ``"zscore"``.

    Raises:
        ValueError: ``method`` is unknown or the shapes differ.
    """
    if method not in COMBINE:
        raise ValueError(f"combine_heads: unknown method {method!r}; valid: {', '.join(COMBINE)}")
    if scores.ndim != 3 or candidates.shape != scores.shape:
        raise ValueError(
            "combine_heads: scores and candidates must both be (B, H, N), "
            f"not {tuple(scores.shape)} and {tuple(candidates.shape)}"
        )
    voters = candidates.sum(-2, keepdim=True)
    if method == "max":
        best = scores.masked_fill(~candidates, -torch.inf).amax(-2, keepdim=True)
        return best.masked_fill(voters == 0, 0.0)
    known = scores.masked_fill(~candidates, 0.0)
    if method == "zscore":
        count = candidates.sum(-1, keepdim=True).clamp_min(1)
        centred = (known - known.sum(-1, keepdim=True) / count).masked_fill(~candidates, 0.0)
        deviation = (centred.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
        known = centred / deviation
    return known.sum(-2, keepdim=True) / voters.clamp_min(1)


def combine_layers(layers: Sequence[Tensor]) -> Tensor:
    """The mean over layers of their combined scores, for "one set for the model".

    Args:
        layers: one ``(B, 1, N)`` tensor a layer, from :func:`combine_heads`; they may live on different devices.

    Returns:
        ``(B, 1, N)`` on the first layer's device.

    Raises:
        ValueError: there is no layer, or the shapes differ.
    """
    if not layers:
        raise ValueError("combine_layers: no layer given")
    shapes = {tuple(layer.shape) for layer in layers}
    if len(shapes) > 1:
        raise ValueError(f"combine_layers: layers must agree in shape, not {sorted(shapes)}")
    return torch.stack([layer.to(layers[0].device) for layer in layers]).mean(0)
