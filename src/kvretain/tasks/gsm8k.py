"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168) after solved problems: these are the context that gets compressed.

The solved problems show their steps without GSM8K's calculator marks (``<<1+1=2>>``) and box their result, so that
replies are graded as everywhere in kvretain, by :func:`kvretain.evidence.grade`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from .benchmark import Benchmark
from .example import Written
from .maths import WORKLOADS, split_gsm8k
from .rows import HUB, checked, digest, find, from_file, from_hub, text

SHOTS = 8
HELD_OUT = 100
MOST = 320


def load(name: str, data: str) -> Benchmark:
    """GSM8K from ``test.jsonl`` in the folder ``data`` (or its subfolder ``gsm8k``), a file, or the hub.

    Solved problems come from ``train.jsonl`` beside it (on the hub, the split ``train``); without that, from the last
    100 of a seeded order of the test problems, which are then never asked.

    Raises:
        ImportError: the hub is asked for without ``datasets``.
        ValueError: no such file, a row that lacks a field or has no result (names the line), or too few rows.
    """
    if data == HUB:
        about = WORKLOADS["gsm8k"]
        source = about.dataset
        asked, solved = (
            _problems(from_hub(source, about.config, split=split), source) for split in (about.split, "train")
        )
    else:
        path = find(data, ("test.jsonl", "gsm8k/test.jsonl"), "gsm8k")
        source, beside = str(path), path.with_name("train.jsonl")
        asked = _problems(from_file(path), source)
        solved = _problems(from_file(beside), str(beside)) if beside.is_file() and beside != path else []
    size = len(asked) if solved else len(asked) - HELD_OUT
    if size < 1 or 0 < len(solved) < SHOTS:
        raise ValueError(
            f"{source}: {len(asked)} problems are too few: without a train.jsonl of at least {SHOTS} problems beside "
            f"it, {HELD_OUT} are kept for the solved examples"
        )

    def make(index: int, tokenizer: Any, length: int, seed: int) -> Written:
        asking, showing = range(len(asked)), solved
        if not solved:
            order = random.Random(f"{seed}/gsm8k").sample(asking, len(asked))
            asking, showing = order[:-HELD_OUT], [asked[place] for place in order[-HELD_OUT:]]  # type: ignore[assignment]
        shown = random.Random(f"{seed}/gsm8k/{index}").sample(showing, SHOTS)
        context = "".join(f"Question: {q}\nAnswer: {_solution(steps, result)}\n\n" for q, steps, result in shown)
        question, steps, result = asked[asking[index]]
        target = f" {_solution(steps, result)}"
        return Written(
            "gsm8k", index, context, f"Question: {question}\n", "Answer:", (result,), target, raw=True,
            most=MOST, stops=("Question:",),
        )  # fmt: skip

    return Benchmark("gsm8k", source, digest(asked, solved), size, make, ("math_verify", "study"))


def _solution(steps: str, result: str) -> str:
    return f"{steps}\nFinal answer: \\boxed{{{result}}}"


def _problems(rows: list[tuple[str, Any]], source: str) -> list[tuple[str, str, str]]:
    """Question, steps and result of each row."""
    return [_problem(row) for row in checked(rows, ("question", "answer"), "a row of GSM8K", source)]


def _problem(row: Mapping[str, Any]) -> tuple[str, str, str]:
    answer = text(row, "answer")
    try:
        steps, result = split_gsm8k(answer)
    except ValueError as error:
        raise ValueError(f"{row['place']}: {error}") from None
    return text(row, "question").strip(), re.sub(r"<<.*?>>", "", steps).strip(), result
