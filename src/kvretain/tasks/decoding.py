"""Decoding: several passages of a real text, to be read token by token through a budget."""

from __future__ import annotations

import random

from .example import Passages, Source


def build_decoding(
    source: Source, index: int, *, passages: int = 8, prompt: int = 128, following: int = 512, seed: int = 0
) -> Passages:
    """Passages of the text; no two passages of any two examples overlap, so they can count as independent.

    The text is cut into pieces of ``prompt + following + 1`` tokens, as many as it has; examples take them in a seeded
    order.

    Args:
        source: the text; here it is no ring.
        index: which example, from 0.
        passages: how many an example has.
        prompt: tokens that are fed at once.
        following: predictions to compare after them, one for each token fed.
        seed: another seed gives other examples.

    Raises:
        ValueError: the text is too short (says for how many examples it is long enough).

    Example:
        >>> words = lambda text, add_special_tokens: {"input_ids": text.split()}
        >>> made = build_decoding(Source("Tea is served. " * 50, words), 0, passages=2, prompt=8, following=16)
        >>> made.prompt, [len(row) for row in made.rows]
        (8, [25, 25])
    """
    ids, size = source.ids, prompt + following + 1
    pieces = len(ids) // size
    if (index + 1) * passages > pieces:
        raise ValueError(
            f"the text has {len(ids):,} tokens, enough for {pieces // passages} examples of {passages} passages of "
            f"{size:,}, so there is no example {index}: give a longer --text, or ask for fewer or shorter passages"
        )
    order = random.Random(f"{seed}/decode").sample(range(pieces), pieces)
    starts = [piece * size for piece in order[index * passages : (index + 1) * passages]]
    return Passages("decode", index, tuple(tuple(ids[start : start + size]) for start in starts), prompt)
