"""Needles of the RULER family (Hsieh et al. 2024, arXiv 2404.06654), in generators of our own, on real text.

====================  ==================================================================================================
``single``            a 5-digit number under one key
``single7``           the same with 7 digits
``multikey``          one asked key among four
``multivalue``        one key with three numbers, all asked
``multiquery``        four keys, two asked
``tracking``          variables assigned to each other in a chain; asked are all that hold a number; one other chain
``words``             the three most common words of a numbered list from the text: 10 times each, all others twice
====================  ==================================================================================================

Deviations from RULER: the hay is the text that the caller gives (sentences in their order from a random place on),
keys and words come from lists of our own or from the text, and the counts above are those that a small model can do.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from .example import Example, Source

Made = tuple[str, str, str, list[str]]
"""Context, question, opening and answers."""

GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Hay:
    """What a generator has to work with.

    Attributes:
        source: the text to hide things in.
        tokens: the largest length of the context.
        draw: this example's random numbers.
        start: where in ``depth`` the first needle lies, as a share of it; the others follow at equal distances, round
            the end.
        depth: the shares of the context between which needles lie.
    """

    source: Source
    tokens: int
    draw: random.Random
    start: float
    depth: tuple[float, float]

    def hide(self, needles: list[str]) -> str:
        """A passage of the text with ``needles`` in it, in their order."""
        shares = sorted((self.start + i / len(needles)) % 1 for i in range(len(needles)))
        return self.source.hide(needles, shares, self.depth, self.tokens, self.draw)


_FIRST = (
    "amber", "brave", "calm", "distant", "early", "faded", "gentle", "hidden", "icy", "jolly", "keen", "lonely",
    "merry", "narrow", "old", "pale", "quiet", "rapid", "silver", "tall",
)  # fmt: skip
_SECOND = (
    "anchor", "basket", "candle", "dragon", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "orchard", "pillow", "ribbon", "saddle", "tunnel", "window",
)  # fmt: skip


def _keys(draw: random.Random, count: int) -> list[str]:
    firsts, seconds = draw.sample(_FIRST, count), draw.sample(_SECOND, count)
    return [f"{first} {second}" for first, second in zip(firsts, seconds, strict=True)]


def _numbers(draw: random.Random, count: int, digits: int = 5) -> list[str]:
    return [str(number) for number in draw.sample(range(10 ** (digits - 1), 10**digits), count)]


def _needle(key: str, number: str) -> str:
    return f"One of the special magic numbers for {key} is: {number}."


def _listing(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _single(digits: int) -> Callable[[Hay], Made]:
    def make(hay: Hay) -> Made:
        (key,), (number,) = _keys(hay.draw, 1), _numbers(hay.draw, 1, digits)
        return hay.hide([_needle(key, number)]), *_ask(key, [number])

    return make


def _ask(key: str, numbers: list[str]) -> tuple[str, str, list[str]]:
    if len(numbers) == 1:
        question = f"What is the special magic number for {key} mentioned in the text above?"
        return question, f"The special magic number for {key} mentioned in the text is:", numbers
    question = f"What are all the special magic numbers for {key} mentioned in the text above?"
    return question, f"The special magic numbers for {key} mentioned in the text are", numbers


def _multikey(hay: Hay) -> Made:
    keys, numbers = _keys(hay.draw, 4), _numbers(hay.draw, 4)
    text = hay.hide([_needle(k, n) for k, n in zip(keys, numbers, strict=True)])
    asked = hay.draw.randrange(4)
    return text, *_ask(keys[asked], [numbers[asked]])


def _multivalue(hay: Hay) -> Made:
    (key,), numbers = _keys(hay.draw, 1), _numbers(hay.draw, 3)
    text = hay.hide([_needle(key, number) for number in numbers])
    return text, *_ask(key, sorted(numbers, key=text.index))


def _multiquery(hay: Hay) -> Made:
    keys, numbers = _keys(hay.draw, 4), _numbers(hay.draw, 4)
    text = hay.hide([_needle(k, n) for k, n in zip(keys, numbers, strict=True)])
    asked = hay.draw.sample(range(4), 2)
    both = f"{keys[asked[0]]} and {keys[asked[1]]}"
    question = f"What are the special magic numbers for {both} mentioned in the text above?"
    opening = f"The special magic numbers for {both} mentioned in the text are"
    return text, question, opening, [numbers[i] for i in asked]


def _tracking(hay: Hay, hops: int = 2) -> Made:
    names: list[str] = []
    while len(names) < 2 * (hops + 1):
        name = "".join(hay.draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=3))
        if name not in names:
            names.append(name)
    chains = [names[: hops + 1], names[hops + 1 :]]
    numbers = _numbers(hay.draw, 2)
    lines = [
        [f"VAR {chain[0]} = {number}."] + [f"VAR {b} = VAR {a}." for a, b in pairwise(chain)]
        for chain, number in zip(chains, numbers, strict=True)
    ]
    # The chains are interleaved at random, each in its own order.
    order = hay.draw.sample([0] * (hops + 1) + [1] * (hops + 1), 2 * (hops + 1))
    text = hay.hide([lines[which].pop(0) for which in order])
    question = f"Find all variables that hold the value {numbers[0]} in the text above, directly or through others."
    return text, question, f"The {hops + 1} variables that hold the value {numbers[0]} are", chains[0]


def _words(hay: Hay, common: int = 3) -> Made:
    known = sorted(set(re.findall(r"(?<![\w'])[a-z]{4,8}(?![\w'])", hay.source.text)))
    if len(known) < 2 * common:
        raise ValueError("the text has too few different words for the task 'words'")
    hay.draw.shuffle(known)
    often, rest = known[:common], known[common:]

    def listing(others: int) -> str:
        listed = often * 10 + rest[:others] * 2
        random.Random(others).shuffle(listed)
        return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))

    others = bisect_right(range(len(rest) + 1), hay.tokens, key=lambda n: hay.source.count(listing(n))) - 1
    if others < common:
        raise ValueError(f"{hay.tokens} tokens leave no room for a list of words; ask for longer contexts")
    text = listing(others)
    question = f"What are the {common} most common words in the list above?"
    return text, question, f"The {common} most common words in the list are", often


NEEDLES: dict[str, Callable[[Hay], Made]] = {
    "single": _single(5),
    "single7": _single(7),
    "multikey": _multikey,
    "multivalue": _multivalue,
    "multiquery": _multiquery,
    "tracking": _tracking,
    "words": _words,
}
"""The tasks of this module by name."""


def build_needle(
    source: Source,
    task: str,
    index: int,
    *,
    tokens: int = 1024,
    seed: int = 0,
    depth: tuple[float, float] = (0.0, 1.0),
) -> Example:
    """The ``index``-th example of ``task``; the same arguments give the same example.

    Args:
        source: the text to hide things in.
        task: one of :data:`NEEDLES`.
        index: which example, from 0; each draws anew.
        tokens: the largest length of the context.
        seed: another seed gives other examples.
        depth: needles begin between these shares of the context's tokens, 0 its begin, 1 its end (if no sentence ends
            there, at the nearest place where one does). Consecutive examples spread over that range evenly (multiples
            of the golden ratio), whatever their number. ``words`` has no needle.

    Raises:
        ValueError: an unknown task; a text that is too short, or too few ``tokens``; a bad ``depth``.

    Example:
        >>> words = lambda text, add_special_tokens: {"input_ids": text.split()}
        >>> example = build_needle(Source("Tea is served. " * 50, words), "single", 0, tokens=60)
        >>> example.grade("It is " + example.target), len(example.context.split()) <= 60
        (True, True)
    """
    if task not in NEEDLES:
        raise ValueError(f"unknown task {task!r}; valid: {', '.join(NEEDLES)}")
    if len(depth) != 2 or not 0 <= depth[0] <= depth[1] <= 1:
        raise ValueError(f"depth must be two shares in order, within [0, 1], not {depth}")
    draw = random.Random(f"{seed}/{task}/{index}")
    hay = Hay(source, tokens, draw, index * GOLDEN % 1, depth)
    context, question, opening, answers = NEEDLES[task](hay)
    return Example(task, index, context, question, opening, tuple(answers), f" {_listing(list(answers))}.")
