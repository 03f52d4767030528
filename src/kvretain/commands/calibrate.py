"""``kvretain calibrate``: query statistics of a model, for TriAttention's scores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import models
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
    load,
    out,
    print_json,
    read_text,
)


@app.command(
    epilog="""
Examples:

- `kvretain calibrate` – SmolLM2-135M on a chapter of *Alice*; the policies that need it find the file by themselves
- `kvretain calibrate --model Qwen/Qwen3-0.6B --text book.txt --tokens 32768 --plot concentration.png`
- `kvretain calibrate --text my.txt --out my.safetensors`, then `--policy "trig(calibration='my.safetensors')"`
"""
)
def calibrate(
    model: Model = models.EMBEDDED,
    text: Annotated[
        str | None,
        typer.Option(
            help="The text: a file, or - for standard input, held in memory whole; default: a chapter of Alice."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="At most this many tokens of the text.")] = 4096,
    context: Annotated[
        int, typer.Option(min=2, help="The text is read in blocks of this many tokens; more need more memory.")
    ] = 4096,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per pass.")] = 512,
    path: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Where to write it; default: kvretain's cache folder, where policies look."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw the concentration of every head: a .png, and a .csv beside it.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model's queries before rotation, for the policies that need a calibration (TriAttention)."""
    started = time.perf_counter()
    with clear_errors():
        check_model(model, dtype)
        from .. import artefacts
        from .. import calibrate as measure
        from ..observe import concentration

        if plot is not None:
            concentration.check(plot)
            check_place(plot, "--plot", streamed=True)
            check_place(plot.with_suffix(".csv"), "--plot", streamed=True)
        if path is not None:
            path = path.expanduser()
            check_place(path)
        else:
            check_place(models.cache_root() / "calibration", "kvretain's cache folder", folder=True)
        given = None if text is None else read_text(text, "--text")
        llm, tokenizer = load(model, dtype, device, threads)
        words, title, most = measure.default_text(llm)
        if given is not None:
            words, title, most = given, Path(str(text)).name, context
        with measure.progress_bar("calibrating") as report:
            found = measure.calibrate(
                llm, words, tokenizer, tokens=tokens, context=min(context, most), chunk=chunk, report=report
            )
        path = found.save(path or artefacts.own_path("calibration", llm))
        if plot is not None:
            concentration.draw(found, plot, source=f"{found.metadata['model'] or model} on {title}")
    heads = found.concentration
    summary: dict[str, Any] = {
        "path": str(path),
        "tokens": int(found.metadata["tokens"]),
        "layers": len(found.layers),
        "heads": heads.numel(),
        "mean_concentration": float(heads.mean()),
        "heads_above_0.95": int((heads > 0.95).sum()),
        "seconds": time.perf_counter() - started,
    }
    if as_json:
        print_json(summary | {"metadata": dict(found.metadata), "plot": str(plot) if plot else None})
        return
    share = summary["heads_above_0.95"] / summary["heads"]
    out.print(
        f"{summary['tokens']:,} tokens, {len(found.layers)} layers, {summary['heads']} query heads, "
        f"{summary['seconds']:.0f} s\n"
        f"concentration R = |mean of q| / mean of |q|: {summary['mean_concentration']:.3f} on average over heads; "
        f"above 0.95 in {summary['heads_above_0.95']} of them ({share:.0%})\n"
        f"kept in {path}" + (f"\ndrawn in {plot}" if plot else ""),
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
