"""A needle in a haystack: one made-up fact hidden in a text, a question about it, and a grader."""

from __future__ import annotations

import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HOLDERS = ("Lobster", "Walrus", "Carpenter", "Unicorn", "Lion", "Gryphon", "Caterpillar", "Duchess")
THINGS = ("wine cellar", "clock tower", "glass cabinet", "boat house", "library", "treasure chest", "bakery", "vault")
CITIES = (
    "Athens", "Berlin", "Bombay", "Boston", "Cairo", "Dublin", "Geneva", "Lisbon",
    "Madrid", "Moscow", "Naples", "Oslo", "Prague", "Toronto", "Vienna", "Warsaw",
)  # fmt: skip
"""Words of one or two tokens for most tokenizers: a small model that has kept them can also say them."""


@dataclass(frozen=True)
class Haystack:
    """A text with one fact hidden in it.

    Attributes:
        context: the text, fact included.
        fact: the hidden sentence.
        question: what to ask.
        answer: what a right reply contains.
        depth: where the fact begins, as a share of the context's tokens.
        tokens: length of ``context`` in tokens, special tokens not counted.
    """

    context: str
    fact: str
    question: str
    answer: str
    depth: float
    tokens: int


def build_haystack(
    tokenizer: Callable[..., Any], text: str, *, tokens: int = 2000, depth: float = 0.5, seed: int = 0
) -> Haystack:
    """Cut ``text`` after a sentence so that it has at most ``tokens`` tokens with a fact hidden at about ``depth``.

    The same arguments give the same haystack. The fact stands between two sentences; ``seed`` draws its words.

    Args:
        tokenizer: a transformers tokenizer, or any callable whose result holds ``"input_ids"``.
        text: the hay; it must be long enough.
        tokens: the largest length of the context.
        depth: 0 puts the fact first, 1 last.
        seed: chooses the fact.

    Raises:
        ValueError: ``depth`` outside [0, 1], or ``text`` or ``tokens`` too short.

    Example:
        >>> words = lambda text, add_special_tokens: {"input_ids": text.split()}
        >>> build_haystack(words, "Tea is served. " * 50, tokens=60).tokens
        58
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must lie in [0, 1], not {depth}")
    draw = random.Random(seed)
    holder, thing, city = draw.choice(HOLDERS), draw.choice(THINGS), draw.choice(CITIES)
    fact = f"The {holder} keeps the key of the {thing} in {city}."
    asked = f"in which city does the {holder} keep the key of the {thing}?"
    question = f"According to the text above, {asked} Answer with the name only."

    def count(piece: str) -> int:
        return len(tokenizer(piece, add_special_tokens=False)["input_ids"])

    sentences = re.findall(r".+?(?:[.!?]['\")]*\s+|\Z)", text, flags=re.DOTALL)
    room = tokens - count(f"{fact} ")
    if count(text) < room:
        raise ValueError(f"the text has {count(text)} tokens; too few for tokens={tokens}")

    def prefix(stop: int) -> int:
        return count("".join(sentences[:stop]))

    indices = range(len(sentences) + 1)
    kept = bisect_right(indices, room, key=prefix) - 1
    if kept < 1:
        raise ValueError(f"tokens={tokens} leaves no room for a sentence beside the fact; ask for more")
    place = bisect_left(indices, depth * prefix(kept), hi=kept, key=prefix)

    before = "".join(sentences[:place])
    gap = re.search(r"\s*\Z", before).group() or " "  # type: ignore[union-attr]
    context = f"{before}{fact}{gap}{''.join(sentences[place:kept])}".rstrip()
    length = count(context)
    return Haystack(context, fact, question, city, depth=count(before) / length, tokens=length)


def grade(reply: str, answer: str) -> bool:
    """Whether ``reply`` contains ``answer`` as whole words; case, punctuation and commas inside numbers do not count.

    Example:
        >>> grade("The code is 48,213.", "48213"), grade("The code is 482134.", "48213")
        (True, False)
    """

    def normalise(text: str) -> str:
        text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.casefold())
        words = re.findall(r"\w+", text)
        return f" {' '.join(words)} "

    return normalise(answer) in normalise(reply)
