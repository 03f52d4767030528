"""Training a model's gates (:mod:`kvretain.gate`) on the scores that KVzip gives the model's own tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import artefacts
from .gate import SIZE, Gate, LayerGate, shape_of
from .scores import KVzip

FEWEST, SHORTEST = 256, 16
"""Fewest tokens that gates are trained on, and that a context may be told to have."""


def train_gate(
    model: Any,
    tokenizer: Any,
    text: str | Sequence[str],
    *,
    tokens: int = 16384,
    context: int = 512,
    steps: int = 100,
    batch: int = 512,
    rate: float = 3e-3,
    decay: float = 0.1,
    seed: int = 0,
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
    stop: Callable[[], bool] = lambda: False,
) -> Gate:
    """Gates for ``model`` that guess the scores of ``kvzip``, for the scorer ``fastkvzip``.

    Each context of the text is read twice by the model (KVzip's replay); the hidden states that enter every
    full-attention layer and the scores are kept on the CPU. The model's weights do not change. The last of every ten
    contexts (of the only ones, if fewer) is held out: nothing is fitted or chosen on it.

    Source: Fast KVzip, arXiv 2601.17668, and its code: binary cross-entropy between the gate's score and KVzip's, mean
    over tokens, summed over heads and layers; a learning rate that is halved at 1/2 and at 3/4 of the steps.
    Deviations: AdamW (SGD with momentum there); the sinks start at small random vectors (at 0 there, where all of them
    stay equal) and the bias at the head's mean score; the bias counts once, as in the authors' inference code (twice in
    their training code); whole contexts are held out (every hundredth token there); thousands of tokens, not a million.

    Args:
        model: a decoder-only transformers model that :class:`~kvretain.RetentionCache` serves.
        tokenizer: its tokenizer.
        text: one text or several. More text is better: compare the held-out loss.
        tokens: at most so many tokens of it are read, at least 256.
        context: tokens of a context, about, at least 16: each text is cut evenly.
        steps: steps of the optimiser, at least 1.
        batch: tokens of a step, at least 1; drawn with repetition.
        rate: learning rate, finite and at least 0; at 0 nothing is learnt.
        decay: weight decay, finite and at least 0.
        seed: of the initial weights and the batches; torch's own random numbers are left alone.
        report: receives the stage (``"reading"``, ``"training"``), what is done and the total.
        stop: asked after every step; True ends the training early, with what has been learnt.

    Returns:
        The gates; ``metadata`` says how they were trained and, over the held-out tokens, ``held_out_loss`` (nats per
        token and head), ``constant_loss`` (the same for each head's mean score), ``least_loss`` (the same for KVzip's
        own scores, which no gate can undercut) and ``rank_correlation`` (Spearman's, mean over heads).

    Raises:
        ValueError: a number out of range, a text too short, a model that cannot be served, or scores that are NaN.
    """
    from .cache import support

    counts = (("tokens", tokens, FEWEST), ("context", context, SHORTEST), ("steps", steps, 1), ("batch", batch, 1))
    for name, value, least in counts:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is a whole number of at least {least}, not {value!r}")
    for name, number in (("rate", rate), ("decay", decay)):
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise ValueError(f"{name} is a finite number of at least 0, not {number!r}")
    decoder = support.decoder_of(model)
    contexts = _contexts(tokenizer, [text] if isinstance(text, str) else text, tokens, context)
    data, training = [], model.training
    model.eval()
    try:
        for at, ids in enumerate(contexts):
            report("reading", at, len(contexts))
            data.append(_read(model, decoder, ids))
    finally:
        model.train(training)
    report("reading", len(contexts), len(contexts))
    every = min(10, len(data))
    held = [part for at, part in enumerate(data) if (at + 1) % every == 0]
    fitted = [part for at, part in enumerate(data) if (at + 1) % every]
    layers = sorted(data[0].scores)
    hidden, scores = _joined(fitted, layers)
    rng = torch.Generator().manual_seed(seed)
    shape = shape_of(model.config, len(layers))
    width, group = shape["hidden size"], shape["query heads per KV head"]
    gates = nn.ModuleList([_fresh(width, group, target, rng) for target in scores]).to(model.device)
    made = _fit(gates, hidden, scores, steps, batch, rate, decay, rng, report, stop)
    gates.requires_grad_(False)
    metadata = {
        "model": str(getattr(model.config, "_name_or_path", "") or model.config.model_type),
        "model_type": model.config.model_type,
        "fingerprint": artefacts.fingerprint(model),
        "layers": ",".join(map(str, layers)),
        **{what.replace(" ", "_"): str(value) for what, value in shape.items()},
        "dimension": str(SIZE),
        "sinks": str(SIZE),
        "tokens": str(scores[0].shape[1]),
        "held_out_tokens": str(sum(part.tokens for part in held)),
        "contexts": str(len(contexts)),
        "text": hashlib.sha256(torch.cat(contexts, 1).cpu().numpy().tobytes()).hexdigest()[:16],
        "scorer": "kvzip",
        "steps": str(made),
        "batch": str(batch),
        "rate": str(rate),
        "decay": str(decay),
        "seed": str(seed),
        **_judge(gates, held, scores, layers),
    }
    return Gate(tuple(gates.cpu()), metadata)  # type: ignore[arg-type]


def _contexts(tokenizer: Any, texts: Sequence[str], tokens: int, context: int) -> list[Tensor]:
    """Token ids ``(1, n)`` of each context."""
    found: list[Tensor] = []
    for text in texts:
        # The tokenizer warns of texts that are longer than the model's context; they are cut.
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :tokens]
        tokens -= ids.shape[1]
        if ids.shape[1]:
            pieces = max(1 if found else 2, round(ids.shape[1] / context))
            found += ids.tensor_split(pieces, 1)
        if tokens <= 0:
            break
    total = sum(ids.shape[1] for ids in found)
    if total < FEWEST:
        raise ValueError(f"the text has {total} tokens; training gates needs at least {FEWEST}")
    return found


@dataclass(frozen=True)
class _Part:
    """One context, by layer: hidden states ``(n, E)`` and KVzip's scores ``(H, n)``."""

    hidden: dict[int, Tensor]
    scores: dict[int, Tensor]

    @property
    def tokens(self) -> int:
        return next(iter(self.scores.values())).shape[1]


@dataclass(frozen=True)
class _Recorder(KVzip):
    """KVzip that keeps its scores."""

    seen: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def score(self, view: Any) -> Tensor:
        scores = super().score(view)
        self.seen[view.layer] = scores[0].cpu()
        return scores


def _read(model: Any, decoder: Any, ids: Tensor) -> _Part:
    """Runs ``ids (1, n)`` through KVzip. KVzip's first tokens, which every softmax includes, are left out."""
    from .cache import RetentionCache
    from .cache.support import keyword
    from .policy import Policy

    recorder = _Recorder(chunk=ids.shape[1])
    cache = RetentionCache.for_model(model, Policy(recorder), ratio=0.5)
    with torch.no_grad(), _watched(decoder) as hidden:
        decoder(input_ids=ids.to(model.device), **keyword(decoder, cache))
    first = recorder.first
    part = _Part(
        {layer: hidden[layer][0, first:] for layer in recorder.seen},
        {layer: scores[:, first:] for layer, scores in recorder.seen.items()},
    )
    if not all(scores.isfinite().all() for scores in part.scores.values()):
        raise ValueError("the model's attention is NaN or infinite on this text, so there is nothing to learn from it")
    return part


@contextmanager
def _watched(decoder: Any) -> Iterator[dict[int, Tensor]]:
    """Collects by layer what first enters each attention module: the pass itself; the replay comes later."""
    from .cache import support

    seen: dict[int, Tensor] = {}

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.layer_idx not in seen:
            seen[module.layer_idx] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).cpu()

    handles = [
        module.register_forward_pre_hook(keep, with_kwargs=True) for module in support.attentions_of(decoder).values()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _joined(parts: Sequence[_Part], layers: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Hidden states ``(n, E)`` and scores ``(H, n)`` of all ``parts``, layer by layer; takes the hidden states out of
    the parts, since they are large."""
    hidden = [torch.cat([part.hidden.pop(layer) for part in parts]) for layer in layers]
    return hidden, [torch.cat([part.scores[layer] for part in parts], 1) for layer in layers]


def _fresh(width: int, group: int, scores: Tensor, rng: torch.Generator) -> LayerGate:
    """An untrained gate for KV heads with these ``scores (H, n)``."""
    heads = scores.shape[0]
    with torch.device("meta"):
        gate = LayerGate(width, heads, group)
    gate.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in (gate.q_proj.weight, gate.q_proj.bias, gate.k_proj.weight):
            parameter.uniform_(-(width**-0.5), width**-0.5, generator=rng)
        for norm in (gate.q_norm, gate.k_norm):
            norm.weight.fill_(1.0)
        gate.k_base.normal_(std=0.1, generator=rng)
        # A token's own logit starts where the score is the head's mean if it and the sinks' are about 0.
        gate.b.copy_((scores.mean(1).clamp(1e-4, 0.9).logit() + math.log(SIZE))[:, None, None].expand_as(gate.b))
    return gate


def _fit(
    gates: nn.ModuleList,
    hidden: Sequence[Tensor],
    scores: Sequence[Tensor],
    steps: int,
    batch: int,
    rate: float,
    decay: float,
    rng: torch.Generator,
    report: Callable[[str, int, int], None],
    stop: Callable[[], bool],
) -> int:
    """Trains ``gates`` in place; returns the steps made."""
    optimiser = torch.optim.AdamW(gates.parameters(), lr=rate, weight_decay=decay)
    warm, device = max(1, steps // 20), next(gates.parameters()).device
    for step in range(steps):
        report("training", step, steps)
        scale = min(1.0, (step + 1) / warm) * (1.0 if step < steps / 2 else 0.5 if step < steps * 3 / 4 else 0.25)
        for settings in optimiser.param_groups:
            settings["lr"] = rate * scale
        rows = torch.randint(len(hidden[0]), (batch,), generator=rng)
        optimiser.zero_grad()
        for gate, x, y in zip(gates, hidden, scores, strict=True):
            _loss(gate(x[None, rows].to(device)), y[None, :, rows].to(device)).sum().backward()
        optimiser.step()
        if stop():
            return step + 1
    report("training", steps, steps)
    return steps


def _loss(guess: Tensor, scores: Tensor) -> Tensor:
    """Binary cross-entropy ``(H,)`` of ``(1, H, n)``, mean over tokens."""
    return functional.binary_cross_entropy(guess, scores.clamp(0, 1), reduction="none").mean((0, 2))


@torch.no_grad()
def _judge(
    gates: nn.ModuleList, held: Sequence[_Part], fitted: Sequence[Tensor], layers: Sequence[int]
) -> dict[str, str]:
    """How well ``gates`` do on what they have not seen."""
    device = next(gates.parameters()).device
    loss, constant, least, correlation = [], [], [], []
    for gate, x, y, known in zip(gates, *_joined(held, layers), fitted, strict=True):
        guess = gate(x[None].to(device)).cpu()
        loss.append(_loss(guess, y[None]))
        constant.append(_loss(known.mean(1)[None, :, None].expand_as(guess), y[None]))
        least.append(_loss(y[None], y[None]))
        correlation.append(rank_correlation(guess[0], y))
    means = {
        "held_out_loss": loss,
        "constant_loss": constant,
        "least_loss": least,
        "rank_correlation": correlation,
    }
    return {name: f"{torch.cat(values).mean().item():.6f}" for name, values in means.items()}


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation ``(H,)`` of the rows of ``a`` and ``b (H, n)``; ties share their mean rank; 0 for a
    row without order."""
    left, right = (_ranks(x) - (x.shape[1] - 1) / 2 for x in (a, b))
    scale = left.square().sum(1) * right.square().sum(1)
    return (left * right).sum(1) / scale.sqrt().clamp_min(1e-12)


def _ranks(x: Tensor) -> Tensor:
    """Mean ranks ``(H, n)``, from 0."""
    x = x.to(torch.float64).contiguous()
    ordered = x.sort(1).values
    return (torch.searchsorted(ordered, x) + torch.searchsorted(ordered, x, right=True) - 1) / 2
