"""Moments of the queries before RoPE, read through the tap, against what the model's own projections give."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvretain import Policy, RetentionCache
from kvretain.cache import support
from kvretain.scores import Expected

from .models import MODELS, forward, left_padded, model, tokens
from .oracle import held
from .test_oracle import SCRIPTS, agrees


@dataclass(frozen=True)
class Recording(Expected):
    """Expected Attention that also keeps its views."""

    views: list = field(default_factory=list, compare=False)

    def score(self, view) -> Tensor:
        self.views.append(view)
        return super().score(view)


def recorded(net, ids: Tensor, mask: Tensor | None = None) -> list:
    scorer = Recording(first=2)
    forward(net, ids, RetentionCache.for_model(net, Policy(scorer), ratio=0.5), mask=mask)
    return scorer.views


def plain_queries(net, ids: Tensor) -> dict[int, Tensor]:
    """Per layer ``(Hq, n, D)``: what enters RoPE, read off the module before it (q_norm if there is one)."""
    found: dict[int, Tensor] = {}
    hooks = []
    for index, layer in enumerate(net.model.layers):
        attention = layer.self_attn
        names = ("q_norm", "q_proj", "qkv_proj")  # the last that its queries pass through before RoPE
        before = next(getattr(attention, name) for name in names if hasattr(attention, name))

        def keep(module, args, output, index=index, size=attention.head_dim):
            if output.ndim == 3:
                output = output.unflatten(2, (-1, size))  # of a fused projection the queries come first
            heads_first = output if output.shape[2] == ids.shape[1] else output.transpose(1, 2)
            found[index] = heads_first[0, :4]

        hooks.append(before.register_forward_hook(keep))
    with torch.no_grad():
        net(ids)
    for hook in hooks:
        hook.remove()
    return found


def tiny(kind: str):
    """Families that the shared models lack; Cohere's pairs are interleaved, GLM's are too and do not look it."""
    config = CONFIG_MAPPING[kind](
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", [*MODELS, "cohere"])
def test_moments_are_those_of_the_queries_before_rope(name):
    net = tiny("cohere") if name == "cohere" else model(name)
    assert net.config.model_type in support.ROTARY
    ids = tokens(1, 1, 40)
    queries = plain_queries(net, ids)
    for view in recorded(net, ids):
        plain = queries[view.layer][:, 2:].double()
        mean = plain.mean(1)
        centred = plain - mean[:, None]
        covariance = centred.transpose(1, 2) @ centred / plain.shape[1]
        assert torch.allclose(view.query_mean[0].double(), mean, atol=1e-4)
        assert torch.allclose(view.query_covariance[0].double(), covariance, atol=1e-3)


def test_a_padded_row_has_the_moments_of_its_solo_run():
    rows = [tokens(1, 30), tokens(2, 19)]
    together = recorded(model("llama"), *left_padded(rows))
    for row, ids in enumerate(rows):
        for a, b in zip(together, recorded(model("llama"), ids[None]), strict=True):
            assert torch.allclose(a.query_mean[row], b.query_mean[0], atol=1e-5)
            assert torch.allclose(a.query_covariance[row], b.query_covariance[0], atol=1e-4)


def test_chunks_add_up():
    net = model("llama")
    ids = tokens(3, 1, 40)
    whole, scorer = recorded(net, ids), Recording(first=2)
    cache = RetentionCache.for_model(net, Policy(scorer), budget=30)
    for chunk in ids.split(20, 1):
        forward(net, chunk, cache)
    for a, b in zip(whole, scorer.views, strict=True):
        assert torch.allclose(a.query_mean, b.query_mean, atol=1e-5)


CELLS = [
    *((policy, "llama", s) for policy in ("expected", "expected+hub@shared(floor=0.2)") for s in SCRIPTS),
    *(("expected@layer", name, "turns left-padded") for name in MODELS if name != "llama"),
]


@pytest.mark.parametrize(("policy", "name", "situation"), CELLS)
def test_cell(policy, name, situation):
    agrees(policy, name, situation)


def test_copies_share_the_model_and_nothing_else():
    net = model("llama")
    cache = RetentionCache.for_model(net, "expected", budget=10, every=4)
    forward(net, tokens(0, 2, 20), cache)
    twin = copy.deepcopy(cache)
    assert twin.layers[0].rope is cache.layers[0].rope
    following = tokens(1, 2, 1)
    assert torch.equal(forward(net, following, cache), forward(net, following, twin))
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(held(cache)[0][0], held(cache)[0][1])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gpt2", "gpt2 models have no rotary positions"),
        ("glm", "glm models: .* take rotary positions back, which is tested for"),
    ],
)
def test_a_rotation_that_is_not_tested_is_refused_by_name(kind, message):
    with pytest.raises(ValueError, match=message):
        RetentionCache.for_model(tiny(kind), "expected", budget=8)
