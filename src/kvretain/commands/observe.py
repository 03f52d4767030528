"""``kvretain observe``: figures of a model's scores."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import models
from ..observe import FEWEST, SCORERS
from .shared import (
    AsJson,
    Device,
    Dtype,
    Model,
    Threads,
    app,
    check_model,
    check_place,
    clear_errors,
    err,
    load,
    note_length,
    out,
    print_json,
    read_text,
    versions,
)


@app.command(
    epilog="""
Examples:

- `kvretain observe --out figures` – SmolLM2-135M on a chapter of *Alice*, three scorers
- `kvretain observe --out figures --text report.txt --tokens 4000 --model Qwen/Qwen3-0.6B`
- `kvretain observe --out figures --policy "snapkv(window=32)" --policy knorm --policy h2o`
"""
)
def observe(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder for the figures (PNG) and their numbers (CSV).")],
    model: Model = models.EMBEDDED,
    text: Annotated[
        str | None, typer.Option(help="The text: a file, or - for standard input; default: a chapter of Alice.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help=f"A scorer, alone; may be repeated; default: {', '.join(SCORERS)}."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=FEWEST, help="At most this many tokens of the text.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of permutations, random choices and intervals.")] = 0,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Draw how a model's scores cluster, what top-k covers, and how sharp heads are."""
    started = time.perf_counter()
    with clear_errors():
        check_model(model, dtype)
        from .. import data
        from ..observe import plots, write_figures
        from ..observe.collect import collect, parse_scorer, protection

        plots.check_matplotlib()
        named = {name: parse_scorer(name) for name in policy or SCORERS}
        check_place(folder, folder=True)
        words = data.chapter() if text is None else read_text(text, "--text")
        title = "'A Mad Tea-Party' (Alice, chapter VII)" if text is None else Path(text).name
        llm, tokenizer = load(model, dtype, device, threads)
        ids = tokenizer(words, return_tensors="pt")["input_ids"][:, :tokens]
        protection(ids.shape[1], named.values())
        note_length(llm, ids.shape[1])
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as progress:
            bar = progress.add_task(f"one prefill of {ids.shape[1]:,} tokens", total=None)

            def layer(done: int, total: int) -> None:
                progress.update(bar, completed=done, total=total)

            def stage(done: int, total: int, name: str) -> None:
                progress.update(bar, completed=done, total=total, description=name.replace("_", " "))

            seen = collect(llm, ids, named, report=layer)
            source = f"{Path(model).name if Path(model).exists() else model} on {title}"
            made = write_figures(seen, folder, source=source, seed=seed, report=stage)
        record = {
            "model": model,
            "text": title,
            "tokens": seen.tokens,
            "heads": seen.heads,
            "scorers": list(named),
            "seed": seed,
            "captions": {name: table.caption for name, table in made.items()},
            "summary": made["summary"].rows,
            "versions": versions(),
        }
        (folder / "run.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(record | {"folder": str(folder), "seconds": time.perf_counter() - started})
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("mean over heads", overflow="fold")
    lines: dict[str, list[str]] = {}
    for row in made["summary"].rows:
        cell = f"{row['mean']:.3f}\n[dim]{row['low']:.3f} to {row['high']:.3f}[/]"
        lines.setdefault(str(row["quantity"]), []).append(cell)
    for name in named:
        table.add_column(escape(name), justify="right", overflow="fold")
    for quantity, cells in lines.items():
        table.add_row(quantity, *cells)
    out.print(table)
    out.print(
        f"{made['summary'].caption}\n{len(made) - 1} figures (PNG, CSV), summary.csv and run.json are in {folder}. "
        f"One text: an observation, not a ranking. {time.perf_counter() - started:.0f} s in all.",
        style="dim",
        highlight=False,
        markup=False,
    )
