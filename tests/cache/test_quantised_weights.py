"""Models with quantised weights (torchao, int8, on a CPU): every kind of policy runs, and weights are told apart."""

from __future__ import annotations

import copy

import pytest
import torch

from kvretain import RetentionCache, artefacts
from kvretain.calibrate import calibrate

from .models import forward, model, tokens

pytest.importorskip("torchao", reason="needs torchao")


@pytest.fixture(scope="module")
def quantised():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    net = copy.deepcopy(model("llama"))
    quantize_(net, Int8WeightOnlyConfig())
    assert type(net.model.layers[0].self_attn.o_proj.weight.detach()) is not torch.Tensor
    return net


@pytest.mark.parametrize("policy", ["snapkv+hub", "alpha", "kvzip-plus", "expected", "h2o", "keydiff@model"])
def test_policies_run_on_them(quantised, policy, monkeypatch, tmp_path):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path))
    if policy == "alpha":
        calibrate(quantised, tokens(77, 200)).save(artefacts.own_path("calibration", quantised))
    cache = RetentionCache.for_model(quantised, policy, budget=12, every=4)
    forward(quantised, tokens(1, 2, 30), cache)
    for step in range(9):
        assert forward(quantised, tokens(step, 2, 1), cache).isfinite().all()
    assert cache.trace.evictions >= 3
    cache.check_integrity()


def test_the_fingerprint_is_of_what_the_weights_stand_for(quantised):
    assert artefacts.fingerprint(quantised) == artefacts.fingerprint(copy.deepcopy(quantised))
    assert artefacts.fingerprint(quantised) != artefacts.fingerprint(model("llama"))
