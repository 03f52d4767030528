"""How much of its task a laboratory animal can do with a full cache, and where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ..evidence.grading import Verdict, grade_exact
from .chains import NAMES, Chain
from .vocabulary import check


@dataclass(frozen=True)
class Recall:
    """A value that a reply recalled.

    Attributes:
        distance: words since it last stood in the text.
        right: whether it is what stood there.
    """

    distance: int
    right: bool


@dataclass(frozen=True)
class Attempt:
    """A chain and what became of it.

    Attributes:
        chain: the problem; ``reply``: what the model wrote.
        verdict: of the final answer.
        recalls: all values that the reply gives again.
    """

    chain: Chain
    reply: str
    verdict: Verdict
    recalls: tuple[Recall, ...]

    @property
    def right(self) -> bool:
        """Whether the final answer is right."""
        return self.verdict == Verdict.RIGHT

    @property
    def faultless(self) -> bool:
        """Whether every word is."""
        return self.reply.split() == self.chain.solution.split()


def recalls(prompt: str, reply: str) -> list[Recall]:
    """The recalls in a reply: each time that a digit follows a name which a digit has followed before.

    The text is taken at its word: a value that was worked out wrongly is recalled rightly if it is the same again.

    Example:
        >>> recalls("a 4 ; b 7 : x = a + b ? x :", "x = a + b : a 4 ; b 2 ; x 6 ;")
        [Recall(distance=20, right=True), Recall(distance=20, right=False)]
    """
    words = f"{prompt} {reply}".split()
    begin = len(prompt.split())
    known: dict[str, tuple[int, str]] = {}
    found = []
    for place, (name, digit) in enumerate(pairwise(words)):
        if name in NAMES and digit.isdecimal():
            if name in known and place + 1 >= begin:
                before, stood = known[name]
                found.append(Recall(place - before, digit == stood))
                known[name] = place, stood
            else:
                known[name] = place, digit
    return found


def solve(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Chain],
    *,
    batch: int = 50,
    report: Callable[[int], None] = lambda done: None,
) -> list[Attempt]:
    """Greedy replies to chains of one length, with a full cache.

    Args:
        model, tokenizer: from :func:`kvretain.load_model`.
        problems: of equal numbers of given variables and steps, so that batches need no padding.
        batch: how many at once.
        report: receives how many are done.

    Raises:
        ValueError: the model has another vocabulary.
    """
    check(tokenizer, model.config.vocab_size, "the model")
    attempts: list[Attempt] = []
    for start in range(0, len(problems), batch):
        asked = problems[start : start + batch]
        ids = torch.tensor(tokenizer([problem.prompt for problem in asked])["input_ids"], device=model.device)
        room = len(asked[0].solution.split()) + 1
        with torch.inference_mode():
            written = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=room, do_sample=False
            )[:, ids.shape[1] :]  # fmt: skip
        for problem, row in zip(asked, written, strict=True):
            reply = tokenizer.decode(row, skip_special_tokens=True)
            verdict = grade_exact(reply, problem.answer, cut_off=True)
            attempts.append(Attempt(problem, reply, verdict, tuple(recalls(problem.prompt, reply))))
        report(len(attempts))
    return attempts


EDGES = (32, 64, 128, 256)


def by_distance(attempts: Iterable[Attempt]) -> dict[str, list[bool]]:
    """Whether recalls were right, by their distance: up to 32 words, up to 64, 128 and 256, and beyond."""
    attempts, found = list(attempts), dict[str, list[bool]]()
    starts = [1, *(edge + 1 for edge in EDGES)]
    for low, high in zip(starts, [*EDGES, None], strict=True):
        inside = [
            recall.right
            for attempt in attempts
            for recall in attempt.recalls
            if recall.distance >= low and (high is None or recall.distance <= high)
        ]
        if inside:
            found[f"{low}-{high}" if high else f"over {EDGES[-1]}"] = inside
    return found
