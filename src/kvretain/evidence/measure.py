"""What one example says about each policy and size, from one prefill."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache import RetentionCache
from ..policy import Policy
from ..scores.random import Random
from ..tasks.example import Continuation, Example, Written
from .grading import Verdict, grade
from .replay import compressed, forward, record, recording_key


@dataclass(frozen=True)
class Case:
    """A policy in text and its size: the fraction removed, or the budget of entries per head; neither for ``full``."""

    policy: str
    ratio: float | None = None
    budget: int | None = None


FULL = Case("full")


@dataclass(frozen=True)
class Measurement:
    """One row: what one example says about one case.

    Attributes:
        task, index: the example.
        policy, ratio, budget: the case.
        context_tokens: tokens that were compressed; ``kept`` entries per KV head and layer after that (their mean).
        nll: mean negative log-likelihood of the target's tokens, in nats, teacher-forced.
        kl: continuations and decoding: mean KL divergence of the next-token distribution from the full cache's, in
            nats.
        exact: needles, word problems and GSM8K: whether the greedy reply is right.
        prefix: whether the greedy reply begins with the target's answer, token by token.
        reply: the greedy reply.
        seconds: this case alone; ``prefill_seconds`` is what the whole example shared.
        mean_cache, peak_cache: what is fed through a budget only: entries per KV head after each pass, their mean over
            all passes and layers and their largest number (``Trace.mean_length`` and ``peak_length``).
        token_nll, token_kl: decoding only: the values behind ``nll`` and ``kl``, one list a passage.
        score: LongBench and RULER only: the greedy reply's score in [0, 1] by the benchmark's metric.
    """

    task: str
    index: int
    policy: str
    ratio: float | None
    context_tokens: int
    kept: float
    nll: float
    kl: float | None
    exact: bool | None
    prefix: bool | None
    reply: str | None
    prefill_seconds: float
    seconds: float
    budget: int | None = None
    mean_cache: float | None = None
    peak_cache: float | None = None
    token_nll: list[list[float]] | None = None
    token_kl: list[list[float]] | None = None
    score: float | None = None

    @property
    def case(self) -> Case:
        """What was measured."""
        return Case(self.policy, self.ratio, self.budget)


@dataclass(frozen=True)
class Pieces:
    """Token ids of a prompt in three parts, tokenized apart, and of the target."""

    context: list[int]
    question: list[int]
    opening: list[int]
    target: list[int]


def cut(tokenizer: Any, example: Example) -> Pieces:
    """The example's prompt as the model reads it: in its chat template, if it has one and the example is not raw.

    The context's part holds everything before the question; the opening's part everything after it.

    Raises:
        ValueError: the chat template changes the question.
    """
    whole = isinstance(example, Written)
    question, target, joint = example.question, example.target, "" if example.raw or whole else "\n\n"
    chat = not example.raw and getattr(tokenizer, "chat_template", None) is not None
    if chat:
        question = question.rstrip()  # many templates strip a message
        message = {"role": "user", "content": f"{example.context}{joint}{question}"}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        text += example.opening
    else:
        text = f"{example.context}{joint}{question}{joint and chr(10)}{example.opening}"
    start = text.rfind(question)
    if start < 0:
        raise ValueError(f"the tokenizer's chat template changes the question of example {example.index}")
    if whole and ((chat and not example.opening) or text[-1].isspace()):
        target = target.lstrip()  # nothing stands before it that it could be parted from by a blank

    def ids(piece: str, special: bool = False) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=special)["input_ids"])

    stop = start + len(question)
    return Pieces(ids(text[:start], not chat), ids(text[start:stop]), ids(text[stop:]), ids(target))


def measure(
    model: Any,
    tokenizer: Any,
    example: Example | Continuation,
    cases: Sequence[Case],
    *,
    aware: bool = False,
    generate: bool = True,
    report: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Prefills the example's context once and measures every case on a copy of that cache.

    The context is compressed in one go; what follows (question, opening, reply, or the text's continuation) is kept
    whole, so that cases differ by nothing but the context's entries.

    Args:
        model, tokenizer: from :func:`kvretain.load_model`.
        example: from :mod:`kvretain.tasks`.
        cases: policies and sizes.
        aware: the question is compressed together with the context, so that policies which read the last queries see
            it; by default it comes afterwards.
        generate: whether to write greedy replies. Without them ``exact`` says whether the greedy reply *begins* with
            the target's answer, which teacher forcing alone can tell; replies of benchmarks are not judged then.
        report: called after each case.
    """
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        groups.setdefault(recording_key(Policy.parse(case.policy)), []).append(case)
    rows = []
    for group in groups.values():
        if isinstance(example, Continuation):
            measured = _continuation(model, example, group)
        else:
            measured = _question(model, tokenizer, example, group, aware, generate)
        for row in measured:
            rows.append(row)
            report()
    order = {case: place for place, case in enumerate(cases)}
    return sorted(rows, key=lambda row: order[row.case])


def policy_of(case: Case, index: int) -> Policy:
    """The case's policy; ``random`` draws anew for each example."""
    policy = Policy.parse(case.policy)
    if isinstance(policy.scorer, Random):
        policy = dataclasses.replace(policy, scorer=dataclasses.replace(policy.scorer, seed=policy.scorer.seed + index))
    return policy


def _recorded(model: Any, ids: Sequence[int], cases: Sequence[Case]) -> tuple[RetentionCache, float]:
    began = time.perf_counter()
    cache = record(model, ids, [Policy.parse(case.policy) for case in cases])
    return cache, time.perf_counter() - began


