"""``kvretain report``: the tables of an evaluation, made again from its rows."""

from __future__ import annotations

from typing import Annotated

import typer

from .shared import AsJson, app, clear_errors, out, print_json


@app.command(
    epilog="""
Example:

- `kvretain report results` – what `kvretain eval --out results` has measured so far, also while it is still running
"""
)
def report(
    folder: Annotated[str, typer.Argument(help="The --out folder of `kvretain eval`.")], as_json: AsJson = False
) -> None:
    """Make the tables of an evaluation again from its rows: nothing is measured and no model is needed."""
    with clear_errors():
        from ..evidence.report import publish
        from ..evidence.store import Store

        store, run = Store.existing(folder)
        about = {"command": run["command"]}
        summary, page, files = publish(store, about)
    rows = sum(cell["n"] for cell in summary["cells"])
    if as_json:
        print_json({**store.identity, **about, **summary, "rows": rows})
        return
    out.print(page, markup=False, highlight=False, soft_wrap=True)
    out.print(f"{rows:,} rows in {', '.join(map(str, files))}.", style="dim", highlight=False, soft_wrap=True)
