"""Expected Attention against a reference in float64 that builds every rotation as a matrix."""

from __future__ import annotations

import math

import pytest
import torch
from views import random_view

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
    ("fields", "words"), [({"future": 0}, "future"), ({"first": -1}, "first"), ({"epsilon": -1}, "epsilon")]
)
def test_bad_fields(fields, words):
    with pytest.raises(ValueError, match=words):
        Expected(**fields)
