"""SVAMP word problems (Patel et al. 2021) after solved ones: the solved ones are the context that gets compressed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .example import Example


@dataclass(frozen=True)
class Problem:
    """One row of SVAMP: ``steps`` is the equation written out, such as ``290 / 2 = 145``."""

    question: str
    steps: str
    answer: float


def load_svamp(path: str | Path) -> list[Problem]:
    """Reads a JSONL file with the fields ``Body``, ``Question``, ``Equation`` and ``Answer``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not such a row (names the line).
    """
    problems = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            body, question, answer = row["Body"].strip(), row["Question"].strip(), float(row["Answer"])
            steps = _tidy(row["Equation"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number}: no SVAMP row with Body, Question, Equation and Answer ({error!r})"
            ) from None
        body = body if body.endswith((".", "?", "!", ",")) else body + "."
        problems.append(Problem(f"{body} {question}", f"{steps} = {_number(answer)}", answer))
    return problems


def _tidy(equation: str) -> str:
    """``( ( 8.0 - 3.0 ) * 2.0 )`` as ``(8 - 3) * 2``."""
    text = re.sub(r"(\d+)\.0\b", r"\1", equation.strip())
    text = re.sub(r"\(\s+", "(", re.sub(r"\s+\)", ")", text))
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def build_svamp(
    problems: Sequence[Problem], index: int, *, shots: int = 8, held_out: int = 100, seed: int = 0
) -> Example:
    """The ``index``-th problem after ``shots`` solved ones.

    The solved ones are drawn from the last ``held_out`` problems of a seeded order, which are never asked. The target
    is the equation and its value; a reply is right if its last number is.

    Raises:
        ValueError: fewer problems than that needs.
    """
    if len(problems) < held_out + 1 or shots > held_out:
        raise ValueError(f"{len(problems)} problems are too few: {held_out} are kept for the solved examples")
    order = random.Random(f"{seed}/svamp").sample(range(len(problems)), len(problems))
    asked, solved = order[:-held_out], order[-held_out:]
    if index >= len(asked):
        raise ValueError(f"there is no example {index}: {len(asked)} problems can be asked")
    shown = random.Random(f"{seed}/svamp/{index}").sample(solved, shots)
    context = "".join(f"Question: {problems[i].question}\nAnswer: {problems[i].steps}\n\n" for i in shown)
    problem = problems[asked[index]]
    return Example(
        "svamp",
        index,
        context,
        f"Question: {problem.question}\n",
        "Answer:",
        (_number(problem.answer),),
        f" {problem.steps}",
        numeric=True,
        raw=True,
    )
