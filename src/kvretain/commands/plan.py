"""``kvretain plan``: how much memory a cache takes, and which batch fits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from .. import models
from .shared import (
    DEFAULT_POLICY,
    AsJson,
    Chunk,
    Dtype,
    Every,
    Model,
    PolicyText,
    app,
    clear_errors,
    err,
    out,
    print_json,
)


@app.command(
    epilog="""
- `kvretain plan --context 32000`
- `kvretain plan -m meta-llama/Llama-3.1-8B --context 131072 --memory 24GiB --dtype bfloat16`
- `kvretain plan --context 16000 -b 512 -b 2048 --batch 8 --chunk 1024 --policy alpha`
"""
)
def plan(
    model: Model = models.EMBEDDED,
    context: Annotated[int, typer.Option("--context", "-c", min=1, help="Tokens seen: prompt and answer.")] = 8192,
    budget: Annotated[
        list[int] | None, typer.Option("--budget", "-b", min=1, help="Entries kept per head; may be repeated.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Memory for weights and caches, such as 24GiB: says which batch fits.")
    ] = None,
    policy: PolicyText = DEFAULT_POLICY,
    every: Every = 128,
    chunk: Chunk = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """How much memory a full cache and each budget take, from the model's configuration alone: no weights are loaded.

    Counted are the cache's own tensors (sliding windows and recurrent layers as they are) and, for the batch that fits,
    the weights. A model's activations come on top; they do not depend on the budget.
    """
    from ..memory import layers_of, needs, parse_size, show_size

    with clear_errors():
        models.require("torch", "transformers")
        size = None if memory is None else parse_size(memory)
        precision = models.parse_dtype(dtype) if dtype else None
        with err.status("reading the configuration"):
            layers = layers_of(models.load_config(model), precision)
        budgets = sorted(set(budget or [128, 512, 1024, 2048, 4096]))
        rows = needs(layers, context, budgets, policy=policy, every=every, chunk=chunk, memory=size)
    if as_json:
        print_json(
            {
                "model": model,
                "context": context,
                "batch": batch,
                "policy": policy,
                "every": every,
                "chunk": chunk,
                "memory": size,
                "weights": layers.weights,
                "layers": {
                    "full": len(layers.full),
                    "sliding": len(layers.sliding),
                    "constant_bytes": layers.constant,
                },
                "per_sequence": [asdict(row) for row in rows],
                "fits": None if size is None else [layers.weights + batch * row.peak <= size for row in rows],
            }
        )
        return
    table = Table(title=f"{model}, {context:,} tokens, {policy}", title_justify="left")
    headings = ["cache", "a sequence", "of full", "at the peak"]
    headings += [f"{batch} sequences", "at the peak"] if batch > 1 else []
    headings += ["batch that fits"] if size is not None else []
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "cache" else "right", no_wrap=heading == "cache")
    for row in rows:
        cells = [show_size(row.decoding), f"{100 * row.decoding / rows[0].decoding:.1f} %", show_size(row.peak)]
        cells += [show_size(batch * row.decoding), show_size(batch * row.peak)] if batch > 1 else []
        cells += [f"{row.batch:,}"] if size is not None else []
        table.add_row("full" if row.budget is None else f"budget {row.budget:,}", *cells)
    out.print(table)
    kinds = [f"{len(layers.full)} layers of full attention"]
    kinds += [f"{len(layers.sliding)} sliding ones"] if layers.sliding else []
    kinds += [f"{show_size(layers.constant)} of recurrent state"] if layers.constant else []
    passes = "one pass" if chunk is None else f"passes of {chunk:,} tokens"
    stored = f"A budget stores budget + {every} entries per head; the peak is that of a prefill in {passes}, or of an "
    stored += "eviction."
    if len(rows) == 1:
        stored = f"'full' keeps everything, whatever the budget; the peak is that of a prefill in {passes}."
    out.print(
        f"{', '.join(kinds)}; weights {show_size(layers.weights)}. {stored} Activations are not counted.",
        style="dim",
        highlight=False,
    )
