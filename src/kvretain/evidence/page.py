"""The report of a study: Markdown with figures beside it, and one HTML page that needs nothing else."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..templates import render
from .analysis import CellResult, as_dict, cells_of, compare, outcomes
from .diagnostics import diagnose, forest, points, short
from .lock import changed, facts
from .store import write_whole
from .study import Study, mean_of
from .units import Results

TAIL = 400
"""Characters of a reply's end that the page shows."""


def publish(study: Study, command: str) -> tuple[str, list[Path]]:
    """Writes ``report.md``, ``report.html``, ``report.json``, ``figures/`` and ``runs.csv.gz`` (every run, without its
    reply); the same records give the same files.

    Before the held-out split is complete the report shows the development split and no verdict.

    Args:
        study: from :meth:`Study.as_locked`.
        command: for the page's foot.

    Returns:
        The Markdown, and the paths written.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: a record is damaged, or those of a complete study are not there.
    """
    content = contents(study, command)
    page = markdown(content)
    made = {
        "report.md": page,
        "report.html": render(__package__, "page.html.j2", content, extra="study"),
        "report.json": json.dumps(content["data"], indent=1, ensure_ascii=False) + "\n",
    }
    made |= {f"figures/{name}.svg": svg for name, svg in content["figures"].items()}
    files = {name: text.encode() for name, text in made.items()} | {"runs.csv.gz": _runs(study)}
    for name, content_of in files.items():
        write_whole(study.folder / name, content_of)
    return page, [study.folder / name for name in files]


def _runs(study: Study) -> bytes:
    """All records as compressed CSV, numbers to 6 digits; replies and what concerns the run alone stay behind."""
    columns = ["model", "policy", "budget", "problem", "sample", "verdict", "exact", "nll", "mean_cache", "peak_cache"]
    columns.append("tokens")
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["split", "arm", *columns])
    for side in ("development", "heldout"):
        results = study.results(side)
        arms = _arms(study, side, results)
        found = [[arms.get(r.key, ""), *(getattr(r, name) for name in columns)] for r in results.all()]
        for row in sorted(found, key=lambda row: row[:6]):
            writer.writerow([side, *(f"{value:.6g}" if isinstance(value, float) else value for value in row)])
    return gzip.compress(table.getvalue().encode(), mtime=0)


def _arms(study: Study, side: str, results: Results) -> dict[str, str]:
    """The arm of each record, by its key: arms may share a policy, and differ in their cache."""
    plan, found = study.plan, dict[str, str]()
    sizes = sorted({(r.model, r.policy, r.budget) for r in results.all()})
    for candidate in (c for name in plan.arms for c in plan.candidates(name)):
        for model, policy, budget in sizes:
            if policy == candidate.policy:
                for unit in study.units(side, model, candidate, budget):
                    found.setdefault(unit.key, candidate.arm)
    return found


def contents(study: Study, command: str) -> dict[str, Any]:
    """All that a report shows, as plain values and ready texts."""
    plan, locked = study.plan, study.lock.content
    development = study.results("development")
    text = study.path.read_text(encoding="utf-8") if study.path.is_file() else study.text
    now = facts(plan, text, study.problems) if all(Path(n).expanduser().is_file() for n in plan.files) else None
    content: dict[str, Any] = {
        "title": plan.title,
        "state": "",
        "verdicts": [],
        "figures": {},
        "tables": [],
        "diagnostics": [],
        "drill": [],
        "models": [short(model) for model in plan.models],
        "versions": locked["facts"]["environment"],
        "hashes": {name: locked["facts"][name][:16] for name in ("plan", "data", "code")},
        "history": locked["history"],
        "changes": [_change(event) for event in locked["history"] if event.get("changed")],
        "command": command,
        "plan_text": study.text,
        "split": f"{len(locked['development'])} problems for development, {len(locked['heldout'])} held out, "
        f"{plan.samples} run{'s' * (plan.samples > 1)} of each problem and arm",
        "since": changed(locked["facts"], now) if now else [],
        "data": {"title": plan.title, "facts": locked["facts"], "frozen": study.frozen, "cells": [], "branch": {}},
    }
    for model, named in _artefacts(study, development).items():
        content["hashes"] |= {f"{name} of {short(model)}": value for name, value in named.items()}
    if study.frozen:
        content["tables"].append(_candidates(study))
    if not study.frozen:
        content["state"] = "No verdict: nothing is frozen yet. `kvretain study status` says what is still to be done."
        content["tables"].append(_screening(study, development))
    elif not study.confirmed:
        done = len(study.heldout_units()) - len(study.results("heldout").missing(study.heldout_units()))
        content["state"] = (
            f"No verdict: {done} of {len(study.heldout_units())} held-out runs are done. They are shown when all are "
            "there, since who looks earlier and stops when it suits tests more than once."
        )
    else:
        if missing := study.results("heldout").missing(study.heldout_units()):
            raise ValueError(
                f"{study.folder} says that its study is complete, but {len(missing)} held-out runs are not there: only "
                "the folder in which it was run can be reported on; what was found is in its report.md, if there is one"
            )
        _verdict(study, content, development)
    return content


