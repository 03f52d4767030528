"""``kvretain train-gate``: gates of a model for the policy ``fastkvzip``, distilled from KVzip's scores."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .. import models
from ..distil import FEWEST, SHORTEST
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
    fail,
    load,
    out,
    print_json,
    read_text,
)


@app.command(
    "train-gate",
    epilog="""
Examples:

- `kvretain train-gate` – SmolLM2-135M on a chapter of *Alice*; then `--policy fastkvzip` works
- `kvretain train-gate --model Qwen/Qwen3-0.6B --text one.txt --text two.txt --tokens 65536`
- `kvretain train-gate --text code.py --out code.safetensors`, used by `--policy "fastkvzip(gate='code.safetensors')"`

Ctrl-C while training ends it early and keeps what has been learnt.
""",
)
def train_gate(
    model: Model = models.EMBEDDED,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A text: a file, or - for standard input; may be repeated; default: a chapter of Alice."),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write it; default: kvretain's cache folder, where policies look."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=FEWEST, help="At most this many tokens of the texts.")] = 16384,
    context: Annotated[int, typer.Option(min=SHORTEST, help="Tokens that the model reads at a time, about.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimiser.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of tokens.")] = 0,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Train the gates that the policy fastkvzip needs, from KVzip's scores of the model's own tokens."""
    started = time.perf_counter()
    with _interruptible(), clear_errors():
        check_model(model, dtype)
        from .. import artefacts, data, distil

        if path is not None:
            path = path.expanduser()
            check_place(path)
        else:
            check_place(models.cache_root() / "gate", "kvretain's cache folder", folder=True)
        texts = [read_text(source, "--text") for source in text] if text else [data.chapter()]
        llm, tokenizer = load(model, dtype, device, threads)
        with _progress() as (report, stop):
            gate = distil.train_gate(
                llm,
                tokenizer,
                texts,
                tokens=tokens,
                context=context,
                steps=steps,
                seed=seed,
                report=report,
                stop=stop,
            )
        path = gate.save(path or artefacts.own_path("gate", llm))
    said = gate.metadata
    record: dict[str, Any] = {"path": str(path), "metadata": dict(said), "seconds": time.perf_counter() - started}
    if as_json:
        print_json(record)
        return
    early = f", stopped after {said['steps']} of {steps} steps" if int(said["steps"]) < steps else ""
    out.print(
        f"trained on {int(said['tokens']):,} tokens, {said['full-attention_layers']} layers, "
        f"{record['seconds']:.0f} s{early}\n"
        f"on {int(said['held_out_tokens']):,} tokens held out: loss {float(said['held_out_loss']):.4f} (each head's "
        f"mean score: {float(said['constant_loss']):.4f}; KVzip itself: {float(said['least_loss']):.4f}), rank "
        f"correlation with KVzip {float(said['rank_correlation']):.2f}\n"
        f"kept in {path}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C says that nothing is there."""
    try:
        yield
    except KeyboardInterrupt:
        fail("interrupted: no gate was written", code=130)


@contextmanager
def _progress() -> Iterator[tuple[Callable[[str, int, int], None], Callable[[], bool]]]:
    """A bar for the stage that is reported; and whether Ctrl-C was pressed while training. A second press, or one
    before anything was learnt, interrupts as usual."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    names = {"reading": "KVzip reads the contexts", "training": "training, Ctrl-C ends early"}
    at, pressed = "", False

    def press(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed or at != "training":
            raise KeyboardInterrupt
        pressed = True
        err.print("stopping; Ctrl-C again keeps nothing", style="yellow")

    with Progress(*columns, console=err, transient=True) as progress:
        bar = progress.add_task("", total=None)

        def report(stage: str, done: int, total: int) -> None:
            nonlocal at
            at = stage
            progress.update(bar, description=names[stage], completed=done, total=total)

        before = signal.signal(signal.SIGINT, press)
        try:
            yield report, lambda: pressed
        finally:
            signal.signal(signal.SIGINT, before)
