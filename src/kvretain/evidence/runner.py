"""Runs an evaluation: examples as units of work, in one or several processes, stored as they finish. No terminal
here."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from .. import data
from ..models import load_model
from ..policy import Policy
from ..tasks.benchmark import Benchmark
from ..tasks.benchmarks import FAMILIES, is_benchmark, load_benchmark
from ..tasks.continuation import build_continuation
from ..tasks.decoding import build_decoding
from ..tasks.example import Continuation, Example, Passages, Source
from ..tasks.needles import NEEDLES, build_needle
from ..tasks.svamp import build_svamp, load_svamp
from .measure import FULL, Case, measure
from .store import Store
from .stream import measure_streamed

STREAMED = (*(f"stream-{name}" for name in NEEDLES), "decode")
"""Tasks whose text is fed through the cache; the others compress a context once."""
TASKS = (*NEEDLES, "continuation", "svamp", *STREAMED)
"""Tasks of our own; the public benchmarks' stand in :mod:`kvretain.tasks.benchmarks`."""
ALWAYS = ("full", "random", "streaming")
"""Policies that every evaluation carries."""


def check_task(task: str) -> None:
    """Refuses what is no task.

    Raises:
        ValueError: lists the valid ones.
    """
    if task not in TASKS and not is_benchmark(task):
        public = (name + ":NAME" * bool(family.names) for name, family in FAMILIES.items())
        raise ValueError(f"unknown task {task!r}; valid: {', '.join((*TASKS, *public))}")


@dataclass(frozen=True)
class Setting:
    """What the examples are, and how they are measured.

    Attributes:
        model, dtype, device: arguments of :func:`kvretain.load_model`.
        length: tokens of a context, or of the prompt in ``decode``.
        following: predictions compared in a continuation and in ``decode``.
        seed: chooses the examples.
        depth: between which shares of the context needles lie.
        aware: whether the question is compressed with the context; streamed tasks do not ask.
        generate: whether to write greedy replies; streamed tasks never do.
        text: a file to take contexts from, None for the bundled chapter.
        data: SVAMP's JSONL file; or a benchmark's folder or file, or ``hub``.
        threads: CPU threads of each process.
        chunk: streamed needles: tokens of a pass.
        every: streamed tasks: the cache's cadence while decoding.
        passages: ``decode``: how many of an example are decoded side by side.
    """

    model: str
    dtype: str | None = None
    device: str | None = None
    length: int = 1024
    following: int = 256
    seed: int = 0
    depth: tuple[float, float] = (0.0, 1.0)
    aware: bool = False
    generate: bool = True
    text: str | None = None
    data: str | None = None
    threads: int = 1
    chunk: int = 64
    every: int = 128
    passages: int = 8

    def read_text(self) -> str:
        """The text to take contexts from.

        Raises:
            ValueError: it is not UTF-8.
        """
        return data.read(self.text, "--text")

    def identity(self) -> dict[str, Any]:
        """What rows must share to be comparable: settings, contents of the files, and versions."""
        import transformers

        from .. import __version__

        return {
            "model": self.model,
            "dtype": self.dtype,
            "length": self.length,
            "following": self.following,
            "seed": self.seed,
            "depth": list(self.depth),
            "question": "compressed with the context" if self.aware else "after the compression",
            "generate": self.generate,
            "chunk": self.chunk,
            "every": self.every,
            "passages": self.passages,
            "text": hashlib.sha256(self.read_text().encode()).hexdigest()[:16],
            "kvretain": __version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        }


@dataclass(frozen=True)
class Unit:
    """One example and the cases still to be measured on it."""

    task: str
    index: int
    cases: tuple[Case, ...]


def cases_of(policies: Sequence[str], ratios: Sequence[float] = (), budgets: Sequence[int] = ()) -> list[Case]:
    """Every policy at every size, in one spelling each; the policies of :data:`ALWAYS` come first, ``full`` once.

    Raises:
        ValueError: a bad policy.
    """
    names = list(dict.fromkeys(str(Policy.parse(policy)) for policy in (*ALWAYS, *policies)))
    sizes = [(ratio, None) for ratio in dict.fromkeys(ratios)] + [(None, budget) for budget in dict.fromkeys(budgets)]
    return [FULL] + [Case(name, *size) for size in sizes for name in names if name != FULL.policy]


def read_data(setting: Setting, tasks: Sequence[str]) -> dict[str, Benchmark]:
    """The benchmarks among ``tasks``, read and checked before a model is loaded.

    Raises:
        ImportError: a package that reads or grades them is not installed.
        ValueError: no ``data``, one file for several tasks, or what :func:`~kvretain.tasks.benchmarks.load_benchmark`
            refuses.
    """
    names = [task for task in dict.fromkeys(tasks) if is_benchmark(task)]
    if len(names) > 1 and setting.data is not None and Path(setting.data).is_file():
        raise ValueError(f"--data {setting.data} is one file, but {' and '.join(names)} need one each: give a folder")
    found = {task: load_benchmark(task, setting.data) for task in names}
    if setting.generate:
        for benchmark in found.values():
            benchmark.check_grader()
    return found


