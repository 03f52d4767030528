"""The frozen split into problems to tune on and problems to confirm on."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable


def split(ids: Iterable[str], *, buckets: int = 5, development: Iterable[int] = (0, 1)) -> tuple[list[str], list[str]]:
    """Development and held-out ids, each in the given order.

    An id's bucket is the MD5 of its UTF-8 bytes, read as a number, modulo ``buckets``. So the side of a problem depends
    on nothing but its id: not on the other problems, their order, a seed or a version. The defaults give 201 and 299 on
    MATH-500's ``unique_id``.

    Args:
        ids: one for each problem.
        buckets: how many there are.
        development: those whose problems are for tuning; all others are held out.

    Raises:
        TypeError: an id is no string, or a bucket no integer.
        ValueError: an id comes twice; a side is empty; fewer than two buckets, or a development bucket that is not
            among them.

    Example:
        >>> split(["test/algebra/1.json", "test/algebra/2.json", "test/algebra/3.json"])
        (['test/algebra/1.json'], ['test/algebra/2.json', 'test/algebra/3.json'])
    """
    if isinstance(ids, str | bytes):
        raise TypeError("ids must be a collection of strings, not one string")
    ids = list(ids)
    for value in ids:
        if not isinstance(value, str):
            raise TypeError(f"an id must be a string, not {type(value).__name__} ({value!r})")
    chosen = list(development)
    for number in (buckets, *chosen):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"buckets are integers, not {number!r}")
    if buckets < 2:
        raise ValueError(f"buckets={buckets}: it takes at least two to tell two sides apart")
    outside = [number for number in chosen if not 0 <= number < buckets]
    if outside:
        raise ValueError(f"development buckets {outside} do not exist: there are 0 to {buckets - 1}")
    twice = [value for value, count in Counter(ids).items() if count > 1]
    if twice:
        shown = ", ".join(map(repr, twice[:3])) + (", ..." if len(twice) > 3 else "")
        raise ValueError(f"ids must be unique, but {len(twice)} of them come more than once: {shown}")

    sides: tuple[list[str], list[str]] = ([], [])
    for value in ids:
        digest = hashlib.md5(value.encode(), usedforsecurity=False).hexdigest()
        sides[int(digest, 16) % buckets not in chosen].append(value)
    for name, side in zip(("development", "held-out"), sides, strict=True):
        if not side:
            raise ValueError(
                f"the {name} side is empty: {len(ids)} ids in {buckets} buckets, of which {sorted(set(chosen))} are "
                "for development; give more ids or other buckets"
            )
    return sides
