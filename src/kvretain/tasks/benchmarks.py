"""The public benchmarks by name: ``longbench:NAME``, ``ruler:NAME`` and ``gsm8k``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import gsm8k, longbench, ruler
from .benchmark import Benchmark


@dataclass(frozen=True)
class Family:
    """Tasks that are loaded alike.

    Attributes:
        names: of its tasks; none if the family is one task.
        load: a task from its name and ``--data``.
    """

    names: tuple[str, ...]
    load: Callable[[str, str], Benchmark]


FAMILIES: dict[str, Family] = {
    "longbench": Family(longbench.NAMES, longbench.load),
    "ruler": Family(ruler.NAMES, ruler.load),
    "gsm8k": Family((), gsm8k.load),
}


def is_benchmark(task: str) -> bool:
    """Whether ``task`` names a benchmark's task.

    Raises:
        ValueError: a benchmark without that task; lists the valid ones.
    """
    family, colon, name = task.partition(":")
    if family not in FAMILIES:
        return False
    names = FAMILIES[family].names
    if names and name not in names:
        raise ValueError(f"unknown task {task!r}; {family}: is followed by one of {', '.join(names)}")
    if not names and colon:
        raise ValueError(f"unknown task {task!r}; {family} is one task: write {family}")
    return True


def load_benchmark(task: str, data: str | None) -> Benchmark:
    """The benchmark's task, read and checked.

    Args:
        task: of :func:`is_benchmark`.
        data: a folder, a file, or ``hub``.

    Raises:
        ImportError: the hub is asked for without ``datasets``.
        ValueError: no ``data``; or a file that is not there, or not what it should be (names the line).
    """
    if data is None:
        raise ValueError(f"the task {task!r} needs --data with its folder or file, or --data hub")
    family, _, name = task.partition(":")
    return FAMILIES[family].load(name, data)
