"""Several prompts of one length, written together: a batch costs little more than a row of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..answer import Sampling
from ..cache import RetentionCache
from .replay import feed


@dataclass(frozen=True)
class Written:
    """What one row wrote, and what its cache held, as if it had been alone.

    Attributes:
        tokens: written, an end-of-text token included.
        kept: entries per KV head after the prompt.
        mean, peak: entries per KV head over the row's own passes.
    """

    tokens: tuple[int, ...]
    kept: float
    mean: float
    peak: float


def write_together(
    model: Any, tokenizer: Any, prompts: Tensor, cache: RetentionCache, *, room: int, samplings: Sequence[Sampling]
) -> list[Written]:
    """Writes on from each of ``prompts``; draws are those of ``model.generate`` on the row alone with its seed.

    Rows of one length evict at the same passes as each does alone, so that a row's tokens differ from its solo run's
    only where rounding (which depends on the batch) turns a draw.

    Args:
        model, tokenizer: from :func:`kvretain.load_model`.
        prompts: ``(B, n)`` int64, no padding.
        cache: an empty one.
        room: most tokens to write.
        samplings: of each row; equal but for their seeds.
    """
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    one = samplings[0]
    warp = LogitsProcessorList()
    if one.temperature:
        warp.append(TemperatureLogitsWarper(one.temperature))
        if one.top_k is not None:
            warp.append(TopKLogitsWarper(one.top_k))
        if one.top_p is not None and one.top_p < 1:
            warp.append(TopPLogitsWarper(one.top_p))
    generators = [torch.Generator(model.device).manual_seed(sampling.seed) for sampling in samplings]
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
    filler = tokenizer.eos_token_id or 0
    written: list[list[int]] = [[] for _ in prompts]
    writing, new = list(range(len(prompts))), prompts.to(model.device)
    while writing and len(written[writing[0]]) < room:
        logits = feed(model, new, cache, logits=1)[:, -1].float()
        with torch.inference_mode():
            scores = warp(new, logits)  # type: ignore[arg-type]
            probabilities = scores.softmax(-1) if one.temperature else None
            for row in writing:
                if probabilities is None:
                    token = int(scores[row].argmax())
                else:
                    token = int(torch.multinomial(probabilities[row : row + 1], 1, generator=generators[row]))
                written[row].append(token)
        writing = [row for row in writing if written[row][-1] not in ends]
        new = torch.tensor([[tokens[-1] if row in writing else filler] for row, tokens in enumerate(written)])
    held = [sum(step.kept) / len(step.kept) for step in cache.trace]
    peaks = [max(step.kept) for step in cache.trace]
    return [Written(tuple(t), held[0], sum(held[: len(t)]) / len(t), max(peaks[: len(t)])) for t in written]
