"""``kvretain eval``: does a policy help? Resumable runs and paired intervals."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .. import models
from .shared import (
    AsJson,
    Device,
    Dtype,
    Every,
    Model,
    app,
    check_budget,
    check_device,
    check_model,
    check_place,
    clear_errors,
    err,
    out,
    print_json,
    split_items,
)

if TYPE_CHECKING:
    from ..evidence.runner import Setting, Unit
    from ..evidence.store import Store


N = TypeVar("N", int, float)


def _scoped(policies: list[str], scopes: list[str] | None) -> list[str]:
    """Each policy at each scope; those that name a scope, and ``full``, stay as they are."""
    if scopes is None:
        return policies
    names = split_items(scopes, "--scopes")
    return [
        text if "@" in text or text == "full" else f"{text}@{scope}"
        for scope in names
        for text in policies
    ]  # fmt: skip


@app.command(
    "eval",
    epilog="""
Examples:

- `kvretain eval --out results` – 20 five-digit needles in 1,024 tokens, four policies, half and 90 % removed
- `kvretain eval --tasks single,continuation --policies snapkv,snapkv+hub --scopes head,layer --ratios 0.5,0.75,0.9 \
--n 100 --text book.txt --workers 2 --out results` – a table that can be read for differences
- `kvretain eval --tasks svamp --data svamp/test.jsonl --policies knorm,knorm+hub --out svamp-results`
- `kvretain eval --tasks stream-single --budgets 64,128 --length 384 --depth 0,0.5 --policies keydiff,snapkv \
--text book.txt --out recall` – needles in the first half of a text that flows through a budget
- `kvretain eval --tasks decode --budgets 64,128 --length 128 --following 512 --n 3 --policies keydiff,snapkv \
--text book.txt --out fidelity` – 24 passages read token by token; tokens after the first 128 are compared
- `kvretain eval --tasks longbench:qasper,longbench:trec --data LongBench/data --length 4096 --n 200 --ratios 0.5,0.9 \
--model Qwen/Qwen3-0.6B --out longbench` – or `--data hub`; `ruler:niah_single_1` and `gsm8k` in the same way

A task tells policies apart only where they are neither always right nor always wrong. Choose `--length` on other \
examples than the table's: run `--policies keydiff --n 20 --skip 1000` at several lengths, each into a folder of its \
own, and take one at which the baseline lies between 20 and 80 %.