def _change(event: dict[str, Any]) -> dict[str, str]:
    """What an ``init`` before the choice changed, in a sentence, and the plan that it replaced if it did."""
    runs = f"{event['runs']:,} run{'s' * (event['runs'] != 1)} of the development split"
    told = f"{event['at']}, after {runs}: `init` again, since there changed {'; '.join(event['changed'])}."
    return {"sentence": told, "plan": event.get("plan_text", "")}


def _artefacts(study: Study, development: Results) -> dict[str, dict[str, str]]:
    """Digests of calibrations and gates, by model and name; none in studies that were made before they were kept."""
    if study.frozen:
        found = study.frozen.get("artefacts", {})
        return {model: {name: value[:16] for name, value in named.items()} for model, named in found.items()}
    return {
        model: {name: " and ".join(value[:16] for value in values) for name, values in named.items()}
        for model, named in study.artefacts(development).items()
    }


def _verdict(study: Study, content: dict[str, Any], development: Any) -> None:
    """Adds what the held-out split says."""
    plan = study.plan
    cells = cells_of(study, "heldout", study.results("heldout"))
    branches = outcomes(study, cells)
    for arm, name in branches.items():
        content["verdicts"].append(
            {"branch": name, "arm": arm, "policy": study.chosen(arm).policy, "text": getattr(plan.branches, name)}
        )
    found = diagnose(study, cells, development)
    content["figures"] = {"forest": forest(study, cells)} | {d.name: d.figure for d in found if d.figure}
    content["diagnostics"] = [vars(d) for d in found]
    content["tables"] = [_differences(study, cells), _caches(study, cells), _verdicts(study, cells), *content["tables"]]
    content["drill"] = _drill(study, cells)
    content["data"] |= {
        "cells": [as_dict(cell) for cell in cells],
        "branch": branches,
        "diagnostics": [{n: getattr(d, n) for n in ("name", "sentence", "flagged")} for d in found],
    }


def _table(title: str, note: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"title": title, "note": note, "head": list(head), "rows": [list(row) for row in rows]}


def _differences(study: Study, cells: Sequence[CellResult]) -> dict[str, Any]:
    plan = study.plan
    rows = []
    for cell in cells:
        found = cell.comparison
        rows.append(
            [
                short(cell.model), cell.name,
                f"{100 * cell.baseline.accuracy:.1f}", f"{100 * cell.treatment.accuracy:.1f}",
                f"{points(found.difference)} [{points(found.interval.low)}, {points(found.interval.high)}]",
                "–" if cell.corrected is None else f"{found.p_value:.4f}",
                "–" if cell.corrected is None else f"{cell.corrected:.4f}",
                points(cell.exact.difference), cell.verdict,
            ]
        )  # fmt: skip
    note = (
        "Right answers in %, held-out split, and the paired difference in points with its "
        f"{100 * plan.statistics.level:g}% interval; {cells[0].comparison.clusters} problems, "
        f"{cells[0].comparison.runs} pairs of runs. p: two-sided, alone and after Bonferroni over {plan.cells} cells, "
        f"which decides at {plan.statistics.alpha:.2g}. Exact: the difference if answers are graded by exact string."
    )
    head = ["model", "cell", "baseline", "arm", "difference", "p", "corrected", "exact", "verdict"]
    return _table("Held-out result", note, head, rows)


