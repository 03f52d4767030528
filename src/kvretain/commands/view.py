"""``kvretain view``: one HTML page of what policies keep."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import models
from .shared import (
    AsJson,
    Device,
    Dtype,
    Every,
    Model,
    ProtectPrompt,
    Ratio,
    Recent,
    Sinks,
    Threads,
    Trigger,
    app,
    check_budget,
    check_model,
    check_place,
    check_protected,
    clear_errors,
    err,
    load,
    note_length,
    out,
    print_json,
    read_text,
    split_items,
    versions,
)

if TYPE_CHECKING:
    from ..view import Run

POLICIES = "snapkv,snapkv+hub"
BUDGET = 256


@app.command(
    epilog="""
Examples:

- `kvretain view` – SmolLM2-135M on a chapter of *Alice*: what HubKV's correction changes in what SnapKV keeps
- `kvretain view --text report.txt --policies snapkv,keydiff@layer,streaming --ratio 0.8 --out report.html`
- `kvretain view --policies adakv --budget 128 --generate 300 --every 16` – heads that compete for one budget
"""
)
def view(
    path: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("kvretain-view.html"),
    model: Model = models.EMBEDDED,
    text: Annotated[
        str | None,
        typer.Option("--text", "--file", help="A file, or - for standard input; default: a chapter of Alice."),
    ] = None,
    policies: Annotated[
        list[str] | None, typer.Option(help=f"Comma-separated, shown side by side; default: {POLICIES}.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option("--budget", "-b", help=f"Entries kept per head; without --ratio, {BUDGET}.")
    ] = None,
    ratio: Ratio = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most this many tokens of the text.")] = 1000,
    generate: Annotated[
        int, typer.Option("--generate", min=1, help="Most tokens that the model writes after it.")
    ] = 128,
    every: Every = 32,
    trigger: Trigger = "slack",
    sinks: Sinks = None,
    recent: Recent = None,
    protect_prompt: ProtectPrompt = False,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write a page that shows which tokens policies keep, head by head, while the model reads and writes."""
    started = time.perf_counter()
    with clear_errors():
        names = split_items(policies or [POLICIES], "--policies")
        if len(set(names)) < len(names):
            raise ValueError(f"--policies names one twice: {', '.join(names)}")
        limits: dict[str, Any] = {
            "budget": BUDGET if budget is None and ratio is None else budget,
            "ratio": ratio,
            "every": every,
            "trigger": trigger,
            "sinks": sinks,
            "recent": recent,
            "protect_prompt": protect_prompt,
        }
        for name in names:
            check_budget(name, **limits)
        check_model(model, dtype)
        models.require("jinja2")
        if not path.parent.is_dir():
            raise ValueError(f"--out {path} is in a folder that is not there")
        check_place(path, streamed=True)
        from .. import data
        from ..view import html_page, record

        words = data.chapter() if text is None else read_text(text, "--text")
        title = "'A Mad Tea-Party' (Alice, chapter VII)" if text is None else Path(text).name

        def read(tokenizer: Any) -> Any:
            return tokenizer(words, return_tensors="pt")["input_ids"][:, :tokens]

        check_protected(names, model, lambda own: read(own).shape[1], generate, **limits)
        llm, tokenizer = load(model, dtype, device, threads)
        ids = read(tokenizer)
        note_length(llm, ids.shape[1] + generate)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        runs = []
        with Progress(*columns, console=err, transient=True) as progress:
            for name in names:
                bar = progress.add_task(escape(name), total=ids.shape[1] + generate)

                def advance(done: float, bar: TaskID = bar) -> None:
                    progress.update(bar, completed=done)

                runs.append(record(llm, tokenizer, ids, name, new_tokens=generate, report=advance, **limits))
        size = f"{limits['budget']} entries per head" if ratio is None else f"{ratio:.0%} of the tokens removed"
        page = html_page(
            runs,
            title=f"{Path(model).name if Path(model).exists() else model} on {title}",
            note=f"{size}, compressed after the prompt and then whenever {every} more tokens are stored. "
            "What is evicted is gone. One text: an illustration, not a ranking.",
            command=shlex.join(["kvretain", *sys.argv[1:]]),
        )
        path.write_text(page, encoding="utf-8")
    found = [_record(run) for run in runs]
    seconds = time.perf_counter() - started
    if as_json:
        about = {"model": model, "text": title, "tokens": ids.shape[1], **limits}
        print_json(about | {"runs": found, "page": str(path), "seconds": seconds, "versions": versions()})
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy", overflow="fold")
    for heading in ("tokens\nwritten", "evictions", "entries per head\nat the end", "cache\nMiB"):
        table.add_column(heading, justify="right")
    for row in found:
        sizes = f"{row['kept_at_end']:,.1f}", f"{row['cache_bytes_at_end'] / 2**20:.1f}"
        table.add_row(escape(row["policy"]), f"{row['new_tokens']:,}", f"{row['evictions']:,}", *sizes)
    out.print(table)
    out.print(
        f"{path} ({path.stat().st_size / 1e6:.1f} MB) shows them in any browser; it loads nothing else. "
        f"{seconds:.0f} s in all.",
        style="dim",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _record(run: Run) -> dict[str, Any]:
    kept = run.kept(run.passes - 1)
    return {
        "policy": run.policy,
        "written": "".join(run.pieces[run.prompt :]),
        "new_tokens": len(run.ids) - run.prompt,
        "evictions": len(run.evictions),
        "kept_at_end": float(kept.sum()) / (kept.shape[0] * kept.shape[1]),
        "cache_bytes_at_end": run.nbytes[-1],
    }
