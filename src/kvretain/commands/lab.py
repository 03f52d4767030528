"""``kvretain lab``: trains and examines the laboratory animal, a tiny model that reasons at length."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import models
from .shared import AsJson, Device, Dtype, Threads, app, check_place, clear_errors, err, load, out, print_json

lab = typer.Typer(
    help="Train and examine a **laboratory animal**: a tiny model that solves long chains of arithmetic.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(lab, name="lab")


@lab.command(
    epilog="""
Examples:

- `kvretain lab train --seed 0 --out animal0` – ten minutes on a free core; the same command goes on after a break
- `kvretain lab train --seed 1 --out animal1 --minutes 100` – at most so long; what is learnt by then is kept
- `kvretain lab train --out animal2 --stretch 2` – twice as many updates, if the first was not good enough
- `kvretain lab eval --model animal0`, then `kvretain ask --model animal0 ...` or a study with `kind = "chains"`

Ctrl-C ends it early and keeps what has been learnt. The folder gets weights, tokenizer, recipe.json and curve.csv.
""",
)
def train(
    folder: Annotated[Path, typer.Option("--out", "-o", help="The model folder; a run that is there is gone on from.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the first weights and of all problems.")] = 0,
    stretch: Annotated[float, typer.Option(help="So many times the updates of each stage.")] = 1.0,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="At most so long; default: the whole recipe.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Train a laboratory animal: a tiny Llama that works out some 20 variables, each from earlier ones.

    It repeats each definition, recalls both operands by name, at all distances, and states the result: about 300 words,
    then the value that was asked for. What its cache forgets, it gets wrong. It can do nothing else. Training
    takes about ten minutes of one core and starts from weights into which look-ups were put.
    """
    with clear_errors():
        models.require("torch", "transformers", "tokenizers", "safetensors")
        import torch

        from ..lab.recipe import Recipe
        from ..lab.train import Trainer
        from ..lab.train import train as work

        check_place(folder, folder=True)
        if threads:
            torch.set_num_threads(threads)
        recipe = Recipe(seed=seed).stretched(stretch)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as progress, _interruptible() as stop:
            bar = progress.add_task("training", total=recipe.updates)

            def report(trainer: Trainer) -> None:
                if trainer.curve:
                    last = trainer.curve[-1]
                    about = f"loss {last.loss:.3f}, recalled {_share(last.recalled)}, computed {_share(last.computed)}"
                    progress.update(bar, description=about)
                progress.update(bar, completed=trainer.update)

            trainer = work(recipe, folder, minutes=minutes, report=report, stop=stop)
    last = trainer.curve[-1] if trainer.curve else None
    record = {
        "path": str(folder),
        "updates": trainer.update,
        "of": recipe.updates,
        "minutes": trainer.seconds / 60,
        "recalled": last.recalled if last else None,
        "computed": last.computed if last else None,
    }
    if as_json:
        print_json(record)
        return
    out.print(
        f"{trainer.update:,} of {recipe.updates:,} updates, {trainer.seconds / 60:.0f} minutes"
        + (f"; digits recalled {_share(last.recalled)}, computed {_share(last.computed)}" if last else "")
        + ("" if trainer.done else "; the same command goes on")
        + f"\na laboratory animal, kept in {folder}; next: kvretain lab eval --model {folder}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@lab.command(
    "eval",
    epilog="""
Examples:

- `kvretain lab eval --model animal0`
- `kvretain lab eval --model animal0 --n 200 --steps 8 --steps 20 --json`
""",
)
def evaluate(
    model: Annotated[str, typer.Option("--model", "-m", help="A folder that `kvretain lab train` made.")],
    n: Annotated[int, typer.Option("--n", min=1, help="Problems of each length.")] = 100,
    steps: Annotated[
        list[int] | None, typer.Option(min=1, help="Steps of a chain; may be repeated; default: 5, 10, 20.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the problems.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Problems at once.")] = 50,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """How much a laboratory animal can do with a full cache: right answers by length, right recalls by distance.

    This is the ceiling of a study on it, and says where to look for the floor.
    """
    with clear_errors():
        models.require("torch", "transformers")
        models.check_model_name(model)
        from ..lab.chains import series
        from ..lab.evaluate import by_distance, solve

        lengths = sorted(set(steps or [5, 10, 20]))
        problems = {length: series(n, steps=length, seed=seed) for length in lengths}
        animal, tokenizer = load(model, dtype, device, threads)
        found = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as progress:
            for length, asked in problems.items():
                bar = progress.add_task(f"{length} steps", total=n)
                found[length] = solve(
                    animal,
                    tokenizer,
                    asked,
                    batch=batch,
                    report=lambda done, bar=bar: progress.update(bar, completed=done),  # type: ignore[misc]
                )
    rows: list[dict[str, Any]] = [
        {
            "steps": length,
            "words": len(attempts[0].chain.solution.split()),
            **_interval([attempt.right for attempt in attempts]),
            "faultless": sum(attempt.faultless for attempt in attempts) / n,
        }
        for length, attempts in found.items()
    ]
    distances = by_distance(attempt for attempts in found.values() for attempt in attempts)
    far = [{"distance": name, **_interval(right)} for name, right in distances.items()]
    if as_json:
        print_json({"model": model, "seed": seed, "accuracy": rows, "recall": far})
        return
    table = Table(title=f"{model}, a laboratory animal, full cache, greedy", title_justify="left")
    for heading in ("steps", "words written", "problems", "right", "95 % interval", "every word right"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["steps"]), str(row["words"]), str(row["n"]), _share(row["share"]), _ends(row),
            _share(row["faultless"]),
        )  # fmt: skip
    out.print(table)
    table = Table(title="Values recalled as they last stood, by the words in between", title_justify="left")
    for heading in ("distance", "recalls", "right", "95 % interval"):
        table.add_column(heading, justify="right")
    for row in far:
        table.add_row(row["distance"], f"{row['n']:,}", _share(row["share"]), _ends(row))
    out.print(table)


def _interval(right: list[bool]) -> dict[str, Any]:
    from ..evidence.stats import wilson

    found = wilson(sum(right), len(right))
    return {"n": found.n, "share": found.mean, "low": found.low, "high": found.high}


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _ends(row: dict[str, Any]) -> str:
    return f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"


@contextmanager
def _interruptible() -> Iterator[Any]:
    """Whether Ctrl-C was pressed; a second press interrupts as usual."""
    pressed = False

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        err.print("stopping and writing the model; Ctrl-C again keeps the last checkpoint only", style="yellow")

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
