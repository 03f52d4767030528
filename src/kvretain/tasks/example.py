"""What a task is: a context to compress, what follows it, and what is right."""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from .haystack import grade
from .metrics import Metric


def grade_number(reply: str, answer: str) -> bool:
    """Whether the last number in the first line of ``reply`` is ``answer``.

    Example:
        >>> grade_number(" 290 / 2 = 145.", "145"), grade_number("145 apples, so 3", "145")
        (True, False)
    """
    first = reply.strip().partition("\n")[0].replace(",", "")
    found = re.findall(r"-?\d+(?:\.\d+)?", first)
    return bool(found) and abs(float(found[-1]) - float(answer)) < 1e-6


@dataclass(frozen=True)
class Example:
    """A question about a context.

    Attributes:
        task, index: which task, and which of its examples.
        context: the text that gets compressed.
        question: what is asked.
        opening: how the reply begins; it is given to the model.
        answers: what a right reply contains, all of them.
        target: the reply that is teacher-forced after ``opening``; it contains the answers.
        numeric: the reply's last number is its answer, see :func:`grade_number`.
        raw: the context is followed by the question as it is, without a chat template.
    """

    task: str
    index: int
    context: str
    question: str
    opening: str
    answers: tuple[str, ...]
    target: str
    numeric: bool = False
    raw: bool = False

    def grade(self, reply: str) -> bool:
        """Whether ``reply`` is right: it contains all answers as whole words; for ``svamp``, its last number is the
        answer."""
        if self.numeric:
            return grade_number(reply, self.answers[0])
        return all(grade(reply, answer) for answer in self.answers)


@dataclass(frozen=True)
class Written(Example):
    """An example of a benchmark, whose reply is written to its end and judged as a whole.

    Context, question and opening hold all of the prompt's words and blanks: a chat template may stand around them, but
    nothing between them.

    Attributes:
        most: tokens of a reply.
        stops: a reply ends before the first of these texts.
        metric: gives the reply's score; None if it is right or wrong by its boxed final answer, see
            :func:`kvretain.evidence.grade`.
    """

    most: int = 64
    stops: tuple[str, ...] = ()
    metric: Metric | None = None

    def finished(self, reply: str) -> bool:
        """Whether ``reply`` holds one of :attr:`stops`."""
        return any(stop in reply for stop in self.stops)

    def trimmed(self, reply: str) -> str:
        """``reply`` up to the first of :attr:`stops`."""
        return reply[: min((at for stop in self.stops if (at := reply.find(stop)) >= 0), default=len(reply))]


@dataclass(frozen=True)
class Continuation:
    """A text to continue: token ids of a context and of what follows it."""

    task: str
    index: int
    context: tuple[int, ...]
    following: tuple[int, ...]


@dataclass(frozen=True)
class Passages:
    """Passages to decode side by side: token ids of equal length, ``prompt`` of each fed at once, then one by one."""

    task: str
    index: int
    rows: tuple[tuple[int, ...], ...]
    prompt: int


class Source:
    """A text to take contexts from, cut into sentences and counted in tokens once.

    Args:
        text: the text; it is read as a ring, so that a context may begin anywhere.
        tokenizer: a transformers tokenizer, or any callable whose result holds ``"input_ids"``.

    Raises:
        ValueError: there is no sentence in ``text``.
    """

    def __init__(self, text: str, tokenizer: Callable[..., Any]) -> None:
        self.text, self.tokenizer = text, tokenizer
        pieces = re.findall(r".+?(?:[.!?]['\")]*\s+|\Z)", text, flags=re.DOTALL)
        self.sentences = [flat for piece in pieces if (flat := re.sub(r"\s+", " ", piece).strip())]
        if not self.sentences:
            raise ValueError("the text has no sentence")
        self._ids: list[int] | None = None
        self._ends = list(accumulate(self.count(sentence + " ") for sentence in self.sentences))

    def count(self, text: str) -> int:
        """Tokens of ``text``, special tokens not counted."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def ids(self) -> list[int]:
        """Token ids of the text as it is, line breaks included."""
        if self._ids is None:
            self._ids = list(self.tokenizer(self.text, add_special_tokens=False)["input_ids"])
        return self._ids

    @property
    def tokens(self) -> int:
        """Tokens of the whole text."""
        return self._ends[-1]

    def passage(self, tokens: int, draw: random.Random) -> list[str]:
        """Sentences from a random place on, with at most ``tokens`` tokens; they begin with the next one that is not
        too long by itself.

        Raises:
            ValueError: the text is shorter than ``tokens``, or every sentence is longer.
        """
        if tokens > self.tokens:
            raise ValueError(f"the text has {self.tokens:,} tokens; too few for contexts of {tokens:,}: give --text")
        first, count = draw.randrange(len(self.sentences)), len(self.sentences)
        lengths = [end - before for before, end in pairwise([0, *self._ends])]
        fitting = (place % count for place in range(first, first + count) if lengths[place % count] <= tokens)
        start = next(fitting, None)
        if start is None:
            raise ValueError(f"{tokens} tokens leave no room for a sentence of the text; ask for longer contexts")
        before = self._ends[start - 1] if start else 0
        stop = bisect_right(self._ends, before + tokens)
        chosen = self.sentences[start:stop]
        if stop == len(self.sentences):
            chosen += self.sentences[: bisect_right(self._ends, before + tokens - self.tokens)]
        return chosen

    def hide(
        self, needles: list[str], shares: list[float], depth: tuple[float, float], tokens: int, draw: random.Random
    ) -> str:
        """A passage from a random place with ``needles`` between its sentences, at most ``tokens`` long.

        Args:
            needles: what to hide, in the order in which it will stand.
            shares: where each stands among the gaps between sentences that lie within ``depth``, in [0, 1], ascending.
            depth: all needles begin between these shares of the result's tokens. If no sentence ends there, they stand
                at the nearest gap.
            tokens: the largest length.
            draw: chooses the passage.

        Raises:
            ValueError: ``tokens`` leave no room, or the text is too short.
        """
        hidden = [self.count(needle + " ") for needle in needles]
        if sum(hidden) >= tokens:
            raise ValueError(f"{tokens} tokens leave no room beside what is hidden; ask for longer contexts")
        hay = self.passage(tokens - sum(hidden), draw)
        ends = [0, *accumulate(self.count(sentence + " ") for sentence in hay)]
        while True:
            first, last = _gaps(ends[: len(hay) + 1], hidden, depth)
            gaps = [first + round(share * (last - first)) for share in shares]
            parts = list(hay)
            for gap, needle in reversed(list(zip(gaps, needles, strict=True))):
                parts.insert(gap, needle)
            text = " ".join(parts)
            if self.count(text) <= tokens or len(hay) == 1:
                return text
            hay.pop()


def _gaps(ends: list[int], hidden: list[int], depth: tuple[float, float]) -> tuple[int, int]:
    """The first and the last gap at which all needles begin within ``depth``.

    ``ends`` are the gaps' places in tokens of hay, from 0; ``hidden`` the needles' tokens.
    """
    total, before = ends[-1] + sum(hidden), sum(hidden[:-1])
    low, high = depth[0] * total, depth[1] * total
    first, last = bisect_left(ends, low), bisect_right(ends, high - before) - 1
    if first > last:
        first = last = min(range(len(ends)), key=lambda gap: abs(ends[gap] + before / 2 - (low + high) / 2))
    return first, last
