"""Which models a RetentionCache serves; what it cannot serve is refused by name, before any work is done."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import artefacts
from ..models import kv_heads
from ..policy import Policy
from ..rope import Rope
from ..scores import Scorer
from .budget import Budget
from .versions import check_transformers
from .view import CacheView

check_transformers()  # older releases lack some of these names

from transformers import DynamicCache, PreTrainedModel  # noqa: E402
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer  # noqa: E402

UNTOUCHED = (DynamicSlidingWindowLayer, LinearAttentionLayer)
"""Layers that are bounded already; they stay transformers' own."""


def decoder_of(model: Any) -> PreTrainedModel:
    """The text decoder whose passes the cache follows.

    Raises:
        ValueError: not a decoder-only text model of transformers; the message names its class.
    """
    name = type(model).__name__
    if not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise ValueError(f"RetentionCache.for_model needs a transformers model, not {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; RetentionCache serves decoder-only models")
    if model.config.get_text_config(decoder=True) is not model.config:
        raise ValueError(
            f"{name} holds several modalities and prepares its own masks, which is not supported yet: "
            "load the text model alone (AutoModelForCausalLM)"
        )
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        raise ValueError(f"{name}: its decoder {type(decoder).__name__} is not a transformers model")
    return decoder


def check_fits(policy: Policy, decoder: Any) -> None:
    """Refuses a policy whose fields do not fit this model, before any token is read.

    Raises:
        ValueError: the scorer needs more KV heads, the refiner another number of them, or a replay repeats tokens that
            the model does not know.
    """
    where = f"this {decoder.config.model_type} model"
    if policy.scorer is not None and policy.scorer.least_heads > 1:  # some configurations list heads by layer
        policy.scorer.check_heads(kv_heads(decoder.config), where)
    if policy.refiner is not None and isinstance(found := kv_heads(decoder.config), int):
        policy.refiner.check_heads(found, where)
    if "replay" in policy.needs and decoder.config.model_type in FORGETTING:
        raise ValueError(
            f"{decoder.config.model_type} models forget their states in a pass of several tokens that continues a "
            f"cache, as the second reading of {str(policy)!r} does: choose one without, such as keydiff or snapkv"
        )
    prompt = getattr(policy.scorer, "prompt", ()) if "replay" in policy.needs else ()
    known = decoder.get_input_embeddings().num_embeddings if prompt else 0
    if unknown := [token for token in prompt if token >= known]:
        raise ValueError(
            f"the policy {str(policy)!r} repeats the token {unknown[0]}, but {where} knows the tokens 0 to {known - 1}"
        )


FORGETTING = ("jamba",)
"""Model types whose linear layers begin anew in every pass of several tokens, whatever cache they are given."""


def dropping(decoder: Any, columns: int) -> str | None:
    """What to say of a pass of ``columns`` tokens without a cache, if ``generate`` has dropped the user's; or None."""
    kind, most = decoder.config.model_type, getattr(decoder.config, "original_max_position_embeddings", None)
    if kind not in DROPPING or most is None or columns <= most:
        return None
    return (
        f"{kind} models: a pass of {columns} tokens ran without the RetentionCache that was made for the model. If it "
        f"was one of generate(): that drops any cache when a text passes {most} tokens "
        "(original_max_position_embeddings), and goes on without a budget. Give a longer prompt to model(...) with the "
        "cache first, and generate from there"
    )


DROPPING = ("phi3", "phimoe")
"""Model types whose ``prepare_inputs_for_generation`` leaves the cache out where their rotation changes."""


