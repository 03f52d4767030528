"""``kvretain report``: the tables of an evaluation, made again from its rows."""

from __future__ import annotations

from typing import Annotated

import typer

from .shared import AsJson, app, clear_errors, out, print_json, split_items


@app.command(
    epilog="""
Example:

- `kvretain report results` – what `kvretain eval --out results` has measured so far, also while it is still running
- `kvretain report results --compare snapkv+hub,snapkv+smd` – one policy minus another one, paired by example
"""
)
def report(
    folder: Annotated[str, typer.Argument(help="The --out folder of `kvretain eval`.")],
    compare: Annotated[
        str | None,
        typer.Option(help="Two policies of the run, A,B: print A minus B, paired by example, and write nothing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the tables of an evaluation again from its rows: nothing is measured and no model is needed."""
    with clear_errors():
        from ..evidence import report as made
        from ..evidence.store import Store

        store, run = Store.existing(folder)
        if compare is not None:
            names = split_items([compare], "--compare")
            if len(names) != 2:
                raise ValueError(f"--compare takes two policies, A,B, not {len(names)}: {compare!r}")
            found = made.compare(store.rows(), names[0], names[1], seed=store.identity["seed"])
            if as_json:
                print_json({"policy": names[0], "minus": names[1], "differences": found})
                return
            out.print(made.compared(found, *names), markup=False, highlight=False, soft_wrap=True)
            return
        about = {"command": run["command"]}
        summary, page, files = made.publish(store, about)
    rows = sum(cell["n"] for cell in summary["cells"])
    if as_json:
        print_json({**store.identity, **about, **summary, "rows": rows})
        return
    out.print(page, markup=False, highlight=False, soft_wrap=True)
    out.print(f"{rows:,} rows in {', '.join(map(str, files))}.", style="dim", highlight=False, soft_wrap=True)
