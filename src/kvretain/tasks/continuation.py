"""Continuation: how well does a model go on with a real text whose beginning has been compressed?"""

from __future__ import annotations

import random

from .example import Continuation, Source


def build_continuation(
    source: Source, index: int, *, tokens: int = 1024, following: int = 256, seed: int = 0
) -> Continuation:
    """``tokens`` tokens from a random place of the text, and those that follow it.

    There are ``following + 1`` of these: each of the first ``following`` is fed to the compressed cache, and the next
    one is what it should predict.

    Args:
        source: the text; here it is no ring.
        index: which example, from 0.
        tokens: tokens of the context.
        following: predictions to compare.
        seed: another seed gives other places.

    Raises:
        ValueError: the text is too short.
    """
    ids = source.ids
    total = tokens + following + 1
    if total > len(ids):
        raise ValueError(f"the text has {len(ids):,} tokens; a continuation needs {total:,}: give --text")
    start = random.Random(f"{seed}/continuation/{index}").randint(0, len(ids) - total)
    chosen = tuple(ids[start : start + total])
    return Continuation("continuation", index, chosen[:tokens], chosen[tokens:])