def cache_argument(model: Any) -> str:
    """The name under which ``model.forward`` takes a cache: transformers renamed it between releases."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def keyword(model: Any, cache: Any) -> dict[str, Any]:
    """``cache`` as a keyword argument of ``model.forward`` or ``model.generate``, to be unpacked there."""
    return {cache_argument(model): cache}


def attentions_of(decoder: Any) -> dict[int, nn.Module]:
    """The attention module of each layer, by the layer's index.

    Raises:
        ValueError: they cannot be told; names the model's type.
    """
    found = [m for m in decoder.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")]
    modules = {module.layer_idx: module for module in found}
    if len(modules) != len(found) or sorted(modules) != list(range(decoder.config.num_hidden_layers)):
        raise ValueError(
            f"{decoder.config.model_type} models: this policy's scorer needs the hidden states that enter attention, "
            "and it cannot be told which modules attend"
        )
    return modules


def output_projections(decoder: Any) -> dict[int, Tensor]:
    """The weight ``(E, Hq * Dv)`` of each layer's output projection, by the layer's index.

    Raises:
        ValueError: a layer has none of the usual kind; names the model's type.
    """
    weights = {}
    for index, module in attentions_of(decoder).items():
        found = [getattr(module, name) for name in PROJECTIONS if isinstance(getattr(module, name, None), nn.Linear)]
        if len(found) != 1 or not found[0].weight.is_floating_point():
            raise ValueError(
                f"{decoder.config.model_type} models: this policy's scorer needs the output projection of attention, "
                f"and layer {index} has none of the names {', '.join(PROJECTIONS)} with plain weights"
            )
        weights[index] = artefacts.plain(found[0].weight)
    return weights


PROJECTIONS = ("o_proj", "out_proj", "dense", "wo")
"""What models call the linear layer behind attention."""


def rope_of(decoder: Any, index: int) -> Rope:
    """The rotation of layer ``index``, from the model's own module (so scaled and partial rotary are right).

    Raises:
        ValueError: the model has no rotary positions, or none that tests have taken back; names its type.
    """
    module, kind = getattr(decoder, "rotary_emb", None), decoder.config.model_type
    types = getattr(decoder.config, "layer_types", None)
    # Some rotate without such a module, and their configuration tells (GPT-J, CodeGen).
    if module is None and not any(getattr(decoder.config, name, None) for name in ("rope_parameters", "rotary_dim")):
        raise ValueError(
            f"{kind} models have no rotary positions, which this policy's scorer needs: choose one without that need, "
            "such as keydiff, snapkv, tova or knorm"
        )
    if module is None or kind not in ROTARY:
        raise ValueError(
            f"{kind} models: this policy's scorer needs to take rotary positions back, which is tested for "
            f"{', '.join(sorted(ROTARY))}"
        )
    several = "layer_type" in inspect.signature(module.forward).parameters
    given = {"layer_type": types[index]} if several and types else {}

    def cos_sin(positions: Tensor) -> tuple[Tensor, Tensor]:
        device = next((buffer.device for buffer in module.buffers()), positions.device)
        like = torch.empty(0, dtype=torch.float32, device=device)
        cos, sin = module(like, positions.to(device), **given)
        return cos.to(positions.device), sin.to(positions.device)

    name = f"{given['layer_type']}_inv_freq" if given else "inv_freq"
    return Rope.of(cos_sin, dict(module.named_buffers()).get(name))


ROTARY = frozenset(
    """
    apertus arcee bitnet cohere cwm exaone flex_olmo gemma gemma2 gemma3_text glm4_moe gpt_neox gpt_oss granite
    granitemoe granitemoeshared hyperclovax internlm3 jais2 llama minimax_m2 mistral mixtral nemotron olmo olmo2 olmo3
    olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss stablelm starcoder2
    """.split()  # noqa: SIM905
)
"""Model types whose rotation tests have taken back exactly. Angles alone do not tell a layout (GLM's look like Llama's
and are applied otherwise), and some types leave layers unrotated (SmolLM3, Cohere 2), so other types are refused where
a rotation is needed."""


def layers_of(decoder: PreTrainedModel) -> list[Any]:
    """transformers' own cache layers for the model; those of type DynamicLayer (full attention) are to be replaced.

    Raises:
        ValueError: a model type or layer kind that is not served, by name, or no full-attention layer at all.
    """
    kind = decoder.config.model_type
    reason = REFUSED.get(kind)
    if kind == "falcon" and not decoder.config.alibi:
        reason = None
    if reason:
        raise ValueError(f"{kind} models are not supported: {reason}")
    layers = DynamicCache(config=decoder.config).layers
    # A window that no context can exceed is full attention.
    context = getattr(decoder.config, "max_position_embeddings", None) or 0
    if all(type(layer) is not DynamicSlidingWindowLayer or layer.sliding_window >= context > 0 for layer in layers):
        layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in layers]
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer and type(layer) not in UNTOUCHED:
            raise ValueError(f"{kind} models are not supported: layer {index} needs a {type(layer).__name__}")
    if not any(type(layer) is DynamicLayer for layer in layers):
        raise ValueError(
            f"{kind}: no layer of this model has full attention (all are {type(layers[0]).__name__}), so every layer "
            "is bounded already and there is nothing to compress: use transformers' own cache"
        )
    return layers


_ALIBI = "their attention bias depends on the distance in the cache, which evictions change (ALiBi)"

REFUSED = {
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "falcon": _ALIBI,
    "diffllama": "they pair the values of different heads, so heads cannot keep different entries",
    "opt": "they count positions in the attention mask, which in a padded batch tells entries stored, not tokens seen",
}
"""Model types whose attention would be silently wrong after an eviction."""

VERIFIED = frozenset(
    """
    apertus arcee bamba biogpt bitnet codegen cohere cwm ernie4_5 ernie4_5_moe exaone flex_olmo gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hyperclovax internlm3 jais2 jamba lfm2 lfm2_moe llama
    minimax_m2 ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmo_hybrid olmoe persimmon phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm
    starcoder2
    """.split()  # noqa: SIM905
)
"""Model types that pass :func:`verify` in kvretain's own tests; others are verified on first use."""

