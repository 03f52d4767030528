"""``kvretain study``: from a plan to a verdict that can be trusted."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .shared import AsJson, app, check_place, clear_errors, err, out, print_json

if TYPE_CHECKING:
    from ..evidence.study import Study
    from ..evidence.units import Results, Unit

study = typer.Typer(
    name="study",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Tell a real gain from a false one: a plan, a frozen choice, one look at held-out problems.",
    epilog="""
In this order, each on the same plan:

- `kvretain study init plan.toml` – checks everything, fixes the split, says how large a gain must be to be found
- `kvretain study tune plan.toml` – runs all candidates on the development split, at matched mean cache
- `kvretain study freeze plan.toml` – chooses by the rule, once
- `kvretain study confirm plan.toml` – runs the choice on the held-out split, once
- `kvretain study report plan.toml` – the verdict, figures and diagnostics; `status` says how far things are

A command out of order says which promise it would break. Killed or stopped, the same command goes on where it was. \
`plans/` in the repository holds plans to start from, `docs/evidence.md` says what is promised.
""",
)
app.add_typer(study)

PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="The plan, a TOML file.")]
OutFolder = Annotated[
    str | None, typer.Option("--out", help="Folder of the study; default: beside the plan, plan.toml -> plan.study.")
]
Workers = Annotated[int, typer.Option(min=1, help="Processes, or Ray actors; each loads a model once.")]
Engine = Annotated[str, typer.Option(help="local, or ray: the cluster at $RAY_ADDRESS, or one on this machine.")]
StudyThreads = Annotated[int, typer.Option(min=1, help="CPU threads of each worker.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Stop after this many runs; go on another time.")]


def _command() -> str:
    return "kvretain " + shlex.join(sys.argv[1:])


@study.command(epilog="Example: `kvretain study init plans/recall-cpu.toml`")
def init(plan: PlanFile, out_folder: OutFolder = None, as_json: AsJson = False) -> None:
    """Check the plan and all it names, fix the split, and print which gains can be found."""
    with clear_errors():
        from ..evidence.lock import alone
        from ..evidence.study import Study

        made = Study(plan, out_folder)
        check_place(made.folder, "the study's folder", folder=True)
        made.folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(made.folder):
            since = made.init(_command())
    locked, statistics = made.lock.content, made.plan.statistics
    found = {share: made.detectable(share, statistics.correlation) for share in statistics.discordant}
    runs = {"development": len(locked["development"]), "heldout": len(locked["heldout"])}
    if as_json:
        print_json(
            {"folder": str(made.folder), **runs, "cells": made.plan.cells, "detectable": found, "changed": since}
        )
        return
    out.print(f"{made.plan.title}", style="bold", markup=False)
    if since:
        out.print(f"Changed since the last init: {'; '.join(since)}.", markup=False, highlight=False)
    candidates = sum(len(made.plan.candidates(arm)) for arm in made.plan.arms)
    per = made.plan.samples * len(made.plan.models) * len(made.plan.budgets)
    out.print(
        f"{runs['development']} problems for development, {runs['heldout']} held out; {made.plan.cells} cells. "
        f"`tune` takes at least {runs['development'] * per * candidates:,} runs, `confirm` "
        f"{runs['heldout'] * per * len(made.plan.arms):,}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    out.print(
        f"A cell finds, with probability {statistics.power:.0%} and a family-wise error of {statistics.alpha:.2g}, "
        "a difference of at least:",
        highlight=False,
        soft_wrap=True,
    )
    for share, least in found.items():
        told = "none, however large: plan more problems or runs" if least is None else f"{100 * least:.1f} points"
        out.print(f"  {told} if {share:.0%} of pairs differ", highlight=False)
    lengths = {len(problem.question.split()) for problem in made.problems}
    if lengths != {0} and len(lengths) == 1 and len(made.problems) > 1:  # the workload recall has no questions
        err.print(
            f"Warning: all {len(made.problems)} prompts have {lengths.pop()} words. If they share a form, too, every "
            "eviction falls on the same place of each, and one entry more moves them all: let their lengths differ.",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    out.print(f"Next: kvretain study tune {plan}", style="dim", markup=False, highlight=False, soft_wrap=True)


@study.command(
    epilog="Examples: `kvretain study tune plan.toml --workers 2`; on a cluster with 8 GPUs "
    "`kvretain study tune plan.toml --engine ray --workers 8`"
)
def tune(
    plan: PlanFile,
    out_folder: OutFolder = None,
    workers: Workers = 1,
    engine: Engine = "local",
    threads: StudyThreads = 1,
    limit: Limit = None,
) -> None:
    """Run every candidate on the development split, at budgets at which mean caches agree."""
    with clear_errors(), _opened("tune", plan, out_folder, threads) as made:
        made.tuning()
        if not made.lock.content.get("tuned"):
            made.lock.save(_command(), tuned=True)
        results = made.results("development")
        left = limit
        while left != 0:
            todo = _unique(unit for match in made.matches(results) for unit in match.todo)
            if not todo:
                break
            done = _work_off(made, results, todo[:left], engine, workers, threads)
            left = None if left is None else left - done
        rest = _unique(unit for match in made.matches(results) for unit in match.todo)
        if rest:
            out.print(f"At least {len(rest)} runs are left: the same command goes on.", highlight=False)
            return
        table = made.tuned(results)
    for row in sorted(table, key=lambda row: (row["arm"], -(row["gain"] if row["gain"] is not None else -9))):
        gain = "mean cache not reached" if row["gain"] is None else f"{100 * row['gain']:+.1f} points"
        out.print(f"{row['arm']} {row['label']}: {gain}", markup=False, highlight=False, soft_wrap=True)
        for cell in row["cells"]:
            if cell["own"] not in (None, cell["budget"]):
                note = f"  {cell['model']}, budget {cell['budget']}: equal mean cache at budget {cell['own']}"
                out.print(note, markup=False, highlight=False, soft_wrap=True)
    out.print(f"Next: kvretain study freeze {plan}", style="dim", markup=False, highlight=False, soft_wrap=True)


@study.command(epilog="Example: `kvretain study freeze plan.toml`")
def freeze(plan: PlanFile, out_folder: OutFolder = None, as_json: AsJson = False) -> None:
    """Choose each arm's values by the rule, and record the choice for good."""
    with clear_errors(), _opened("freeze", plan, out_folder) as made:
        frozen = made.freeze(_command())
    if as_json:
        print_json(frozen)
        return
    out.print(f"Rule: {frozen['rule']}.", markup=False, highlight=False, soft_wrap=True)
    for arm, choice in frozen["choice"].items():
        budgets = ", ".join(f"{own} beside {budget} ({model})" for model, budget, own in choice["budgets"])
        text = f"{arm}: {choice['label']} ({choice['policy']}), {100 * choice['gain']:+.1f} points; budgets {budgets}"
        out.print(text, markup=False, highlight=False, soft_wrap=True)
        cells = next(row["cells"] for row in frozen["table"] if row["policy"] == choice["policy"] and row["arm"] == arm)
        for cell in cells:
            least = made.detectable(cell["discordant"], cell["correlation"]) if cell["discordant"] else None
            told = "no difference can be found" if least is None else f"{100 * least:.1f} points can be found"
            where = f"  {cell['model']}, budget {cell['budget']}: {cell['discordant']:.0%} of pairs differ, so {told}"
            out.print(where, markup=False, highlight=False, soft_wrap=True)
    out.print(f"Next: kvretain study confirm {plan}", style="dim", markup=False, highlight=False, soft_wrap=True)


