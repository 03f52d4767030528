"""``kvretain demo``: one hidden fact, several policies, a table."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import models
from .shared import (
    AsJson,
    Blind,
    Device,
    Dtype,
    Model,
    app,
    check_budget,
    check_model,
    clear_errors,
    err,
    load,
    out,
    print_json,
    versions,
)

if TYPE_CHECKING:
    from ..demo import Case, Row


@app.command(
    epilog="""
Examples:

- `kvretain demo` – SmolLM2-135M, about 2,000 tokens, five policies, 80 % and 90 % removed
- `kvretain demo --blind` – the same, compressed before the question is known
- `kvretain demo --policy snapkv@layer --policy "snapkv(window=32)" --ratio 0.9 --seed 7` – your choice
"""
)
def demo(
    model: Model = models.EMBEDDED,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="May be repeated; default: the five of the introduction.")
    ] = None,
    ratio: Annotated[
        list[float] | None, typer.Option("--ratio", "-r", help="Fraction REMOVED; may be repeated; default: 0.8, 0.9.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the chapter with the fact in it.")] = 2000,
    depth: Annotated[float, typer.Option(min=0, max=1, help="Where the fact is hidden: 0 first, 1 last.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Chooses the fact.")] = 0,
    blind: Blind = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that share the work; default: 2 on CPUs, 1 with CUDA.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Hide a fact in a chapter of *Alice*, forget most of the cache, and ask for the fact."""
    started = time.perf_counter()
    with clear_errors():
        check_model(model, dtype)
        # One thread is the fastest for so small a model; BLAS reads this when a worker starts.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        from .. import data
        from .. import demo as work
        from ..tasks.haystack import build_haystack

        policies, ratios = policy or list(work.POLICIES), ratio or list(work.RATIOS)
        for text in policies:
            for value in ratios:
                check_budget(text, None, value)
        todo = work.cases(policies, ratios)
        loaded: tuple[Any, Any] | None = load(model, dtype, device, threads)
        assert loaded is not None
        haystack = build_haystack(loaded[1], data.chapter(), tokens=tokens, depth=depth, seed=seed)
        setting = work.Setting(haystack, blind, model, dtype, device, threads)
        on_cuda = loaded[0].device.type == "cuda"
        jobs = min(jobs or (1 if on_cuda else min(2, os.cpu_count() or 1)), len(todo))
        if jobs > 1:
            loaded = None
            gc.collect()
        if not as_json:
            where = f"{haystack.depth:.0%} into {haystack.tokens:,} tokens of 'A Mad Tea-Party' (Alice, chapter VII)"
            out.print(f"[bold]Hidden[/] {where}:\n  {escape(haystack.fact)}")
            out.print(f"[bold]Asked[/]:\n  {escape(haystack.question)}\n")
        bars = _Bars(todo)
        results = work.run_cases(setting, todo, jobs=jobs, report=bars.report, loaded=loaded)
        rows = _collect(results, bars, show=not as_json)
    seconds = time.perf_counter() - started
    if as_json:
        print_json(
            {
                "model": model,
                "haystack": {k: v for k, v in dataclasses.asdict(haystack).items() if k != "context"},
                "question_seen_at_compression": not blind,
                "rows": [dataclasses.asdict(row) for row in rows],
                "jobs": jobs,
                "threads": threads,
                "seconds": seconds,
                "versions": versions(),
            }
        )
        return
    where = (
        "The question came after the compression (--blind)."
        if blind
        else "The question was part of the prefill: policies that read the last queries saw it (--blind hides it)."
    )
    out.print(
        f"\n{where}\nEntries are per head and layer, right after the prefill; MiB are measured from their tensors; "
        f"the speed is that of single-token passes, with {jobs} process{'es' * (jobs > 1)} of {threads} "
        f"thread{'s' * (threads > 1)} at work.\nOne question on a small model: an illustration, not a ranking. "
        f"{seconds:.0f} s in all.\nNext: kvretain demo --policy snapkv@layer --policy 'snapkv(window=32)' --ratio 0.9",
        style="dim",
        highlight=False,
    )


def _demo_table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("removed")
    table.add_column("policy", no_wrap=True)
    table.add_column("answer", overflow="fold")
    table.add_column("")
    for heading in ("entries\nkept", "cache\nMiB", "decode\ntokens/s"):
        table.add_column(heading, justify="right")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            f"{row.ratio or 0:.0%}",
            escape(row.policy),
            escape(row.answer if len(row.answer) <= 80 else row.answer[:79] + "…"),
            "[green]right[/]" if row.right else "[red]wrong[/]",
            f"{row.kept:,.0f}",
            f"{row.cache_mib:.1f}",
            f"{row.decode_tokens_per_second:.1f}",
            end_section=after is not None and after.ratio != row.ratio,
        )
    return table


class _Bars:
    """Progress bars: one over all cases, and one for each case at work."""

    def __init__(self, todo: list[Case]) -> None:
        self.todo = todo
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=err)
        self.all = self.progress.add_task("all answers", total=len(todo))
        self.running: dict[int, TaskID] = {}

    def report(self, index: int, done: float) -> None:
        case = self.todo[index]
        name = case.policy if case.ratio is None else f"{case.policy}, {case.ratio:.0%} removed"
        if index not in self.running:
            self.running[index] = self.progress.add_task(name, total=1)
        stage = "prefill" if done < 0.999 else "answer"
        self.progress.update(self.running[index], completed=done, description=escape(f"{name}: {stage}"))

    def finish(self, index: int) -> None:
        if index in self.running:
            self.progress.remove_task(self.running.pop(index))
        self.progress.advance(self.all)


def _collect(results: Iterator[tuple[int, Row]], bars: _Bars, *, show: bool) -> list[Row]:
    """All rows in the order of the cases; on a terminal the table grows above the progress bars."""
    rows: dict[int, Row] = {}
    with Live(bars.progress, console=err, refresh_per_second=5, transient=True) as live:
        for index, row in results:
            rows[index] = row
            bars.finish(index)
            if show:
                live.update(Group(_demo_table([rows[i] for i in sorted(rows)]), bars.progress))
    ordered = [rows[index] for index in sorted(rows)]
    if show:
        out.print(_demo_table(ordered))
    return ordered