def _caches(study: Study, cells: Sequence[CellResult]) -> dict[str, Any]:
    rows = [
        [
            short(cell.model), cell.name, f"{cell.baseline.budget} / {cell.treatment.budget}",
            f"{cell.baseline.mean_cache:.1f} / {cell.treatment.mean_cache:.1f}", f"{cell.ratio:.4f}",
            f"{cell.baseline.peak_cache:.0f} / {cell.treatment.peak_cache:.0f}",
            f"{cell.baseline.prefill_cache:.1f} / {cell.treatment.prefill_cache:.1f}",
            "yes" if cell.matched else f"NO: more than {study.plan.tolerance:.1%} apart, so no verdict",
        ]
        for cell in cells
    ]  # fmt: skip
    note = (
        "Entries per head after each pass, baseline / arm: their mean over runs, the ratio of the means, the largest "
        "number in any run, and what was held after the prompt. Budgets were solved for on the development split."
    )
    head = ["model", "cell", "budget", "mean cache", "ratio", "peak", "after prompt", "matched"]
    return _table("Mean cache", note, head, rows)


def _verdicts(study: Study, cells: Sequence[CellResult]) -> dict[str, Any]:
    rows = []
    for cell in cells:
        for name, side in ((study.plan.baseline, cell.baseline), (cell.arm, cell.treatment)):
            shares = [f"{100 * share:.1f}" for share in side.verdicts.values()]
            nll = "–" if side.nll is None else f"{side.nll:.3f}"
            rows.append(
                [short(cell.model), f"{name}, budget {side.budget}", *shares, f"{100 * side.accuracy_exact:.1f}", nll]
            )
    note = "Runs in %; exact: right by exact string; NLL: the proxy, nats per token."
    return _table("Verdicts", note, ["model", "arm", "right", "wrong", "no answer", "cut off", "exact", "NLL"], rows)


def _screening(study: Study, results: Results) -> dict[str, Any]:
    """What is known of the development split before a choice: all that a screening shows."""
    matches = [match for match in study.matches(results) if match.target is not None and match.tried and not match.todo]
    control, rows = study.control, []
    for match in matches:
        if match.candidate.arm == control.arm:
            continue
        own = match.own or match.budget
        before = results.of(study.units("development", match.model, control, match.budget))
        after = results.of(study.units("development", match.model, match.candidate, own))
        found, shares = compare(study, before, after), [mean_of([r.right for r in side]) for side in (before, after)]
        rows.append(
            [
                short(match.model), f"{match.candidate.arm}, {match.candidate.label}".removesuffix(", –"),
                f"{match.budget} / {own}",
                f"{match.target:.1f} / {match.tried[own]:.1f}" + ("" if match.own else ", NOT matched"),
                f"{100 * shares[0]:.1f}", f"{100 * shares[1]:.1f}",
                f"{points(found.difference)} [{points(found.interval.low)}, {points(found.interval.high)}]",
            ]
        )  # fmt: skip
    note = (
        "Right answers in %, and the paired difference in points with its "
        f"{100 * study.plan.statistics.level:g}% interval, not corrected for the number of arms; baseline / arm. A "
        "screening, not a confirmation. Arms whose search for a budget is not over are left out; where no budget "
        "equals the mean cache, the nominal one is shown."
    )
    head = ["model", "arm", "budget", "mean cache", "baseline", "arm", "difference"]
    return _table("Development", note, head, rows)