def _continuation(model: Any, example: Continuation, cases: Sequence[Case]) -> Iterator[Measurement]:
    recorded, seconds = _recorded(model, example.context, cases)
    fed, targets = example.following[:-1], torch.tensor(example.following[1:], device=model.device)
    full = forward(model, fed, compressed(recorded, Policy(None), None)).log_softmax(-1)
    for case in cases:
        began = time.perf_counter()
        cache = compressed(recorded, policy_of(case, example.index), case.ratio, case.budget)
        kept = kept_by(cache)
        own = full if case == FULL else forward(model, fed, cache).log_softmax(-1)
        with torch.inference_mode():
            nll = -own.gather(1, targets[:, None]).mean().item()
            kl = 0.0 if case == FULL else (full.exp() * (full - own)).sum(-1).mean().item()
        yield Measurement(
            example.task, example.index, case.policy, case.ratio, len(example.context), kept, nll, kl,
            None, None, None, seconds, time.perf_counter() - began, case.budget,
        )  # fmt: skip


def _question(
    model: Any, tokenizer: Any, example: Example, cases: Sequence[Case], aware: bool, generate: bool
) -> Iterator[Measurement]:
    pieces = cut(tokenizer, example)
    first = pieces.context + pieces.question if aware else pieces.context
    rest = pieces.opening if aware else pieces.question + pieces.opening
    if not rest:  # the question ends the prompt: its last token is fed to the compressed cache
        first, rest = first[:-1], first[-1:]
    target = torch.tensor(pieces.target, device=model.device)
    recorded, seconds = _recorded(model, first, cases)
    for case in cases:
        began = time.perf_counter()
        cache = compressed(recorded, policy_of(case, example.index), case.ratio, case.budget)
        kept = kept_by(cache)
        asked = None
        if generate:
            logits = forward(model, rest, cache, logits=1)
            asked = copy.deepcopy(cache)
            if len(target) > 1:
                logits = torch.cat([logits, forward(model, pieces.target[:-1], cache)])
        else:
            logits = forward(model, rest + pieces.target[:-1], cache, logits=len(target))
        nll, agreed = forced(logits, target)
        if isinstance(example, Written):
            judged: tuple[bool | None, float | None, str | None] = None, None, None
            if asked is not None:
                judged = _judged(model, tokenizer, asked, example, int(logits[0].argmax()))
            exact, score, written = judged
            yield Measurement(
                example.task, example.index, case.policy, case.ratio, len(first), kept, nll, None,
                exact, None, written, seconds, time.perf_counter() - began, case.budget, score=score,
            )  # fmt: skip
            continue
        reply = tokenizer.decode(pieces.target[:agreed], skip_special_tokens=True)
        prefix = example.grade(reply)
        if not prefix and asked is not None:
            other = [int(logits[agreed].argmax())] if agreed < len(target) else []
            begun = pieces.target[:agreed] + other
            several = len(example.answers) > 1
            over = _never if several else _past_first_line
            reply, _ = _greedy(model, tokenizer, asked, begun, (1 + several) * len(target) + 8, over)
        yield Measurement(
            example.task, example.index, case.policy, case.ratio, len(first), kept, nll, None,
            prefix or example.grade(reply), prefix, reply, seconds, time.perf_counter() - began, case.budget,
        )  # fmt: skip


def forced(logits: Tensor, target: Tensor) -> tuple[float, int]:
    """What logits ``(n, V)`` say of the teacher-forced reply ``target (n,)``: its mean negative log-likelihood, and how
    many of its tokens the greedy reply begins with."""
    with torch.inference_mode():
        nll = torch.nn.functional.cross_entropy(logits, target).item()
        # Teacher forcing shows the greedy reply up to the first token that differs from the target.
        agreed = int((logits.argmax(-1) == target).long().cumprod(0).sum())
    return nll, agreed


def _never(text: str) -> bool:
    return False


def _past_first_line(text: str) -> bool:
    return "\n" in text.lstrip()


def _judged(
    model: Any, tokenizer: Any, cache: RetentionCache, example: Written, first: int
) -> tuple[bool | None, float | None, str]:
    """Whether the greedy reply that begins with the token ``first`` is right, or else its score; and the reply."""
    reply, tokens = _greedy(model, tokenizer, cache, [first], example.most, example.finished)
    reply = example.trimmed(reply)
    if example.metric is not None:
        return None, example.metric(reply, example.answers), reply
    return grade(reply, example.answers[0], cut_off=tokens >= example.most) is Verdict.RIGHT, None, reply


def _greedy(
    model: Any, tokenizer: Any, cache: RetentionCache, begun: list[int], most: int, over: Callable[[str], bool]
) -> tuple[str, int]:
    """The greedy reply that starts with ``begun``, up to ``most`` tokens, the end of the text, or where it is ``over``;
    and its tokens."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
    tokens, new = list(begun), list(begun)
    while len(tokens) < most and new[-1] not in ends:
        if over(tokenizer.decode(tokens)):
            break
        new = [int(forward(model, new, cache, logits=1).argmax())]
        tokens += new
    return str(tokenizer.decode(tokens, skip_special_tokens=True)), len(tokens)


def kept_by(cache: RetentionCache) -> float:
    """Entries per KV head that the cache holds now, the mean over its layers."""
    *_, step = cache.trace
    return sum(step.kept) / len(step.kept)