@study.command(epilog="Example: `kvretain study confirm plan.toml --workers 2`")
def confirm(
    plan: PlanFile,
    out_folder: OutFolder = None,
    workers: Workers = 1,
    engine: Engine = "local",
    threads: StudyThreads = 1,
    limit: Limit = None,
) -> None:
    """Run the frozen choice on the held-out split, once."""
    with clear_errors(), _opened("confirm", plan, out_folder, threads) as made:
        made.confirming()
        if made.confirmed:
            out.print("The held-out split was run already and is not run again.", highlight=False)
        else:
            results = made.results("heldout")
            todo = results.missing(made.heldout_units())
            if not len(results):
                made.lock.save(_command())
            done = _work_off(made, results, todo[:limit], engine, workers, threads, made.as_tuned)
            if done < len(todo):
                out.print(f"{len(todo) - done} runs are left: the same command goes on.", highlight=False)
                return
            made.lock.save(confirmed=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))
    out.print(f"Next: kvretain study report {plan}", style="dim", markup=False, highlight=False, soft_wrap=True)


@study.command(epilog="Example: `kvretain study report plan.toml` – `report.md`, `report.html`, `runs.csv.gz`")
def report(plan: PlanFile, out_folder: OutFolder = None, as_json: AsJson = False) -> None:
    """Write the verdict with figures, tables and diagnostics; nothing is measured."""
    with clear_errors():
        from ..evidence.page import contents, publish
        from ..evidence.study import Study

        made = Study.as_locked(plan, out_folder)
        if as_json:
            print_json(contents(made, _command())["data"])
            return
        page, files = publish(made, _command())
    out.print(page.partition("\n## How to repeat it")[0], markup=False, highlight=False, soft_wrap=True)
    out.print(f"Open {files[1]} in a browser.", style="dim", markup=False, highlight=False, soft_wrap=True)


