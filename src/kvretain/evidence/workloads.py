"""What a study asks: the workloads that a plan can name, and their problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import data
from ..lab.chains import series
from ..tasks import maths
from ..tasks.needles import NEEDLES
from .grading import Verdict, grade, grade_exact


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

    def prompt_of(self, problem: Problem) -> str:
        """What the model is given."""
        return maths.prompt(maths.Problem(problem.id, problem.question, problem.answer), self.prompt)

    def grade(self, text: str, truth: str, *, cut_off: bool) -> tuple[Verdict, Verdict]:
        """The verdict by equivalence, and by exact string."""
        return grade(text, truth, cut_off=cut_off), grade_exact(text, truth, cut_off=cut_off)

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


@dataclass(frozen=True)
class Chains:
    """Chains of arithmetic, for the laboratory animal alone (``kvretain lab train``): it writes every step out.

    Attributes:
        steps: of each chain, see :func:`~kvretain.lab.chains.draw_chain`.
        given: numbers of given variables, which problems take in turn. All chains with the same number are of one form
            and length, so with a single one every eviction would fall on the same place of all of them, and a budget
            of one entry more would move it: the comparison would be between places, not policies.
        problems: how many.
        series: which series of problems; of the default one, 500 problems split into 201 and 299, like MATH-500.
        temperature, top_p, seed: of generation.
        proxy: also measure the likelihood of each reply under the full cache, which costs one pass over it.
        together: runs of one arm, with prompts of one length, that are written as one batch, so that rows do not
            depend on each other.
    """

    kind: ClassVar[str] = "chains"
    chat: ClassVar[bool] = False
    steps: int = 20
    given: tuple[int, ...] = (2, 3, 4, 5)
    problems: int = 500
    series: int = 16
    temperature: float = 0.6
    top_p: float = 0.95
    seed: int = 888
    proxy: bool = True
    together: int = 64

    def __post_init__(self) -> None:
        for name in ("steps", "problems", "together"):
            at_least(f"workload.{name}", getattr(self, name), 1)
        at_least("workload.given", min(self.given, default=0), 1)
        self.load()

    @property
    def files(self) -> list[str]:
        """What it reads."""
        return []

    def prompt_of(self, problem: Problem) -> str:
        """What the model is given."""
        return problem.question

    def grade(self, text: str, truth: str, *, cut_off: bool) -> tuple[Verdict, Verdict]:
        """The verdict, twice: a digit is right or not."""
        verdict = grade_exact(text, truth, cut_off=cut_off)
        return verdict, verdict

    @property
    def sampling(self) -> maths.Sampling:
        """How replies are drawn; there is room for a right one and 64 tokens more."""
        (one,) = series(1, steps=self.steps, given=max(self.given), seed=self.series)
        room = len(f"<bos> {one.prompt} {one.solution} <eos>".split()) + 64
        return maths.Sampling(self.temperature, self.top_p, max_length=room, seed=self.seed)

    def load(self) -> list[Problem]:
        """The problems, in the order of their series."""
        kinds = [series(self.problems, steps=self.steps, given=given, seed=self.series) for given in self.given]
        chains = [kinds[index % len(kinds)][index] for index in range(self.problems)]
        return [
            Problem(f"chains/{self.series}/{index}", index, one.prompt, one.answer) for index, one in enumerate(chains)
        ]


Workload = Recall | Maths | Chains
WORKLOADS: dict[str, type[Workload]] = {cls.kind: cls for cls in (Recall, Maths, Chains)}
