"""Which models a RetentionCache serves; what it cannot serve is refused by name, before any work is done."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

OLDEST = (5, 17)

UNTOUCHED = (DynamicSlidingWindowLayer, LinearAttentionLayer)
"""Layers that are bounded already; they stay transformers' own."""


def check_transformers() -> None:
    """Raises ImportError below transformers 5.17, the oldest release that the cache is tested with."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2] if part.isdigit())
    if version < OLDEST:
        raise ImportError(
            f"RetentionCache needs transformers>=5.17, found {transformers.__version__}: pip install -U transformers"
        )


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
    if not layers:
        raise ValueError(f"{kind} models are not supported: transformers knows no cache layers for them")
    for index, layer in enumerate(layers):
        if type(layer) is not DynamicLayer and type(layer) not in UNTOUCHED:
            raise ValueError(f"{kind} models are not supported: layer {index} needs a {type(layer).__name__}")
    if not any(type(layer) is DynamicLayer for layer in layers):
        raise ValueError(
            f"{kind}: no layer of this model has full attention (all are {type(layers[0]).__name__}), so there is nothing to "
            "compress: use transformers' own cache"
        )
    return layers


_ALIBI = "their attention bias depends on the distance in the cache, which evictions change (ALiBi)"

REFUSED = {
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "falcon": _ALIBI,
}
"""Model types whose attention would be silently wrong after an eviction."""
