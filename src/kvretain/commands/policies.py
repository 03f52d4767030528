"""``kvretain policies``: what there is to choose from."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from rich.markup import escape
from rich.table import Table

from .. import mergers, presets, refiners, scorers, selectors
from ..policy import SCOPES, Policy
from .shared import AsJson, app, out, print_json


def _components(registry: Any) -> list[dict[str, Any]]:
    """What a registry holds; ``summary`` is the first line of a component's file."""
    described = []
    for name in registry:
        cls = registry[name]
        entry = {
            "name": name,
            "arguments": {field.name: field.default for field in dataclasses.fields(cls)},
            "summary": (inspect.getdoc(inspect.getmodule(cls)) or "").partition("\n")[0],
            "doc": inspect.getdoc(cls) or "",
        }
        described.append(entry | ({"needs": sorted(cls().needs), "paper": cls.paper} if hasattr(cls, "needs") else {}))
    return described


@app.command(
    epilog="""
A policy is `scorer[+refiner][/selector][~merger][@scope]`, and each part takes arguments:

- `snapkv+hub`
- `keydiff@layer`
- `snapkv(window=16)+hub(discount=0.25)@model`
"""
)
def policies(as_json: AsJson = False) -> None:
    """List the policies, and the scorers, refiners, selectors, mergers and scopes that they are made of."""
    named = [{**dataclasses.asdict(p), "needs": sorted(Policy.parse(p.text).needs)} for p in presets.values()]
    parts = {"scorers": _components(scorers), "refiners": _components(refiners), "selectors": _components(selectors)}
    parts["mergers"] = _components(mergers)
    if as_json:
        print_json({"presets": named, **parts, "scopes": list(SCOPES)})
        return
    table = Table(title="Policies", title_justify="left")
    for heading in ("name", "needs", "paper", "what it keeps"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for preset in named:
        table.add_row(preset["name"], ", ".join(preset["needs"]) or "–", escape(preset["paper"]), escape(preset["doc"]))
    out.print(table)
    for kind, entries in parts.items():
        table = Table(title=kind.capitalize(), title_justify="left")
        headings = ["name", "needs", "arguments and defaults", "what it does"]
        if kind != "scorers":
            headings.remove("needs")
        for heading in headings:
            table.add_column(heading, overflow="fold", no_wrap=heading == "name")
        for entry in entries:
            arguments = ", ".join(f"{name}={value!r}" for name, value in entry["arguments"].items()) or "–"
            needs = [", ".join(entry["needs"]) or "–"] if kind == "scorers" else []
            table.add_row(entry["name"], *needs, escape(arguments), escape(entry["summary"]))
        out.print(table)
    out.print(
        f"Scopes: {', '.join(SCOPES)} (who shares one set of entries).\n"
        "Needs: what a policy collects while the model runs, through one registered attention function; a calibration "
        "is measured once, before.",
        style="dim",
        highlight=False,
    )
