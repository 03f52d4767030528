"""Tiny random models, built offline from configurations: one of each attention family that the cache must serve.

Their attention is sharp (large projections), so that hiding a single entry moves the logits visibly; 4 query heads
share 2 key/value heads; weights are seeded, so a model is the same in every process.
"""

from __future__ import annotations

import contextlib
import inspect
from functools import cache as memoise

import torch
from torch import Tensor, nn

VOCAB = 96

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_SLIDING = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 8,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 16}

# name -> (configuration class, model class, configuration, attention implementations that transformers offers for it)
MODELS: dict[str, tuple[str, str, dict, tuple[str, ...]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _SMALL, ("sdpa", "eager")),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _SMALL, ("sdpa", "eager")),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _SMALL | {"head_dim": 16}, ("sdpa", "eager")),
    "mistral": ("MistralConfig", "MistralForCausalLM", _SMALL | {"sliding_window": None}, ("sdpa", "eager")),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _SMALL, ("sdpa", "eager")),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _SMALL | _SLIDING | {"query_pre_attn_scalar": 16},
        ("sdpa", "eager"),
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _SMALL | _SLIDING | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 4.0},
        ("eager",),
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        _SMALL | _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN},
        ("eager",),
    ),
}

_FOUR = _SMALL | {"num_hidden_layers": 4}


def _hybrid(state: str, **changes: object) -> dict:
    return _FOUR | {"layer_types": [state, "full_attention"] * 2} | changes


_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_d_state": 8, "mamba_expand": 2}
_MAMBA2 = _MAMBA | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}

# As MODELS: every other layer carries a state instead of keys and values.
HYBRIDS: dict[str, tuple[str, str, dict, tuple[str, ...]]] = {
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", _hybrid("conv"), ("sdpa", "eager")),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        _hybrid("linear_attention", **_DELTA, **_EXPERTS),
        ("sdpa", "eager"),
    ),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _hybrid("linear_attention", **_DELTA), ("sdpa", "eager")),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _hybrid("linear_attention", **_MAMBA2, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48),
        ("sdpa", "eager"),
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        _FOUR | _MAMBA2 | {"attn_layer_indices": [1, 3]},
        ("sdpa", "eager"),
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        _FOUR
        | _MAMBA
        | {
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        ("sdpa", "eager"),
    ),
}


def build(name: str, *, attention: str | None = None, dtype: torch.dtype = torch.float32, **changes: object):
    """A fresh model. ``changes`` are laid over its configuration."""
    import transformers

    config_class, model_class, settings, attentions = (MODELS | HYBRIDS)[name]
    config = getattr(transformers, config_class)(**(settings | changes))
    config._attn_implementation = attention or attentions[0]
    rng = torch.get_rng_state()
    torch.manual_seed(sum(map(ord, name)))
    try:
        model = getattr(transformers, model_class)(config)
        with torch.no_grad():
            for label, parameter in model.named_parameters():
                _sharpen(label, parameter)
    finally:
        torch.set_rng_state(rng)
    return model.to(dtype).eval()


def _sharpen(label: str, parameter: nn.Parameter) -> None:
    """Weights whose initial value would make a test blind: flat attention, zero biases, silent sinks."""
    if label.endswith(
        ("q_norm.weight", "k_norm.weight")
    ):  # normalised queries and keys: the norm's gain is the sharpness
        gain = torch.linspace(1.0, 3.0, len(parameter))  # uneven, or all keys would have one norm
        parameter.copy_(gain - 1 if parameter.mean() == 0 else gain)  # Gemma stores gain - 1
    elif label.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
        parameter.normal_(std=0.2)
    elif label.endswith("self_attn.sinks"):
        parameter.normal_(std=0.5)
    elif label.endswith("embed_tokens.weight"):
        parameter[0].normal_(std=0.2)  # the pad token: a padding entry that leaks must be seen


@memoise
def model(name: str, attention: str | None = None, dtype: torch.dtype = torch.float32):
    """A shared model; tests must leave it as it was."""
    return build(name, attention=attention, dtype=dtype)


def tokens(seed: int, *shape: int) -> Tensor:
    """Random token ids, never the padding token."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def distinct(seed: int, count: int) -> Tensor:
    """``count`` different token ids: a repeated token has equal key norms in the first layer, ties up to rounding."""
    return torch.randperm(VOCAB - 1, generator=torch.Generator().manual_seed(seed))[:count] + 1


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Stacks token rows on their right ends: ids (B, T) and mask (B, T)."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row.new_zeros(width - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows])
    return ids, mask.long()


def positions_of(mask: Tensor) -> Tensor:
    """Position of each column among its row's real tokens, as ``generate`` computes it; padding columns get 0."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


@torch.no_grad()
def forward(model, ids: Tensor, cache, *, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """Logits (B, q, V) of one forward; ``mask`` (B, seen + q) covers all columns so far."""
    if positions is None and mask is not None:
        positions = positions_of(mask)[:, -ids.shape[1] :]
    return model(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{cache_argument(model): cache}
    ).logits


def cache_argument(model) -> str:
    """Transformers renamed the argument of ``forward`` and ``generate`` between the releases that the suite runs on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@contextlib.contextmanager
def one_thread():
    """Torch on one thread: the suite's kernels are tiny and bitwise comparisons should not depend on a thread count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
