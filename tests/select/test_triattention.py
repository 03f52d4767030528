"""TriAttention's modes, and that their scopes give the same sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvretain import Policy, select_topk
from kvretain.select.scope import combine_heads, combine_layers
from kvretain.select.triattention import per_head, per_layer_perhead, union


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    shape=st.tuples(*(st.integers(1, top) for top in (3, 2, 4, 12))),
    levels=st.sampled_from([2, 3, 1000]),
    data=st.data(),
)
def test_the_union_is_top_k_of_the_maximum_ties_included(seed, shape, levels, data):
    """``levels`` few: most scores are equal, so that the order of ties matters."""
    scores = torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(seed)).float()
    keep = data.draw(st.integers(1, shape[-1]))
    assert torch.equal(union(scores, keep), select_topk(scores.amax((0, 2)), keep))


def test_the_union_by_hand():
    # Two heads. Each nominates 2; the maxima are 9, 8, 3, 7.
    scores = torch.tensor([[[[9.0, 8.0, 0.0, 1.0], [0.0, 0.0, 3.0, 7.0]]]])
    assert union(scores, 2).tolist() == [[0, 1]]
    assert union(scores, 3).tolist() == [[0, 1, 3]]


def test_per_head_is_the_mean_over_layers_of_the_group_maximum():
    # One KV head with two query heads; two layers. Maxima: (4, 1, 3), (0, 5, 4); means 2, 3, 3.5.
    scores = torch.tensor([[[[4.0, 0.0, 3.0], [0.0, 1.0, 0.0]]], [[[0.0, 5.0, 0.0], [0.0, 0.0, 4.0]]]])
    assert per_head(scores, 1, 2).tolist() == [[[1, 2]]]
    assert per_layer_perhead(scores, 1, 1).tolist() == [[[[0]]], [[[1]]]]
    assert per_layer_perhead(scores, 1, 1, group="mean").tolist() == [[[[0]]], [[[1]]]]
    with pytest.raises(ValueError, match="group must be 'max' or 'mean', not 'sum'"):
        per_layer_perhead(scores, 1, 1, group="sum")


def test_modes_are_scopes():
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 2, 6, 20, generator=rng)
    layers = list(scores.unflatten(2, (2, 3)).amax(3))  # what the scorer gives, (B, 2, 20) a layer
    everything = torch.ones_like(layers[0], dtype=torch.bool)
    whole = Policy.parse("triattention-union").combine
    agreed = combine_layers([combine_heads(layer, everything, whole) for layer in layers], whole)
    assert torch.equal(select_topk(agreed, 7)[:, 0], union(scores, 7))
    aligned = Policy.parse("triattention")
    assert aligned.scope == "aligned"
    assert torch.equal(select_topk(combine_layers(layers, aligned.combine), 7), per_head(scores, 2, 7))
    assert torch.equal(torch.stack([select_topk(layer, 7) for layer in layers]), per_layer_perhead(scores, 2, 7))


@pytest.mark.parametrize("mode", [per_head, per_layer_perhead])
@pytest.mark.parametrize(
    ("shape", "heads"), [((3, 2, 6, 20), 4), ((3, 2, 6, 20), 0), ((3, 2, 0, 20), 2), ((2, 6, 20), 2)]
)
def test_heads_that_do_not_divide_are_refused(mode, shape, heads):
    with pytest.raises(
        ValueError, match=rf"{mode.__name__}: scores must be \(L, B, Hq, N\).* multiple of {heads} heads"
    ):
        mode(torch.zeros(shape), heads, 5)
