"""What a study asks: the workloads that a plan can name, and their problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import data
from ..tasks import maths
from ..tasks.needles import NEEDLES


def one_of(name: str, value: Any, valid: Iterable[str]) -> None:
    """Raises ValueError unless ``value`` is one of ``valid``, which the message lists."""
    if value not in (valid := list(valid)):
        raise ValueError(f"{name} is {value!r}; valid: {', '.join(valid)}")


def at_least(name: str, value: int, least: int) -> None:
    """Raises ValueError if ``value`` is below ``least``."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")


@dataclass(frozen=True)
class Problem:
    """A problem of a study.

    Attributes:
        id: what it is split by.
        index: its place in the workload, from 0.
        question, answer: of maths; the recall task makes its own from ``index``.
    """

    id: str
    index: int
    question: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Recall:
    """Streamed recall: a needle in a text that is fed through the budget, asked for at the end.

    Attributes:
        task: one of :data:`~kvretain.tasks.needles.NEEDLES`.
        problems: how many.
        length: tokens of a context; ``chunk`` of a pass.
        depth: needles begin between these shares of the context.
        text: a file to take contexts from; by default the bundled chapter.
        seed: chooses the problems.
    """

    kind: ClassVar[str] = "recall"
    task: str = "single"
    problems: int = 40
    length: int = 384
    chunk: int = 64
    depth: tuple[float, ...] = (0.0, 1.0)
    text: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("workload.task", self.task, NEEDLES)
        for name in ("problems", "length", "chunk"):
            at_least(f"workload.{name}", getattr(self, name), 1)
        if len(self.depth) != 2 or not 0 <= self.depth[0] <= self.depth[1] <= 1:
            raise ValueError(f"workload.depth wants two shares in order, within [0, 1], not {list(self.depth)}")

    @property
    def files(self) -> list[str]:
        """What it reads."""
        return [] if self.text is None else [self.text]

    def read_text(self) -> str:
        """The text to take contexts from.

        Raises:
            ValueError: it is not UTF-8.
        """
        return data.read(self.text, "workload.text")

    def load(self) -> list[Problem]:
        """All problems, in their order."""
        return [Problem(f"{self.task}/{index}", index) for index in range(self.problems)]


@dataclass(frozen=True)
class Maths:
    """Mathematical problems, answered by sampling and graded by equivalence.

    Attributes:
        name: one of :data:`~kvretain.tasks.maths.WORKLOADS`.
        file: JSON or JSONL with its rows; by default from the hub.
        problems: only the first so many; 0 is all.
        prompt: with ``{question}``; by default :data:`~kvretain.tasks.maths.PROMPT`.
        chat: put the prompt into the model's chat template.
        temperature, top_p, max_length, seed: of generation; by default the workload's own
            (:class:`~kvretain.tasks.maths.Sampling`).
        proxy: also measure the likelihood of each reply under the full cache, which costs one pass over it.
    """

    kind: ClassVar[str] = "maths"
    name: str
    file: str | None = None
    problems: int = 0
    prompt: str = maths.PROMPT
    chat: bool = False
    temperature: float | None = None
    top_p: float | None = None
    max_length: int | None = None
    seed: int | None = None
    proxy: bool = True

    def __post_init__(self) -> None:
        one_of("workload.name", self.name, maths.WORKLOADS)
        at_least("workload.problems", self.problems, 0)
        maths.prompt(maths.Problem("", "the question", ""), self.prompt)
        if self.max_length is not None:
            at_least("workload.max_length", self.max_length, 2)

    @property
    def files(self) -> list[str]:
        """What it reads."""
        return [] if self.file is None else [self.file]

    @property
    def sampling(self) -> maths.Sampling:
        """How replies are drawn."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "max_length", "seed")}
        chosen = {name: value for name, value in given.items() if value is not None}
        return dataclasses.replace(maths.WORKLOADS[self.name].sampling, **chosen)

    def load(self) -> list[Problem]:
        """The problems, in the order of their file."""
        found = maths.load_problems(self.name, self.file)
        if self.problems > len(found):
            raise ValueError(f"workload.problems asks for {self.problems}, but {self.name} has {len(found)}")
        found = found[: self.problems or None]
        return [Problem(p.id, index, p.question, p.answer) for index, p in enumerate(found)]


Workload = Recall | Maths
WORKLOADS: dict[str, type[Workload]] = {cls.kind: cls for cls in (Recall, Maths)}
