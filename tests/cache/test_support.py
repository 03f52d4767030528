"""Every model type that kvretain lists as verified passes its own check; one that is wrong does not."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvretain import RetentionCache
from kvretain.cache import support

# Attribute names differ between families; those that a configuration has are set.
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "rotary_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
HYBRID = ("cwm", "gemma2", "gemma3_text", "gpt_oss", "olmo3")
FAST = ("gemma3_text", "gpt2", "gpt_oss", "llama", "mistral", "phi3", "qwen2", "qwen3")


def tiny(kind: str):
    config = CONFIG_MAPPING[kind]
    default = config()
    settings = {name: value for name, value in TINY.items() if hasattr(default, name)}
    if kind in HYBRID:
        settings |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    elif hasattr(default, "sliding_window"):
        settings["sliding_window"] = None
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**settings)).eval()


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k in FAST else pytest.mark.slow) for k in sorted(support.VERIFIED)],
)
def test_a_verified_type_passes_its_check(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    assert support.verify(tiny(kind)) < 1e-3


def test_an_unknown_type_is_verified_on_first_use_and_remembered(monkeypatch):
    monkeypatch.setattr(support, "VERIFIED", frozenset())
    monkeypatch.setattr(support, "_verified", set())
    net = tiny("qwen2")
    RetentionCache.for_model(net, "knorm", budget=8)
    assert support._verified == {"qwen2"}
    monkeypatch.setattr(support, "_verify", lambda model: pytest.fail("verified twice"))
    RetentionCache.for_model(net, "knorm", budget=8)
    assert net.model._forward_pre_hooks == {}, "the check left a hook behind"


def test_a_model_whose_heads_share_values_fails_the_check(monkeypatch):
    monkeypatch.delitem(support.REFUSED, "diffllama")
    with pytest.raises(ValueError, match="diffllama models are not supported: after an eviction their logits differ"):
        support.verify(tiny("diffllama"))


def test_a_type_that_cannot_run_the_check_is_refused_by_name():
    net = tiny("llama")
    net.config.model_type = "mystery"
    net.forward = None
    with pytest.raises(ValueError, match="mystery models are not supported: TypeError"):
        RetentionCache.for_model(net, "knorm", budget=8)


def test_a_model_without_a_head_and_in_training_mode(monkeypatch):
    monkeypatch.setattr(support, "VERIFIED", frozenset())
    monkeypatch.setattr(support, "_verified", set())
    net = tiny("qwen3").model.train()
    RetentionCache.for_model(net, "knorm", budget=8)
    assert support._verified == {"qwen3"} and net.training


def test_the_policy_full_needs_no_check(monkeypatch):
    monkeypatch.setattr(support, "VERIFIED", frozenset())
    monkeypatch.setattr(support, "_verify", lambda model: pytest.fail("nothing is evicted"))
    RetentionCache.for_model(tiny("llama"), "full")


def test_a_window_that_no_context_exceeds_is_full_attention():
    """Phi-4 and others state a sliding window that is longer than their context."""
    config = CONFIG_MAPPING["mistral"](**{k: v for k, v in TINY.items() if k in CONFIG_MAPPING["mistral"]().to_dict()})
    config.sliding_window = 128
    net = AutoModelForCausalLM.from_config(config).eval()
    cache = RetentionCache.for_model(net, "knorm", budget=10, every=4)
    with torch.no_grad():
        net(torch.arange(3, 33)[None], past_key_values=cache)
    assert [layer.positions.shape[-1] for layer in cache.layers] == [10, 10]
    assert support.verify(net) < 1e-3
