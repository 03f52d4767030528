"""Expected Attention against a reference in float64 that builds every rotation as a matrix."""

from __future__ import annotations

import math

import pytest
import torch
from cache.models import forward, model, tokens
from views import random_view

from kvretain import RetentionCache
from kvretain.cache.support import rope_of
from kvretain.scores import Expected


def matrix(view, position: int) -> torch.Tensor:
    """The rotation at ``position`` as a ``(D, D)`` matrix, column by column."""
    cos, sin = view.rope.cos_sin(torch.tensor([[position]]))
    eye = torch.eye(view.keys.shape[-1], dtype=torch.float64)
    return torch.stack([view.rope.rotate(column, cos[0, 0].double(), sin[0, 0].double()) for column in eye], 1)


@pytest.mark.parametrize("fields", [{}, {"covariance": False}, {"values": False, "epsilon": 0.1}, {"future": 3}])
def test_scores_equal_the_reference(fields):
    scorer = Expected(**({"future": 6} | fields))
    view = random_view(7, seen=(19, 11), kept=12)
    scores = scorer.score(view)
    group = view.query_mean.shape[1] // view.keys.shape[1]
    for row in range(2):
        seen = int(view.seen[row])
        turn = torch.stack([matrix(view, seen + i) for i in range(scorer.future)]).mean(0)
        for head in range(view.keys.shape[1]):
            slots = [i for i, p in enumerate(view.positions[row, head].tolist()) if p >= 0]
            weights = torch.zeros(len(slots), dtype=torch.float64)
            for query in range(head * group, (head + 1) * group):
                mean = turn @ view.query_mean[row, query].double()
                spread = turn @ view.query_covariance[row, query].double() @ turn.T
                logits = []
                for slot in slots:
                    key = view.keys[row, head, slot].double()
                    logit = view.scaling * (key @ mean)
                    if scorer.covariance:
                        logit += view.scaling**2 / 2 * (key @ spread @ key)
                    logits.append(float(logit))
                top = max(logits)
                shares = torch.tensor([math.exp(v - top) for v in logits], dtype=torch.float64)
                weights += shares / shares.sum() / group
            weights += scorer.epsilon
            if scorer.values:
                weights *= view.values[row, head, slots].double().norm(dim=-1)
            assert torch.allclose(scores[row, head, slots].double(), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"future": 0}, "future"),
        ({"future": 2**20 + 1}, "future must be at most 1048576"),
        ({"first": -1}, "first"),
        ({"epsilon": -1}, "epsilon"),
    ],
)
def test_bad_fields(fields, words):
    with pytest.raises(ValueError, match=words):
        Expected(**fields)


def test_the_rotation_ahead_is_averaged_in_blocks():
    net = model("llama")
    rope, seen = rope_of(net.model, 0), torch.tensor([40, 7])
    whole = [part.double().mean(1) for part in rope.cos_sin(seen[:, None] + torch.arange(1000))]
    for part, mean in zip(Expected(future=1000)._ahead(rope, seen, block=300), whole, strict=True):
        assert torch.allclose(part.double(), mean, atol=1e-6)


def test_a_context_of_none_but_the_first_tokens_is_refused():
    net = model("llama")
    cache = RetentionCache.for_model(net, "expected(first=40)", budget=20)
    with pytest.raises(ValueError, match=r"after the first 40 tokens, but only 30 .*expected\(first=7\)"):
        forward(net, tokens(0, 1, 30), cache)
    forward(net, tokens(0, 1, 50), RetentionCache.for_model(net, "expected(first=40)", budget=20))


def test_a_short_row_beside_a_longer_one_goes_by_its_values():
    net = model("llama")
    cache = RetentionCache.for_model(net, "expected(first=8)", ratio=0.5)
    ids, mask = tokens(0, 2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :33] = 0
    forward(net, ids, cache, mask=mask)
    cache.check_integrity()
    assert (cache.layers[0].positions[1, 0] >= 0).sum() < 7
