"""What the runner knows of a benchmark: how many examples it has, and how to make one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .example import Written


@dataclass(frozen=True)
class Benchmark:
    """The examples of a benchmark's task, in the order of their file.

    Attributes:
        task: its name.
        source: where the rows come from.
        digest: changes with what is asked, not with where it is read from.
        size: how many examples.
        make: an example from its index, the tokenizer, the length asked for and the seed.
        grader: the module that grading needs, and the extra of kvretain that brings it; None for kvretain's own.
    """

    task: str
    source: str
    digest: str
    size: int
    make: Callable[[int, Any, int, int], Written]
    grader: tuple[str, str] | None = None

    def check_grader(self) -> None:
        """Raises ImportError if grading needs a package that is not installed."""
        if self.grader is not None and importlib.util.find_spec(self.grader[0]) is None:
            raise ImportError(f'{self.task} is graded with {self.grader[0]}: pip install "kvretain[{self.grader[1]}]"')

    def example(self, index: int, tokenizer: Any, *, length: int, seed: int = 0) -> Written:
        """The ``index``-th example; the same arguments give the same one.

        Args:
            index: from 0.
            tokenizer: of the model that reads it.
            length: the largest number of tokens of a prompt; what does not fit is cut or refused.
            seed: chooses what the benchmark leaves to chance.

        Raises:
            ValueError: there is no such example, or its prompt does not fit.
        """
        if not 0 <= index < self.size:
            raise ValueError(f"{self.task} has {self.size} examples, so there is no example {index} (counted from 0)")
        return self.make(index, tokenizer, length, seed)