def plan(
    store: Store, tasks: Sequence[str], indices: range, cases: Sequence[Case], sizes: Mapping[str, int] = {}
) -> list[Unit]:
    """What is still to be done, one example of each task after the other.

    Args:
        store: what is done.
        tasks, indices, cases: what there is to do.
        sizes: of tasks that have only so many examples.

    Raises:
        ValueError: such a task has none of ``indices``.
    """
    for task, size in sizes.items():
        if indices.start >= size:
            raise ValueError(f"{task} has {size} examples: --skip {indices.start} leaves none")
    wanted = [(task, i) for i in indices for task in dict.fromkeys(tasks) if i < sizes.get(task, i + 1)]
    units = [Unit(task, i, tuple(store.missing(task, i, cases))) for task, i in wanted]
    return [unit for unit in units if unit.cases]


@dataclass
class Bench:
    """A loaded model at work on a setting's examples."""

    setting: Setting
    model: Any
    tokenizer: Any
    _problems: list[Any] = field(default_factory=list)
    _benchmarks: dict[str, Benchmark] = field(default_factory=dict)

    @cached_property
    def source(self) -> Source:
        """The setting's text."""
        return Source(self.setting.read_text(), self.tokenizer)

    def example(self, task: str, index: int) -> Example | Continuation | Passages:
        """The ``index``-th example of a task.

        Raises:
            ValueError: a text too short, no SVAMP file, or what the generators and benchmarks refuse.
        """
        setting = self.setting
        if task == "continuation":
            following = setting.following
            return build_continuation(self.source, index, tokens=setting.length, following=following, seed=setting.seed)
        if task == "svamp":
            if setting.data is None:
                raise ValueError("the task 'svamp' needs --data with SVAMP's JSONL file")
            self._problems = self._problems or load_svamp(setting.data)
            return build_svamp(self._problems, index, seed=setting.seed)
        if task == "decode":
            passages, following = setting.passages, setting.following
            return build_decoding(
                self.source, index, passages=passages, prompt=setting.length, following=following, seed=setting.seed
            )
        if is_benchmark(task):
            if task not in self._benchmarks:
                self._benchmarks[task] = load_benchmark(task, setting.data)
            return self._benchmarks[task].example(index, self.tokenizer, length=setting.length, seed=setting.seed)
        # A streamed needle is the example of the same index that the task of the same name has.
        name, depth = task.removeprefix("stream-"), setting.depth
        made = build_needle(self.source, name, index, tokens=setting.length, seed=setting.seed, depth=depth)
        return replace(made, task=task)

    def work(self, unit: Unit, store: Store, report: Callable[[], None]) -> None:
        """Measures a unit and stores its rows; those of a streamed task, whose cases share little, one by one."""
        setting = self.setting
        example: Any = self.example(unit.task, unit.index)
        of = self.model, self.tokenizer, example, unit.cases
        if unit.task in STREAMED:
            for row in measure_streamed(*of, chunk=setting.chunk, every=setting.every):
                store.add([row])
                report()
        else:
            store.add(measure(*of, aware=setting.aware, generate=setting.generate, report=report))


def run(
    setting: Setting,
    store: Store,
    units: Sequence[Unit],
    *,
    workers: int = 1,
    report: Callable[[], None] = lambda: None,
) -> Iterator[Unit]:
    """Works off ``units`` and yields each when its rows are stored.

    Args:
        setting: what the units share.
        store: where rows go.
        units: from :func:`plan`.
        workers: 1 works in this process; more start that many, each with its own model.
        report: called after each case of a unit.
    """
    if not units:
        return
    if workers == 1:
        bench = _bench(setting)
        for unit in units:
            bench.work(unit, store, report)
            yield unit
        return
    spawn = multiprocessing.get_context("spawn")
    ticks = spawn.Queue()
    arguments = (setting, store, ticks)
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=arguments) as pool:
        # Workers inherit that Ctrl-C is ignored: it reaches this process, which then ends them.
        before, interrupt = set(multiprocessing.active_children()), signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            pending = {pool.submit(_work, unit): unit for unit in units}
        finally:
            signal.signal(signal.SIGINT, interrupt)
        started = set(multiprocessing.active_children()) - before
        try:
            while pending:
                with suppress(queue.Empty):
                    ticks.get(timeout=0.2)
                    report()
                for future in [future for future in pending if future.done()]:
                    future.result()
                    yield pending.pop(future)
        except BaseException:
            for process in started:
                process.terminate()
            raise


def _bench(setting: Setting) -> Bench:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(setting.threads)
    return Bench(setting, *load_model(setting.model, dtype=setting.dtype, device=setting.device))


_worker: dict[str, Any] = {}


def _start_worker(setting: Setting, store: Store, ticks: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        # A killed parent cannot end its workers: they end themselves.
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    _worker.update(bench=_bench(setting), store=store, ticks=ticks)


def _work(unit: Unit) -> None:
    _worker["bench"].work(unit, _worker["store"], lambda: _worker["ticks"].put(None))
