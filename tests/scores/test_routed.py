"""Routed: there must be heads to route. What it keeps is tested in ``cache/test_merging.py``."""

from __future__ import annotations

import pytest
import torch
from views import random_view

from kvretain.scores import Routed, Trig


def test_it_needs_several_heads():
    with pytest.raises(ValueError, match="several KV heads, but layer 3 has one: use 'trig'"):
        Routed().score(random_view(1, heads=1))


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
