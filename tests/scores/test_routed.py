"""Routed: there must be heads to route. What it keeps is tested in ``cache/test_merging.py``."""

from __future__ import annotations

import pytest
import torch
from cache.models import build
from views import random_view

from kvretain import Policy, RetentionCache
from kvretain.policy import SCOPES
from kvretain.scores import Routed, Trig


def test_it_needs_several_heads():
    with pytest.raises(ValueError, match="at least 2 KV heads, but layer 3 has 1: choose another"):
        Routed().score(random_view(1, heads=1))


def test_a_model_with_one_head_is_refused_before_it_runs():
    one = build("llama", num_key_value_heads=1)
    with pytest.raises(ValueError, match="'routed' needs layers with at least 2 KV heads, but this llama model has 1"):
        RetentionCache.for_model(one, "routing", budget=8)
    cache = RetentionCache.for_model(one, "knorm", ratio=0)
    with pytest.raises(ValueError, match=r"'routed' needs .* but this llama model has 1"):
        cache.compress("routing", budget=8)


def test_other_scorers_do_not_ask_how_many_heads_a_configuration_names():
    """Some list them by layer."""
    net = build("llama")
    vars(net.config)["num_key_value_heads"] = [2, 2]  # Llama's own setter refuses what other families have
    RetentionCache.for_model(net, "knorm", budget=8)


@pytest.mark.parametrize("scope", [scope for scope in SCOPES if scope != "head"])
def test_heads_that_keep_by_other_rules_are_not_compared(scope):
    with pytest.raises(
        ValueError, match=f"cannot be compared, as the scope '{scope}' does: only the scope 'head' fits"
    ):
        Policy.parse(f"routed@{scope}")
    assert Policy.parse("routed@head(layers='pyramid')").scope == "head"


def test_heads_of_the_lowest_concentration_retrieve():
    view = random_view(2)
    mean, absolute = view.calibration
    spread = (mean.abs().sum(-1) / absolute.sum(-1)).unflatten(0, (2, -1)).mean(-1)
    retrieves, streams = int(spread.argmin()), int(spread.argmax())
    scores = Routed().score(view)
    assert torch.equal(scores[:, retrieves], Trig().score(view)[:, retrieves])
    real = view.valid[:, streams]
    assert torch.equal(scores[:, streams][real], (view.positions - view.seen[:, None, None])[:, streams][real].float())
    assert torch.equal(Routed(share=1.0).score(view), Trig().score(view))
