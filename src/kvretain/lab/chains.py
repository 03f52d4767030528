"""Chains: problems that are long to solve and easy to check, with their worked solutions.

A problem gives a few variables their digits, defines many more, each from two operands among all earlier ones (which
may be the same variable) by ``+``, ``-`` or ``*`` modulo 10, and asks for one of the last. The solution takes the
definitions one by one: it repeats the definition, recalls both operands and states the value::

    a 4 ; b 7 : x = a + b y = x * a ? y :
    x = a + b : a 4 ; b 7 ; x 1 ; y = x * a : x 1 ; a 4 ; y 4 ; ? y 4 ; \\boxed{ 4 }

Wherever a value is known it directly follows its name, so that recalling one is the pattern that induction heads learn.
Operands are uniform among the earlier variables, so values are recalled at all distances, and every value that was
recalled stands once more in the text: the redundancy that a retention policy may use.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

NAMES = tuple("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
OPERATORS = {"+": 0.4, "-": 0.4, "*": 0.2}
"""Operators and their shares. Products are rarer, since modulo 10 they pile up on 0."""


@dataclass(frozen=True)
class Step:
    """The definition ``name = left operator right``."""

    name: str
    left: str
    operator: str
    right: str

    def __str__(self) -> str:
        return f"{self.name} = {self.left} {self.operator} {self.right}"


@dataclass(frozen=True)
class Chain:
    """A problem.

    Attributes:
        given: variables with their digits.
        steps: definitions, in the order in which they can be solved.
        asked: the variable that is asked for.
    """

    given: tuple[tuple[str, int], ...]
    steps: tuple[Step, ...]
    asked: str

    @cached_property
    def values(self) -> dict[str, int]:
        """Of all variables."""
        known = dict(self.given)
        for step in self.steps:
            known[step.name] = apply(step.operator, known[step.left], known[step.right])
        return known

    @property
    def answer(self) -> str:
        """The digit that is asked for."""
        return str(self.values[self.asked])

    @property
    def prompt(self) -> str:
        """What the model reads."""
        given = " ; ".join(f"{name} {digit}" for name, digit in self.given)
        return f"{given} : {' '.join(map(str, self.steps))} ? {self.asked} :"

    @property
    def solution(self) -> str:
        """What it should write."""
        lines = [
            f"{step} : {' '.join(f'{name} {self.values[name]} ;' for name in (step.left, step.right, step.name))}"
            for step in self.steps
        ]
        return f"{' '.join(lines)} ? {self.asked} {self.answer} ; \\boxed{{ {self.answer} }}"


def apply(operator: str, left: int, right: int) -> int:
    """The last digit of the sum, difference or product."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 10


def draw_chain(draw: random.Random, *, steps: int, given: int = 4) -> Chain:
    """A chain with ``given`` given variables and ``steps`` definitions; one of the last quarter of them is asked for.

    Raises:
        ValueError: fewer than one of either, or more variables than there are names.
    """
    if steps < 1 or given < 1:
        raise ValueError(f"a chain has at least one given variable and one step, not {given} and {steps}")
    if steps + given > len(NAMES):
        raise ValueError(f"{steps} steps and {given} given variables are more than the {len(NAMES)} names")
    names = draw.sample(NAMES, given + steps)
    operators = draw.choices(list(OPERATORS), list(OPERATORS.values()), k=steps)
    made = [
        Step(names[given + i], draw.choice(names[: given + i]), operators[i], draw.choice(names[: given + i]))
        for i in range(steps)
    ]
    asked = draw.choice(names[-max(1, steps // 4) :])
    return Chain(tuple((name, draw.randrange(10)) for name in names[:given]), tuple(made), asked)


def series(n: int, *, steps: int, given: int = 4, seed: int = 0) -> list[Chain]:
    r"""The first ``n`` problems of a series; no training draws from it.

    Raises:
        ValueError: as :func:`draw_chain`.

    Example:
        >>> (problem,) = series(1, steps=2, given=2)
        >>> print(problem.prompt)
        e 9 ; g 8 : T = e + e K = g + g ? K :
        >>> print(problem.solution)
        T = e + e : e 9 ; e 9 ; T 8 ; K = g + g : g 8 ; g 8 ; K 6 ; ? K 6 ; \boxed{ 6 }
    """
    return [draw_chain(random.Random(f"chains/{seed}/{steps}/{given}/{i}"), steps=steps, given=given) for i in range(n)]


def reading(problems: int = 10) -> tuple[str, int]:
    """Solved problems as a text to measure a laboratory animal on, and the tokens of each, ``<bos>`` included."""
    solved = [f"{one.prompt} {one.solution}" for one in series(problems, steps=20, seed=-1)]
    return "\n".join(solved), 1 + len(solved[0].split())


def draw_recall(draw: random.Random, *, variables: int, queries: int) -> list[str]:
    """The words of pure recall: variables with their digits, then ``queries`` of them again, in any order."""
    names = draw.sample(NAMES, variables)
    value = {name: str(draw.randrange(10)) for name in names}
    return [word for name in names + draw.choices(names, k=queries) for word in (name, value[name], ";")]