Killed or stopped, the same command goes on where it was. Policies, sizes, tasks and examples may be added to a \
folder. `kvretain report` makes its tables again without measuring.
""",
)
def evaluate(
    out_folder: Annotated[str, typer.Option("--out", help="Folder for the results; one that is there is continued.")],
    model: Model = models.EMBEDDED,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Comma-separated: single, single7, multikey, multivalue, multiquery, tracking, words (needles), "
            "continuation, svamp: these compress a context once. stream-single, ... (the same needles) and decode: "
            "these feed it through the budget. Public benchmarks, read from --data: longbench:qasper, ..., "
            "ruler:niah_single_1, ..., gsm8k. Default: single."
        ),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(help="Comma-separated policies; full, random and streaming always come along."),
    ] = None,
    ratios: Annotated[
        list[str] | None, typer.Option(help="Comma-separated fractions REMOVED. Default, without --budgets: 0.5,0.9.")
    ] = None,
    budgets: Annotated[
        list[str] | None, typer.Option(help="Comma-separated numbers of entries kept per head, beside or for --ratios.")
    ] = None,
    scopes: Annotated[
        list[str] | None, typer.Option(help="Comma-separated: run the policies that name no scope at each of these.")
    ] = None,
    n: Annotated[
        int,
        typer.Option(
            min=1, help="Examples of each task, or all that a benchmark has; one of decode has --passages texts."
        ),
    ] = 20,
    skip: Annotated[int, typer.Option(min=0, help="Start at this example: another part of the same series.")] = 0,
    length: Annotated[
        int, typer.Option(min=1, help="Tokens of a context; longer prompts of LongBench are cut in their middle.")
    ] = 1024,
    following: Annotated[
        int, typer.Option(min=1, help="Tokens compared after a context, for continuation and decode.")
    ] = 256,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a pass, for stream-single, ....")] = 64,
    every: Every = 128,
    passages: Annotated[int, typer.Option(min=1, help="Passages decoded side by side, for decode.")] = 8,
    depth: Annotated[
        str, typer.Option(help="Needles lie between these shares of the context, e.g. 0,0.5 for its first half.")
    ] = "0,1",
    aware: Annotated[
        bool,
        typer.Option(
            "--aware/--blind",
            help="Compress the question with the context, or the context before it; stream-... tasks know neither.",
        ),
    ] = False,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate/--no-generate",
            help="Write greedy replies, or only tell (faster) whether they would begin with the right answer (for "
            "benchmarks: only the NLL); stream-... tasks never write.",
        ),
    ] = True,
    text: Annotated[
        str | None, typer.Option(help="Text file to take contexts from; default: a chapter of Alice (3,000 tokens).")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A benchmark's folder with its files, or one of its files; or hub. For svamp: its test.jsonl."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the examples.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with its own model.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many examples; go on another time.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure what policies lose: needles, continuations, word problems and public benchmarks, with intervals."""
    started = time.perf_counter()
    with clear_errors():
        check_model(model, dtype)
        # One thread is the fastest for so small a model; BLAS reads this when a worker starts.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        check_device(device)
        from ..evidence import report, runner
        from ..evidence.store import Store

        chosen = split_items(tasks or ["single"], "--tasks")
        for task in chosen:
            runner.check_task(task)
        if ratios is None and budgets is None:
            ratios = ["0.5,0.9"]
        values = [_number(item, float, "--ratios") for item in split_items(ratios, "--ratios")] if ratios else []
        sizes = [_number(item, int, "--budgets") for item in split_items(budgets, "--budgets")] if budgets else []
        names = _scoped(split_items(policies or ["snapkv,snapkv+hub,keydiff,keydiff+hub"], "--policies"), scopes)
        for name in names:
            for value in values:
                check_budget(name, None, value, every=every)
            for size in sizes:
                check_budget(name, size, None, every=every)
        cases = runner.cases_of(names, values, sizes)
        contents: dict[str, str] = {}
        if "svamp" in chosen:
            if data is None:
                raise ValueError("the task 'svamp' needs --data with SVAMP's test.jsonl")
            from ..tasks.svamp import load_svamp

            load_svamp(data)
            contents["svamp"] = hashlib.sha256(Path(data).read_bytes()).hexdigest()[:16]
        setting = runner.Setting(
            model, dtype, device, length, following, seed, _depth(depth), aware, generate, text, data, threads,
            chunk, every, passages,
        )  # fmt: skip
        store = Store(out_folder, setting.identity())
        check_place(store.folder, folder=True)
        public = runner.read_data(setting, chosen)
        contents |= {task: benchmark.digest for task, benchmark in public.items()}
        store.bind(contents)
        examples = {task: benchmark.size for task, benchmark in public.items()}
        units = runner.plan(store, chosen, range(skip, skip + n), cases, examples)
        total = len(units)
        units = units[:limit]
        about = {"command": "kvretain " + shlex.join(sys.argv[1:])}
        store.begin({**about, "policies": names, "ratios": values, "budgets": sizes, "n": n, "skip": skip})
        done = _work_off(setting, store, units, workers)
        summary, page, files = report.publish(store, about)
    rows = sum(cell["n"] for cell in summary["cells"])
    if as_json:
        print_json({**store.identity, **about, **summary, "rows": rows, "examples_left": total - done})
        return
    out.print(page, markup=False, highlight=False, soft_wrap=True)
    seconds = time.perf_counter() - started
    left = f"; {total - done} examples are left: the same command goes on" if total > done else ""
    per = f", {seconds / done:.1f} s each" if done else ""
    out.print(
        f"{rows:,} rows in {', '.join(map(str, files))}; {done} examples measured now{per}{left}.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _depth(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--depth wants two numbers such as 0,0.5, not {text!r}") from None
    if not 0 <= low <= high <= 1:
        raise ValueError(f"--depth wants two shares in order, within [0, 1], not {text!r}")
    return low, high


def _number(text: str, kind: type[N], option: str) -> N:
    try:
        return kind(text)
    except ValueError:
        whole = "whole " if kind is int else ""
        raise ValueError(f"{option}: {text!r} is not a {whole}number") from None


def _work_off(setting: Setting, store: Store, units: list[Unit], workers: int) -> int:
    """Runs the units under a progress bar with the time left; returns how many were done."""
    from ..evidence import runner

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} measurements,"),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    total, measured, done = sum(len(unit.cases) for unit in units), 0, 0
    began = time.perf_counter()
    # Examples take minutes: the speed is that of the last hour. A log gets a line an example instead of a bar.
    with Progress(
        *columns, console=err, speed_estimate_period=3600, transient=True, disable=not err.is_terminal
    ) as progress:
        bar = progress.add_task("loading the model", total=total)

        def tick() -> None:
            progress.update(bar, advance=1, description="measuring")

        workers = min(workers, max(1, len(units)))
        for unit in runner.run(setting, store, units, workers=workers, report=tick):
            done, measured = done + 1, measured + len(unit.cases)
            if not err.is_terminal:
                elapsed = time.perf_counter() - began
                left = elapsed / measured * (total - measured)
                where = f"{unit.task} {unit.index} is done, {done} of {len(units)} examples"
                err.print(f"{where}, {elapsed:.0f} s so far, about {left:.0f} s left", highlight=False, soft_wrap=True)
    return done