@study.command(epilog="Example: `kvretain study status plan.toml`")
def status(plan: PlanFile, out_folder: OutFolder = None, as_json: AsJson = False) -> None:
    """Say how far the study is, how fast, and what comes next."""
    with clear_errors():
        from ..evidence.study import Study

        made = Study.as_locked(plan, out_folder)
        found = _progress(made)
    if as_json:
        print_json(found)
        return
    for event in made.lock.content["history"]:
        out.print(f"{event['at']}  {event['command']}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for side in ("development", "heldout"):
        if side in found:
            of = found[side]
            rate = f", {of['per_hour']:.0f} an hour of late" if of["per_hour"] else ""
            left = f", about {_span(of['seconds_left'])} left" if of["seconds_left"] else ""
            out.print(f"{side}: {of['done']} of {of['total']} runs{rate}{left}", highlight=False)
    out.print(f"Next: kvretain study {found['next']} {plan}", markup=False, highlight=False, soft_wrap=True)


def _progress(made: Study) -> dict[str, Any]:
    """Runs done and known to be needed, and their rate, on each side; and the command that is next."""
    found: dict[str, Any] = {}
    results = made.results("development")
    matches = made.matches(results)
    todo = len(_unique(unit for match in matches for unit in match.todo))
    if not made.frozen:
        found["development"] = _pace(results, todo)
        return found | {"next": "tune" if todo else "freeze"}
    heldout = made.results("heldout")
    found["heldout"] = _pace(heldout, len(heldout.missing(made.heldout_units())))
    return found | {"next": "report" if made.confirmed else "confirm"}


def _pace(results: Results, todo: int) -> dict[str, Any]:
    """Done, total, and the rate between the first and the last of the 100 latest runs."""
    times = sorted(record.finished for record in results.all())[-100:]
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    rate = (len(times) - 1) / span if span > 0 else None
    return {
        "done": len(results),
        "total": len(results) + todo,
        "per_hour": rate and 3600 * rate,
        "seconds_left": rate and todo / rate,
    }


def _span(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


@contextmanager
def _opened(command: str, plan: str, out_folder: str | None, threads: int = 1) -> Iterator[Study]:
    """The study, for this process alone."""
    # One thread is the fastest for a small model; BLAS reads this when a worker starts.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    from ..evidence.lock import alone
    from ..evidence.study import Study

    before = Study(plan, out_folder)
    if not before.lock:
        before.unchanged(command)  # raises, and leaves no folder behind
    with alone(before.folder):
        yield Study(plan, out_folder)


def _unique(units: Any) -> list[Unit]:
    return list({unit.key: unit for unit in units}.values())


def _work_off(
    made: Study, results: Results, units: list[Unit], engine: str, workers: int, threads: int, check: Any = None
) -> int:
    """Runs and keeps ``units`` under a progress bar with rate and time left; returns how many were done."""
    from ..evidence import station

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} runs,"),
        TimeElapsedColumn(),
        TextColumn("so far, {task.fields[pace]}"),
    )
    began, done = time.perf_counter(), 0
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        bar = progress.add_task("loading the model", total=len(units), pace="")
        for record in station.run(made.plan, units, engine=engine, workers=workers, threads=threads):
            if check:
                check(record)
            results.add(record)
            done += 1
            each = (time.perf_counter() - began) / done
            pace = f"{3600 / each:.0f} an hour, about {_span(each * (len(units) - done))} left"
            progress.update(bar, advance=1, description=record.policy, pace=pace)
            if not err.is_terminal:
                # No verdict of the held-out side before all are there: who looks earlier may stop when it suits.
                verdict = "" if results.folder.name == "heldout" else f": {record.verdict}"
                err.print(f"{record.problem}, {record.policy} at {record.budget}{verdict}; {done} of "
                          f"{len(units)}, {pace}", markup=False, highlight=False, soft_wrap=True)  # fmt: skip
    return done
