"""What one example says about each policy and size when its text is fed through the budget, as in long-running use.

:mod:`~kvretain.evidence.measure` compresses a finished context once; here the cache evicts again and again while the
text comes in, so cases share no prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cache import RetentionCache
from ..tasks.example import Example, Passages
from .measure import FULL, Case, Measurement, cut, forced, kept_by, policy_of
from .replay import feed, forward, prefill
from .summaries import read_summarising


def measure_streamed(
    model: Any,
    tokenizer: Any,
    example: Example | Passages,
    cases: Sequence[Case],
    *,
    chunk: int = 64,
    every: int = 128,
    summary: int = 0,
) -> Iterator[Measurement]:
    """Measures one case after the other, each in a cache of its own.

    *Questions.* The context is fed in passes of ``chunk`` tokens, each of which ends with no more than the budget, then
    question and opening in one more pass, then the right reply, teacher-forced in one pass: as decoding it, if it is
    shorter than ``every``. ``exact`` says whether the greedy reply would begin with the answer.

    *Passages.* The rows of a batch: the prompt in one pass, then every token in a pass of its own. Each step's
    prediction is compared with that of a full cache that is fed in the same way, so that a policy which has evicted
    nothing yet has a KL of exactly 0. Takes memory for the full cache's logits, as many numbers in the model's type as
    passages times tokens that follow times the vocabulary.

    Args:
        model, tokenizer: from :func:`kvretain.load_model`.
        example: from :mod:`kvretain.tasks`.
        cases: policies and sizes.
        chunk: tokens of a pass; what a context has left over comes first, so that the others are whole.
        every: the cache's cadence in single-token passes.
        summary: of questions, with the policy ``full``: tokens of the summaries that keep the context within the
            budget, see :func:`~kvretain.evidence.summaries.read_summarising`; 0 writes none.
    """
    if isinstance(example, Passages):
        return _decoding(model, example, cases, every)
    return _recall(model, tokenizer, example, cases, chunk, every, summary)


def _cache(model: Any, case: Case, index: int, every: int) -> RetentionCache:
    policy = policy_of(case, index)
    return RetentionCache.for_model(model, policy, budget=case.budget, ratio=case.ratio, every=every)


def _recall(
    model: Any, tokenizer: Any, example: Example, cases: Sequence[Case], chunk: int, every: int, summary: int
) -> Iterator[Measurement]:
    pieces = cut(tokenizer, example)
    target = torch.tensor(pieces.target, device=model.device)
    first = len(pieces.context) % chunk
    starts = [0] * bool(first) + list(range(first, len(pieces.context), chunk))
    for case in cases:
        began = time.perf_counter()
        reading = None
        if summary and case.budget is not None:
            reading = read_summarising(
                model, tokenizer, pieces.context, budget=case.budget, summary=summary, chunk=chunk
            )
            cache = reading.cache
        else:
            cache = _cache(model, case, example.index, every)
            for start, stop in zip(starts, [*starts[1:], len(pieces.context)], strict=True):
                prefill(model, pieces.context[start:stop], cache)
        kept = kept_by(cache)
        logits = forward(model, pieces.question + pieces.opening, cache, logits=1)
        if len(target) > 1:
            logits = torch.cat([logits, forward(model, pieces.target[:-1], cache)])
        lengths = cache.trace.mean_length, cache.trace.peak_length
        if reading is not None:
            lengths = reading.lengths()
        nll, agreed = forced(logits, target)
        reply = tokenizer.decode(pieces.target[:agreed], skip_special_tokens=True)
        exact = example.grade(reply)
        yield Measurement(
            example.task, example.index, case.policy, case.ratio, len(pieces.context), kept, nll, None,
            exact, exact, reply, 0.0, time.perf_counter() - began, case.budget,
            *lengths,
        )  # fmt: skip


def _decoding(model: Any, example: Passages, cases: Sequence[Case], every: int) -> Iterator[Measurement]:
    tokens, prompt = torch.tensor(example.rows, device=model.device), example.prompt
    targets = tokens[:, prompt + 1 :]

    def steps(cache: RetentionCache) -> Iterator[Tensor]:
        """The predictions ``(B, V)`` of the tokens at ``prompt + 1`` and later."""
        prefill(model, tokens[:, :prompt], cache)
        for place in range(prompt, tokens.shape[1] - 1):
            yield feed(model, tokens[:, place : place + 1], cache)[:, 0]

    began = time.perf_counter()
    whole = _cache(model, FULL, example.index, every)
    reference = list(steps(whole))
    shared = time.perf_counter() - began
    for case in cases:
        began = time.perf_counter()
        cache = whole if case == FULL else _cache(model, case, example.index, every)
        predictions = reference if case == FULL else steps(cache)
        nll, kl = torch.empty(2, *targets.shape, device=model.device)
        with torch.inference_mode():
            for at, (prediction, logits) in enumerate(zip(predictions, reference, strict=True)):
                own, full = prediction.float().log_softmax(-1), logits.float().log_softmax(-1)
                nll[:, at] = -own.gather(1, targets[:, at : at + 1])[:, 0]
                kl[:, at] = (full.exp() * (full - own)).sum(-1)
        yield Measurement(
            example.task, example.index, case.policy, case.ratio, tokens.shape[1] - 1, kept_by(cache),
            nll.mean().item(), kl.mean().item(), None, None, None, shared, time.perf_counter() - began, case.budget,
            cache.trace.mean_length, cache.trace.peak_length, nll.tolist(), kl.tolist(),
        )  # fmt: skip
