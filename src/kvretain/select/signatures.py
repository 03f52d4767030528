"""Signatures: one vector per token that stands for what its values contribute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_EPSILON = 1e-8


def value_signatures(
    values: Sequence[Tensor], *, centre: bool = False, valid: Tensor | None = None, normalise_heads: bool = False
) -> Tensor:
    """One vector per token that stands for what it contributes: its mean value vector, at unit length.

    Source: α (arXiv 2605.14292): value tensors averaged over all layers and KV heads, then normalised. The order of the
    two and centring are not stated there; the defaults are the plainest reading, the arguments the others.

    Args:
        values: one ``(B, H, N, D)`` a layer, any floating dtype and device; ``H`` may differ, ``D`` may not.
        centre: subtract the mean over the (valid) entries of each row before normalising.
        valid: ``(B, N)`` bool, real entries; the others get zeros. Default: all.
        normalise_heads: normalise each head's vector before averaging, too.

    Returns:
        ``(B, N, D)`` float32 on the first layer's device, of length 1; 0 where the mean is 0.

    Raises:
        ValueError: no layer, or layers that differ in more than ``H``.

    Example:
        >>> value_signatures([torch.tensor([[[[3.0, 4.0]]]]), torch.tensor([[[[3.0, 4.0]]]])])
        tensor([[[0.6000, 0.8000]]])
    """
    return unit_signatures(mean_values(values, normalise_heads=normalise_heads), centre=centre, valid=valid)


def mean_values(values: Sequence[Tensor], *, normalise_heads: bool = False) -> Tensor:
    """The mean over layers and heads before :func:`unit_signatures`, same arguments and errors.

    Heads are added one by one in float32, so that a token's mean is the same number whatever is computed beside it:
    means that are carried along equal means that are computed anew.

    Returns:
        ``(B, N, D)`` float32 on the first layer's device.
    """
    if not values:
        raise ValueError("value_signatures: no layer given")
    shapes = [tuple(layer.shape) for layer in values]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"value_signatures: values must be (B, H, N, D) for each layer, not {shapes}")
    if len({(batch, size, width) for batch, _, size, width in shapes}) > 1:
        raise ValueError(
            "value_signatures: the mean over layers needs equal numbers of rows and entries and one head size, "
            f"not {sorted(set(shapes))}; choose per head (@head) or per layer (@layer) for such a model"
        )
    batch, _, size, width = shapes[0]
    total = torch.zeros(batch, size, width, dtype=torch.float32, device=values[0].device)
    for layer in values:
        for head in layer.unbind(1):
            vector = head.to(total.device, torch.float32)
            total += _normalised(vector) if normalise_heads else vector
    return total / sum(shape[1] for shape in shapes)


def unit_signatures(means: Tensor, *, centre: bool = False, valid: Tensor | None = None) -> Tensor:
    """Signatures ``(..., N, D)`` float32 of unit length from mean values of that shape; ``valid`` is ``(..., N)``."""
    vectors = means.to(torch.float32)
    if valid is not None:
        vectors = vectors.masked_fill(~valid[..., None], 0.0)  # what stands at padding may be anything, even NaN
    if not centre:
        return _normalised(vectors)
    precise = vectors.to(torch.float64)
    count = precise.new_tensor(means.shape[-2]) if valid is None else valid.sum(-1)[..., None, None].clamp_min(1)
    precise = precise - precise.sum(-2, keepdim=True) / count
    return _normalised(precise if valid is None else precise.masked_fill(~valid[..., None], 0.0))


def _normalised(vectors: Tensor) -> Tensor:
    """``vectors (..., D)`` at unit length, float32; lengths below 1e-8 count as that."""
    precise = vectors.to(torch.float64)
    return (precise / precise.square().sum(-1, keepdim=True).sqrt().clamp_min(_EPSILON)).to(torch.float32)
