"""Scores for a wider scope: several heads, or layers, that must agree on one set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..slots import unexpanded
from ..zscores import standardised

COMBINE = ("zscore", "mean", "max")
"""Ways to combine the heads of a layer, and layers."""


def combine_heads(scores: Tensor, candidates: Tensor, method: str = "zscore") -> Tensor:
    """One score per entry for all heads of a layer.

    ``"zscore"``: each head's scores are :func:`standardised` over its candidates and averaged over heads, so that no
    head's scale dominates. ``"mean"`` and ``"max"`` take the scores as they are. Followed by :func:`combine_layers`,
    this is "one set for the model"; alone, "one set per layer".

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
    known = standardised(scores, candidates) if method == "zscore" else scores.masked_fill(~candidates, 0.0)
    return known.sum(-2, keepdim=True) / voters.clamp_min(1)


def combine_layers(layers: Sequence[Tensor], method: str = "mean") -> Tensor:
    """One score per entry for all layers.

    For "one set for the model" the layers come from :func:`combine_heads` by the same ``method``; ``"max"`` then is the
    largest score of any head in any layer, as in TriAttention's union mode. For "one set per KV-head index, the same in
    all layers" (TriAttention's default, with ``"mean"``) they are each layer's scores as they are, for ``"zscore"``
    :func:`standardised`.

    Args:
        layers: one ``(B, H, N)`` tensor a layer; they may live on different devices.
        method: ``"max"``; ``"mean"`` and ``"zscore"`` average.

    Returns:
        ``(B, H, N)`` on the first layer's device.

    Raises:
        ValueError: ``method`` is unknown, there is no layer, or the shapes differ.
    """
    if method not in COMBINE:
        raise ValueError(f"combine_layers: unknown method {method!r}; valid: {', '.join(COMBINE)}")
    if not layers:
        raise ValueError("combine_layers: no layer given")
    shapes = {tuple(layer.shape) for layer in layers}
    if len(shapes) > 1:
        raise ValueError(f"combine_layers: layers must agree in shape, not {sorted(shapes)}")
    stacked = torch.stack([layer.to(layers[0].device) for layer in layers])
    return stacked.amax(0) if method == "max" else stacked.mean(0)


def check_shared(owner: str, scope: str, positions: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` unless all that choose one set under ``scope`` hold the same entries: slot i of one head is
    then the token in slot i of the next.

    Args:
        owner: who chooses, for the message.
        scope: of a policy; only ``layer``, ``model`` and ``aligned`` ask for anything.
        positions: one ``(B, H, N)`` int64 a layer.
    """
    heads, layers = scope in ("layer", "model"), scope in ("model", "aligned")
    for at, layer in enumerate(positions):
        here = unexpanded(layer)
        differs = heads and here.shape[1] > 1 and not torch.equal(here, here[:, :1].expand_as(here))
        if layers and at:
            first = positions[0].to(layer.device)
            shape = torch.broadcast_shapes(first.shape, layer.shape) if first.shape[2] == layer.shape[2] else None
            differs = differs or shape is None or not torch.equal(first.expand(shape), layer.expand(shape))
        if differs:
            where = "heads and layers" if heads and layers else "heads" if heads else "layers"
            raise ValueError(
                f"{owner} chooses one set for all {where}, but layer {at} holds other entries than the rest: earlier "
                "choices must have been shared as widely"
            )
