"""Mathematical problems with a checkable answer: MATH-500, GSM8K, AIME 2024 and 2025, from a file or the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rows import from_file, from_hub


@dataclass(frozen=True)
class Problem:
    """A problem to be solved in text.

    Attributes:
        id: unique within its workload, and what :func:`kvretain.evidence.split` splits by.
        question: the problem as the model reads it.
        answer: the right answer in LaTeX, for :func:`kvretain.evidence.grade`.
        subject, level: of MATH-500 only.
    """

    id: str
    question: str
    answer: str
    subject: str | None = None
    level: int | None = None


PROMPT = """Here is a math problem.

Problem: {question}

Work through it step by step, and close with the result in this form:
Final answer: \\boxed{{}}

"""
"""Plain text without a chat template, in the form that TriAttention's and R-KV's evaluations use (the problem, step by
step, a boxed final answer), in words of our own."""


def prompt(problem: Problem, template: str = PROMPT) -> str:
    """What the model is given.

    Args:
        problem: the problem.
        template: with ``{question}`` where the problem goes; other braces are doubled.

    Raises:
        ValueError: the template has no ``{question}``, or other fields.
    """
    try:
        text = template.format(question=problem.question)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(f"the prompt template has a field other than {{question}} ({error}): double braces") from None
    if problem.question not in text:
        raise ValueError("the prompt template has no {question}")
    return text


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn; the defaults are those of TriAttention's evaluation of MATH-500.

    Attributes:
        temperature, top_p: of sampling.
        max_length: tokens of prompt and reply together.
        samples: runs per problem.
        seed: see :meth:`seed_of`.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    max_length: int = 8192
    samples: int = 1
    seed: int = 888

    def seed_of(self, run: int, index: int) -> int:
        """The seed of run ``run`` of the problem at ``index``, both from 0."""
        return self.seed + run * 1_000_000 + index


@dataclass(frozen=True)
class Workload:
    """Where a workload's problems come from.

    Attributes:
        dataset, config, split: on the hub.
        columns: that a row must have.
        read: makes a problem of a row and its index; raises ValueError if the row has none.
        sampling: defaults.
    """

    dataset: str
    config: str | None
    split: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any], int], Problem]
    sampling: Sampling


def _math500(row: Mapping[str, Any], index: int) -> Problem:
    return Problem(
        str(row["unique_id"]),
        _text(row, "problem"),
        _text(row, "answer"),
        row.get("subject"),
        int(row["level"]) if row.get("level") is not None else None,
    )


def _gsm8k(row: Mapping[str, Any], index: int) -> Problem:
    return Problem(f"gsm8k/{index}", _text(row, "question"), split_gsm8k(_text(row, "answer"))[1])


def split_gsm8k(answer: str) -> tuple[str, str]:
    """The steps and the result, without commas, of GSM8K's ``answer``.

    Raises:
        ValueError: there is no result.
    """
    steps, mark, result = answer.rpartition("####")
    result = result.strip().replace(",", "")
    if not mark or not result:
        raise ValueError("its answer has no '#### ' with the result behind it")
    return steps, result


def _aime(year: int) -> Callable[[Mapping[str, Any], int], Problem]:
    def read(row: Mapping[str, Any], index: int) -> Problem:
        answer = str(row["answer"]).strip()
        if not answer.isdecimal() or int(answer) > 999:
            raise ValueError(f"its answer is {answer!r}; AIME's are whole numbers from 0 to 999")
        name = row["id"] if row.get("id") is not None else index
        return Problem(f"aime{year}/{name}", _text(row, "problem"), str(int(answer)))

    return read


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"its {column} is {value!r}, not text")
    return value.strip()


_LONG = Sampling(max_length=32_768, samples=8)
WORKLOADS: dict[str, Workload] = {
    "math500": Workload(
        "HuggingFaceH4/MATH-500", None, "test", ("unique_id", "problem", "answer"), _math500, Sampling()
    ),
    "gsm8k": Workload("openai/gsm8k", "main", "test", ("question", "answer"), _gsm8k, Sampling()),
    "aime24": Workload("HuggingFaceH4/aime_2024", None, "train", ("problem", "answer"), _aime(24), _LONG),
    "aime25": Workload("math-ai/aime25", None, "test", ("problem", "answer"), _aime(25), _LONG),
}
"""Workloads by name. GSM8K is not in the reference evaluation; it takes MATH-500's sampling."""


def load_problems(workload: str, path: str | Path | None = None) -> list[Problem]:
    """The problems of a workload, in the order of their file.

    Args:
        workload: one of :data:`WORKLOADS`.
        path: a JSON file with a list of rows, or one row per line (JSONL), with the columns of the data set on the hub;
            None loads from the hub, which needs the ``datasets`` package.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the hub is asked for without ``datasets``.
        ValueError: an unknown workload, no JSON, a row without its columns or answer (names it), an id that comes
            twice, or no rows.

    Example:
        >>> load_problems("gsm8k", "gsm8k/test.jsonl")[0].answer  # doctest: +SKIP
        '18'
    """
    if workload not in WORKLOADS:
        raise ValueError(f"unknown workload {workload!r}; valid: {', '.join(WORKLOADS)}")
    about = WORKLOADS[workload]
    if path is None:
        source, found = about.dataset, from_hub(about.dataset, about.config, split=about.split)
    else:
        source, found = str(path), from_file(Path(path))
    problems: dict[str, Problem] = {}
    for index, (_, row) in enumerate(found):
        place = f"{source}, row {index + 1}"
        if not isinstance(row, Mapping):
            raise ValueError(f"{place}: a row must be an object with columns, not {type(row).__name__}")
        missing = [column for column in about.columns if row.get(column) is None]
        if missing:
            raise ValueError(f"{place}: no {', '.join(missing)}; {workload} needs {', '.join(about.columns)}")
        try:
            problem = about.read(row, index)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if problem.id in problems:
            raise ValueError(f"{place}: the id {problem.id!r} comes twice")
        problems[problem.id] = problem
    if not problems:
        raise ValueError(f"{source} has no rows")
    return list(problems.values())
