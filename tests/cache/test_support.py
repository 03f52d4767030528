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
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "attn_layer_indices": [1],
}
HYBRID = ("cwm", "gemma2", "gemma3_text", "gpt_oss", "olmo3")
CONV = ("lfm2", "lfm2_moe")
LINEAR = ("granitemoehybrid", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
FAST = ("gemma3_text", "gpt2", "gpt_oss", "lfm2", "llama", "mistral", "phi3", "qwen2", "qwen3")


def tiny(kind: str):
    config = CONFIG_MAPPING[kind]
    default = config()
    settings = {name: value for name, value in TINY.items() if hasattr(default, name)}
    if kind in HYBRID:
        settings |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    elif kind in CONV + LINEAR:
        settings["layer_types"] = ["conv" if kind in CONV else "linear_attention", "full_attention"]
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


def test_opt_would_count_positions_among_stored_entries(monkeypatch):
    """Why it is refused although it passes its check: rows that keep different numbers have their mask rewritten."""
    net = tiny("opt")
    with pytest.raises(ValueError, match="opt models are not supported: they count positions in the attention mask"):
        RetentionCache.for_model(net, "knorm", budget=8)
    monkeypatch.delitem(support.REFUSED, "opt")
    ids, mask = torch.arange(3, 23)[None].repeat(2, 1), torch.ones(2, 21, dtype=torch.int64)
    mask[1, :9] = 0
    caches = [RetentionCache.for_model(net, "knorm", ratio=0.5) for _ in range(2)]
    counted: list[torch.Tensor] = []
    hook = net.model.decoder.embed_positions.register_forward_hook(lambda *call: counted.append(call[-1].clone()))
    with torch.no_grad():
        for cache, given in zip(caches, (None, torch.tensor([[20], [11]])), strict=True):
            net(ids, attention_mask=mask[:, :20], past_key_values=cache)
            net(ids[:, :1], attention_mask=mask, past_key_values=cache, position_ids=given)
    hook.remove()
    assert torch.equal(counted[1][0], counted[3][0]), "the row without padding is right"
    assert not torch.equal(counted[1][1], counted[3][1])


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