_verified: set[str] = set()


def verify(model: Any) -> float:
    """Checks on ``model`` itself that an eviction is what it claims to be: the same as hiding the evicted entries.

    Feeds 20 fixed tokens and 9 more, one by one, under a budget of 10 entries that differ from head to head, and
    compares the logits (the hidden states of a model without a head) with one pass of full attention under a mask that
    hides what was evicted. About 30 tokens of work, in eval mode.

    Returns:
        The largest difference of logits, divided by the largest effect that hiding had.

    Raises:
        ValueError: the logits differ by more than a fifth of that effect, or the model cannot run this; names its type.
    """
    kind, training = model.config.model_type, model.training
    try:
        model.eval()
        error, effect = _verify(model)
    except Exception as failure:
        raise ValueError(f"{kind} models are not supported: {type(failure).__name__}: {failure}") from failure
    finally:
        model.train(training)
    if not error < 0.2 * effect:
        raise ValueError(
            f"{kind} models are not supported: after an eviction their logits differ by {error:.2g} from full "
            f"attention with the evicted entries hidden (hiding them changes logits by {effect:.2g})"
        )
    _verified.add(kind)
    return error / effect


@dataclass(frozen=True)
class _Scattered(Scorer):
    """Other entries for each head, the same in all layers, so that one mask can say what was evicted."""

    def score(self, view: CacheView) -> Tensor:
        heads = torch.arange(view.keys.shape[1], device=view.keys.device)[:, None]
        return ((view.positions + 1) * (heads + 1) * 7919 % 97).to(torch.float32)


@torch.no_grad()
def _verify(model: Any) -> tuple[float, float]:
    from .cache import RetentionCache

    cache = RetentionCache._build(model, Policy(_Scattered()), Budget(10, None, every=4, sinks=2))
    layer = cache._retained[0]
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = (torch.arange(29, device=model.device) * 7919 % (vocabulary - 3) + 3)[None]
    total = tokens.shape[1]
    argument = cache_argument(model)
    counted = "position_ids" in inspect.signature(model.forward).parameters

    def run(ids: Tensor, start: int = 0, **arguments: Any) -> Tensor:
        if counted:  # some models count anew in each pass if they are given none (Bamba)
            arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        output = model(ids, **arguments)
        return (output.logits if "logits" in output else output.last_hidden_state)[0].float()

    logits, visible = [], []
    for start, stop in [(0, 20), *((i, i + 1) for i in range(20, total))]:
        kept = layer.positions[0].cpu() if start else None
        logits.append(run(tokens[:, start:stop], start, **{argument: cache}))
        heads = layer.positions.shape[1]
        for own in range(start, stop):
            row = torch.zeros(heads, total, dtype=torch.bool)
            row[:, start : own + 1] = True
            visible.append(row if kept is None else row.scatter(1, kept, True))
    groups = model.config.num_attention_heads // heads
    mask = torch.stack(visible, 1).repeat_interleave(groups, 0).to(model.device)[None]  # (1, Hq, total, total)
    lowest = torch.finfo(model.dtype).min
    hidden = torch.zeros(mask.shape, dtype=model.dtype, device=model.device).masked_fill(~mask, lowest)
    # Layers that are not evicted: attention is causal inside its window; a state reads a mask of padding, and there is
    # none.
    window = getattr(model.config, "sliding_window", None) or total
    full = torch.full_like(hidden, lowest)
    full = full.triu(1) + full.tril(-window)
    kinds = dict(zip(getattr(model.config, "layer_types", None) or (), map(type, cache.layers), strict=False))
    masks = {LinearAttentionLayer: None, DynamicSlidingWindowLayer: full}
    given = {name: masks.get(kind, hidden) for name, kind in kinds.items()} if len(kinds) > 1 else hidden
    reference = run(tokens, attention_mask=given, use_cache=False)
    plain = run(tokens, use_cache=False)
    return (torch.cat(logits) - reference).abs().max().item(), (plain - reference).abs().max().item()


def check_verified(decoder: PreTrainedModel) -> None:
    """Raises ValueError if the type of ``decoder`` is neither in :data:`VERIFIED` nor was verified in this process."""
    kind = decoder.config.model_type
    if kind not in VERIFIED and kind not in _verified:
        raise ValueError(
            f"{kind} models are checked when the first cache that evicts is made, and this process has made none: "
            "call RetentionCache.for_model(model, 'knorm', ratio=0) once"
        )


def ensure_verified(model: Any) -> None:
    """Runs :func:`verify` once per model type that is not in :data:`VERIFIED`."""
    kind = model.config.model_type
    if kind not in VERIFIED and kind not in _verified:
        verify(model)
