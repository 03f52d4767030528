"""Combining heads and layers, against loops."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvretain.select import combine_heads, combine_layers


def reference(scores, candidates, method: str) -> list[float]:
    """One row: ``scores`` and ``candidates`` are lists of heads."""
    votes: list[list[float]] = [[] for _ in scores[0]]
    for head, open_ in zip(scores, candidates, strict=True):
        own = [s for s, c in zip(head, open_, strict=True) if c]
        for slot, (s, c) in enumerate(zip(head, open_, strict=True)):
            if c:
                scaled = (s - statistics.fmean(own)) / max(statistics.pstdev(own), 1e-6)
                votes[slot].append(scaled if method == "zscore" else s)
    pool = max if method == "max" else statistics.fmean
    return [pool(vote) if vote else 0.0 for vote in votes]


@pytest.mark.parametrize("method", ["zscore", "mean", "max"])
@given(seed=st.integers(0, 2**20), shared=st.booleans())
@settings(max_examples=20, deadline=None)
def test_combined_heads_equal_a_loop(method, seed, shared):
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 4, 15, generator=rng)
    candidates = torch.rand(3, 1 if shared else 4, 15, generator=rng).expand(3, 4, 15) < 0.7
    candidates[1, 2] = False
    candidates[2, :, 3] = False
    combined = combine_heads(scores.masked_fill(~candidates, math.nan), candidates, method)
    assert combined.shape == (3, 1, 15) and combined.dtype == torch.float32
    for row in range(3):
        expected = reference(scores[row].tolist(), candidates[row].tolist(), method)
        assert combined[row, 0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert combined[2, 0, 3] == 0


def test_zscore_is_the_default_and_ignores_scale():
    scores, everyone = torch.rand(1, 3, 20), torch.ones(1, 3, 20, dtype=torch.bool)
    scale = torch.tensor([1.0, 100.0, 0.01])[:, None]
    torch.testing.assert_close(
        combine_heads(scores * scale + scale, everyone), combine_heads(scores, everyone, "zscore")
    )


def test_flat_heads_abstain():
    scores = torch.tensor([[[0.5, 0.5, 0.5, 0.5], [0.0, 1.0, 0.0, 1.0]]])
    combined = combine_heads(scores, torch.ones_like(scores, dtype=torch.bool))
    torch.testing.assert_close(combined, torch.tensor([[[-0.5, 0.5, -0.5, 0.5]]]))


def test_combined_layers_are_their_mean():
    layers = [torch.rand(2, 1, 5) for _ in range(3)]
    torch.testing.assert_close(combine_layers(layers), (layers[0] + layers[1] + layers[2]) / 3)
    assert torch.equal(combine_layers(layers[:1]), layers[0])


def test_errors():
    scores, everyone = torch.rand(1, 3, 5), torch.ones(1, 3, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="unknown method 'sum'; valid: zscore, mean, max"):
        combine_heads(scores, everyone, "sum")
    with pytest.raises(ValueError, match=r"must both be \(B, H, N\), not \(1, 3, 5\) and \(3, 5\)"):
        combine_heads(scores, everyone[0])
    with pytest.raises(ValueError, match="no layer given"):
        combine_layers([])
    with pytest.raises(ValueError, match=r"must agree in shape, not \[\(1, 1, 4\), \(1, 1, 5\)\]"):
        combine_layers([torch.rand(1, 1, 5), torch.rand(1, 1, 4)])