def _candidates(study: Study) -> dict[str, Any]:
    assert study.frozen is not None
    rows = []
    for row in study.frozen["table"]:
        chosen = study.frozen["choice"][row["arm"]]["policy"] == row["policy"]
        each = "; ".join(
            f"{short(c['model'])} b={c['budget']}: {points(c['gain'])}" if c["gain"] is not None else
            f"{short(c['model'])} b={c['budget']}: mean cache not reached"
            for c in row["cells"]
        )  # fmt: skip
        gain = "–" if row["gain"] is None else points(row["gain"])
        rows.append([row["arm"], row["label"], gain, each, "chosen" if chosen else ""])
    note = f"Rule: {study.frozen['rule']}. Gains in points over the baseline; chosen from, so they are optimistic."
    return _table("Development", note, ["arm", "values", "mean gain", "cells", ""], rows)


def _drill(study: Study, cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Per problem, how often each arm was right in each cell, and the replies of runs in which they differ."""
    found: dict[str, dict[str, Any]] = {}
    asked = {problem.id: problem for problem in study.problems}
    for cell in cells:
        label = f"{short(cell.model)}, {cell.name}"
        for problem in dict.fromkeys(record.problem for record in cell.baseline.records):
            runs = [
                (a, b)
                for a, b in zip(cell.baseline.records, cell.treatment.records, strict=True)
                if a.problem == problem
            ]
            entry = found.setdefault(
                problem,
                {
                    "id": problem,
                    "question": asked[problem].question,
                    "answer": asked[problem].answer,
                    "cells": [],
                    "runs": [],
                },
            )
            right = [mean_of([run[i].right for run in runs]) for i in (0, 1)]
            entry["cells"].append({"right": [f"{100 * value:.0f}" for value in right], "change": right[1] - right[0]})
            entry["runs"] += [
                {
                    "cell": label, "sample": a.sample, "verdicts": [a.verdict, b.verdict],
                    "replies": [a.reply[-TAIL:], b.reply[-TAIL:]],
                }
                for a, b in runs
                if a.verdict != b.verdict
            ]  # fmt: skip
    return list(found.values())


def markdown(content: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [f"# {content['title']}", ""]
    lines += [content["state"], ""] if content["state"] else []
    lines += [f"**Branch {v['branch']}** for {v['arm']} (`{v['policy']}`): {v['text']}." for v in content["verdicts"]]
    lines += ["", f"{content['split']}.", ""]
    if content["since"]:
        lines += [
            f"Since `init` there changed {'; '.join(content['since'])}; this page shows what was measured then.",
            "",
        ]
    if content["changes"]:
        lines += ["Before the choice the study was begun anew; plans that were replaced stand at the end.", ""]
        lines += [*(f"- {change['sentence']}" for change in content["changes"]), ""]
    if "forest" in content["figures"]:
        lines += ["![All cells with their intervals](figures/forest.svg)", ""]
    for table in content["tables"]:
        lines += [f"## {table['title']}", "", table["note"], ""]
        lines += ["| " + " | ".join(table["head"]) + " |", "|" + "---|" * len(table["head"])]
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table["rows"]]
        lines += [""]
    if content["diagnostics"]:
        lines += ["## Diagnostics", "", "They explain the verdict and do not change it.", ""]
    for found in content["diagnostics"]:
        lines += [f"### {found['title']}{' ⚠' if found['flagged'] else ''}", "", found["sentence"], ""]
        lines += [f"![{found['title']}](figures/{found['name']}.svg)", ""] if found["figure"] else []
    lines += ["## How to repeat it", "", "```"]
    lines += [f"{event['command']}  # {event['at']}" for event in content["history"]] + [content["command"], "```", ""]
    lines += [f"- {name}: {value}" for name, value in (content["versions"] | content["hashes"]).items()]
    lines += ["", "The plan:", "", "```toml", content["plan_text"].rstrip(), "```"]
    for change in content["changes"]:
        if change["plan"]:
            lines += ["", f"The plan until {change['sentence'].partition(',')[0]}:", ""]
            lines += ["```toml", change["plan"].rstrip(), "```"]
    return "\n".join(lines) + "\n"
