"""The order of a study: init, tune, freeze, confirm. What each may do, and what is still to be done. No terminal here.

::

    FOLDER/lock.json            what was fixed and what was chosen, see kvretain.evidence.lock
    FOLDER/development/*.json   one record a run, see kvretain.evidence.units
    FOLDER/heldout/*.json
    FOLDER/report.md, report.html, report.json, figures/, runs.csv.gz
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..policy import Policy
from .grading import INSTALL
from .lock import FIXED, ONE_CHOICE, SAME, WHOLE, BrokenPromise, Lock, changed, facts
from .plan import Candidate, parse_plan, read_plan
from .power import Design, estimate_noise, minimum_detectable
from .units import Record, Results, Unit, digest_of, units_of
from .workloads import Problem

TRIES = 12
"""Budgets that are tried to match a mean cache."""

PIN = ". A file that the plan names, as in trig(calibration='...'), is fixed by `init` with the rest"

RULE = (
    "largest mean gain in accuracy over the baseline, over models and budgets, on the development split at matched "
    "mean cache; the first in the grid's order among equals; candidates whose mean cache cannot be matched are out"
)


def next_budget(tried: Mapping[int, float], target: float, tolerance: float, start: int, least: int = 1) -> int | None:
    """The budget to try next so that the mean cache becomes ``target``; None if that is done, or hopeless.

    A search over whole numbers by linear interpolation, for a mean that grows with the budget.

    Args:
        tried: mean cache by budget.
        target: the baseline's mean.
        tolerance: allowed difference of their ratio from 1.
        start: the first budget.
        least: the smallest that may be tried.

    Example:
        >>> next_budget({}, 96, 0.01, 64), next_budget({64: 80.0}, 96, 0.01, 64), next_budget({80: 96.2}, 96, 0.01, 64)
        (64, 80, None)
    """
    if not tried:
        return start
    if best_budget(tried, target, tolerance) is not None or len(tried) >= TRIES:
        return None
    below = {budget: mean for budget, mean in tried.items() if mean < target}
    above = {budget: mean for budget, mean in tried.items() if mean >= target}
    if below and above:
        low, high = max(below), min(above)
        if high - low < 2:
            return None
        share = (target - below[low]) / (above[high] - below[low])
        return min(max(low + round(share * (high - low)), low + 1), high - 1)
    # One side only: as if the mean grew by one entry a budget, or as it did between the two nearest.
    near = sorted(tried, key=lambda budget: abs(tried[budget] - target))[:2]
    slope = (tried[near[0]] - tried[near[1]]) / (near[0] - near[1]) if len(near) == 2 else 1.0
    step = round(abs(target - tried[near[0]]) / max(slope, 0.25))
    if below:
        return max(below) + max(1, step)
    return max(least, min(above) - max(1, step)) if min(above) > least else None


def best_budget(tried: Mapping[int, float], target: float, tolerance: float) -> int | None:
    """The budget whose mean is nearest to ``target``, None if none is within ``tolerance``."""
    near = [budget for budget, mean in tried.items() if abs(mean / target - 1) <= tolerance]
    return min(near, key=lambda budget: abs(tried[budget] - target), default=None)


def mean_of(values: list[float]) -> float:
    """Their mean."""
    return math.fsum(values) / len(values)


def artefact_name(policy: str) -> str:
    """What a policy reads that is measured on the model, e.g. ``default calibration``; empty if nothing."""
    scorer = Policy.parse(policy).scorer
    for name in ("calibration", "gate"):
        if (path := getattr(scorer, name, None)) is not None:
            return f"{name} {path}" if path else f"default {name}"
    return ""


@dataclass(frozen=True)
class Match:
    """How far a candidate's budget is found in one cell.

    Attributes:
        candidate, model, budget: the cell, by the baseline's budget.
        target: the baseline's mean cache there, None while it is not measured.
        tried: mean cache by budget.
        own: the budget at which the means agree, None if there is none (yet).
        todo: the runs that are needed next; none if all is known.
    """

    candidate: Candidate
    model: str
    budget: int
    target: float | None
    tried: dict[int, float]
    own: int | None
    todo: tuple[Unit, ...]


class Study:
    """A plan, its folder, and what is there already.

    Args:
        path: the plan.
        out: the folder; by default beside the plan, ``NAME.study``.

    Raises:
        FileNotFoundError, ValueError: what :func:`read_plan`, :class:`Lock` and :class:`Results` raise.
    """

    def __init__(self, path: str | Path, out: str | Path | None = None) -> None:
        self.path = Path(path)
        self.folder = Path(out) if out else self.path.with_suffix(".study")
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file; --out is a folder")
        self.lock = Lock(self.folder)
        self.plan, self.text = read_plan(self.path)
        self._problems: list[Problem] | None = None

    @classmethod
    def as_locked(cls, path: str | Path, out: str | Path | None = None) -> Study:
        """The study as it was fixed by ``init``, whatever became of the plan file; for reading only.

        Raises:
            ValueError: there is none.
        """
        study = cls.__new__(cls)
        study.path = Path(path)
        study.folder = Path(out) if out else study.path.with_suffix(".study")
        study.lock, study._problems = Lock(study.folder), None
        if not study.lock:
            raise ValueError(f"{study.folder} holds no study: run `kvretain study init {path}` first")
        study.text = study.lock.content["plan_text"]
        study.plan = parse_plan(study.text, study.path.parent)
        study._problems = [Problem(**p) for p in study.lock.content["problems"]]
        return study

    # What there is

    @property
    def problems(self) -> list[Problem]:
        """All of the workload."""
        if self._problems is None:
            self.plan.check()
            self._problems = self.plan.workload.load()
        return self._problems

    def side(self, name: str) -> list[Problem]:
        """The problems of ``development`` or ``heldout``, as locked."""
        chosen = set(self.lock.content[name])
        return [problem for problem in self.problems if problem.id in chosen]

    def results(self, side: str) -> Results:
        """The records of a side."""
        return Results(self.folder / side)

    @property
    def base(self) -> str:
        """Hash of what all runs share: data, code, environment and settings, without the list of arms and budgets."""
        kept = {n: v for n, v in self.lock.content["facts"].items() if n != "plan"}
        # Files count by their content, which is in the facts, and not by the place from which the command is run.
        task = {n: v for n, v in vars(self.plan.workload).items() if n not in ("file", "text")}
        return digest_of([kept, self.plan.workload.kind, task, self.plan.dtype, self.plan.device])

    @property
    def frozen(self) -> dict[str, Any] | None:
        """The choice, None before ``freeze``."""
        return self.lock.content.get("frozen")

    @property
    def confirmed(self) -> bool:
        """Whether the held-out split was run to its end."""
        return bool(self.lock.content.get("confirmed"))

    # init

    def init(self, command: str) -> list[str]:
        """Checks everything, fixes the split and writes the lock.

        Returns:
            What changed since an earlier ``init``, in words.

        Raises:
            BrokenPromise: the choice is frozen, or held-out results are there.
            FileNotFoundError, ValueError, ImportError: the plan cannot be run.
        """
        if self.frozen:
            raise BrokenPromise("init", f"the choice in {self.folder} is frozen", ONE_CHOICE)
        if any((self.folder / "heldout").glob("*.json")):
            raise BrokenPromise("init", f"{self.folder} holds results of the held-out split, without a choice that was "
                                "made before them", ONE_CHOICE)  # fmt: skip
        strange = [p.name for p in self.folder.glob("*") if p.name not in ("development", ".busy")]
        if not self.lock and strange:
            raise ValueError(f"{self.folder} is not empty and holds no study ({strange[0]}): use another folder, --out")
        if self.plan.workload.kind == "maths" and importlib.util.find_spec("math_verify") is None:
            raise ImportError(INSTALL)
        development, heldout = self.plan.split.sides(self.problems)
        now = facts(self.plan, self.text, self.problems)
        before = self.lock.content.get("facts")
        since = changed(before, now) if before else []
        about: dict[str, Any] = {}
        if since:
            # What was looked at before a change of mind belongs to the record.
            about = {"changed": since, "runs": len(list((self.folder / "development").glob("*.json")))}
            if self.text != self.lock.content["plan_text"]:
                about["plan_text"] = self.lock.content["plan_text"]
        self.lock.save(
            command,
            about,
            facts=now,
            least=self.plan.least(),
            plan_text=self.text,
            plan_path=self.path.name,
            problems=[vars(problem) for problem in self.problems],
            development=development,
            heldout=heldout,
            tuned=None,
            frozen=None,
            confirmed=None,
        )
        return since

    def detectable(self, discordant: float, correlation: float) -> float | None:
        """The smallest difference that a cell finds with the plan's power; None if even the largest is too small."""
        statistics = self.plan.statistics
        design = Design(
            problems=len(self.lock.content["heldout"]),
            runs=self.plan.samples,
            discordant=discordant,
            correlation=correlation,
            alpha=statistics.alpha,
            cells=self.plan.cells,
        )
        try:
            return minimum_detectable(design, statistics.power)
        except ValueError:
            return None

    def unchanged(self, command: str) -> None:
        """Checks that a study was begun and that nothing that it rests on has changed.

        Raises:
            BrokenPromise: it was not begun, or something changed (says what).
        """
        if not self.lock:
            raise BrokenPromise(command, f"`kvretain study init {self.path}` comes first", FIXED)
        shared = set(self.lock.content["development"]) & set(self.lock.content["heldout"])
        if shared:
            raise ValueError(f"the split in {self.lock.path} overlaps: {sorted(shared)[:3]}; begin a new study")
        if what := changed(self.lock.content["facts"], facts(self.plan, self.text, self.problems)):
            then = (
                "restore it, or begin a new study in another folder (--out)"
                if self.frozen
                else "restore it, or run `kvretain study init` again, which is allowed before `freeze`"
            )
            raise BrokenPromise(command, f"since `init` there changed {'; '.join(what)}: {then}", SAME if self.frozen
                                else FIXED)  # fmt: skip

    # tune

    def units(self, side: str, model: str, candidate: Candidate, budget: int) -> list[Unit]:
        """The runs of a candidate at a budget on a side."""
        return units_of(self.plan, self.base, model, candidate, budget, self.side(side))

    @property
    def control(self) -> Candidate:
        """The baseline."""
        (only,) = self.plan.candidates(self.plan.baseline)
        return only

    def matches(self, results: Results) -> list[Match]:
        """For each arm's candidates (the baseline's first), model and budget, how far the search for its budget is."""
        plan, found = self.plan, []
        for candidate in (c for arm in (plan.baseline, *plan.treatments) for c in plan.candidates(arm)):
            for model in plan.models:
                for budget in plan.budgets:
                    found.append(self._match(results, candidate, model, budget))
        return found

    def _match(self, results: Results, candidate: Candidate, model: str, budget: int) -> Match:
        def measured(of: Candidate, size: int) -> tuple[float | None, list[Unit]]:
            units = self.units("development", model, of, size)
            if todo := results.missing(units):
                return None, todo
            return mean_of([record.mean_cache for record in results.of(units)]), []

        target, todo = measured(self.control, budget)
        if candidate == self.control:
            own = None if target is None else budget
            return Match(candidate, model, budget, target, {} if target is None else {budget: target}, own, tuple(todo))
        tried: dict[int, float] = {}
        # full keeps everything, whatever its budget, unless it sums up
        fixed = Policy.parse(candidate.policy).scorer is None and not candidate.cache.summary
        # The search is a function of what is measured, so it finds its way again after a stop.
        least = self._least(candidate, model)
        while (size := next_budget(tried, target or 1.0, self.plan.tolerance, budget, least)) is not None:
            mean, todo = measured(candidate, size)
            if mean is None or target is None:
                return Match(candidate, model, budget, target, tried, None, tuple(todo))
            tried[size] = mean
            if candidate.cache.protect_prompt:
                # A protected prompt is whole in the cache when it has been read, and something must fit beside it.
                records = results.of(self.units("development", model, candidate, size))
                prompt = math.ceil(max(record.prefill_cache for record in records))
                least = max(least, prompt + max(1, candidate.cache.recent or 0))
            if fixed:
                break
        assert target is not None
        own = best_budget(tried, target, self.plan.tolerance)
        return Match(candidate, model, budget, target, tried, own, ())

    def _least(self, candidate: Candidate, model: str) -> int:
        """The smallest budget that a candidate's cache accepts, as far as it is known before a run."""
        cache = candidate.cache
        # JSON's keys are texts; studies of earlier releases have no such list.
        summaries = (self.lock.content.get("least") or {}).get(model, {}).get(str(cache.summary), 1)
        return max(1, summaries, (cache.sinks or 0) + (cache.recent or 0))

    def tuning(self, command: str = "tune") -> None:
        """Checks that the development split may be run.

        Raises:
            BrokenPromise: not before ``init``, not after ``freeze``, not with changes.
        """
        if self.frozen:
            raise BrokenPromise(command, "the choice is frozen already", ONE_CHOICE)
        self.unchanged(command)

    def tuned(self, results: Results) -> list[dict[str, Any]]:
        """What the development split says of each candidate, in the grid's order: ``arm``, ``label``, ``policy``,
        ``gain`` (mean over models and budgets; None if it cannot be matched), and its ``cells``.

        Raises:
            BrokenPromise: runs are missing.
            ValueError: no candidate of an arm reaches the baseline's mean cache.
        """
        matches = self.matches(results)
        if todo := {unit.key for match in matches for unit in match.todo}:
            raise BrokenPromise("freeze", f"{len(todo)} or more runs of `kvretain study tune` are missing", WHOLE)
        table: list[dict[str, Any]] = []
        for arm in self.plan.treatments:
            for candidate in self.plan.candidates(arm):
                cells = [self._tuned_cell(m, results) for m in matches if m.candidate == candidate]
                gains = [cell["gain"] for cell in cells]
                whole = all(gain is not None for gain in gains)
                table.append(
                    {
                        "arm": arm,
                        "label": candidate.label,
                        "values": dict(candidate.values),
                        "policy": candidate.policy,
                        "gain": mean_of(gains) if whole else None,
                        "cells": cells,
                    }
                )
        for arm in self.plan.treatments:
            rows = [row for row in table if row["arm"] == arm]
            if all(row["gain"] is None for row in rows):
                cell = next(cell for cell in rows[0]["cells"] if cell["own"] is None)
                tried = ", ".join(f"{mean:.1f} at budget {size}" for size, mean in cell["tried"].items())
                raise ValueError(
                    f"the arm {arm!r} cannot reach the baseline's mean cache: {cell['target']:.1f} entries are needed "
                    f"within {self.plan.tolerance:.1%} ({cell['model']}, budget {cell['budget']}); measured: {tried}. "
                    "What was measured is kept; change the arm in the plan (another cadence or policy), run "
                    "`kvretain study init` and `tune` again"
                )
        return table

    def _tuned_cell(self, match: Match, results: Results) -> dict[str, Any]:
        of = [self.units("development", match.model, self.control, match.budget)]
        if match.own is not None:
            of.append(self.units("development", match.model, match.candidate, match.own))
        records = [results.of(units) for units in of]
        cell: dict[str, Any] = {
            "model": match.model,
            "budget": match.budget,
            "own": match.own,
            "target": match.target,
            "tried": match.tried,
            "gain": None,
            "weights": records[0][0].weights,
        }
        if match.own is not None:
            right = tuple([record.right for record in side] for side in records)
            cell["baseline"], cell["accuracy"] = mean_of(right[0]), mean_of(right[1])
            cell["gain"] = cell["accuracy"] - cell["baseline"]
            clusters = [record.problem for record in records[0]]
            cell["discordant"], cell["correlation"] = estimate_noise(right[0], right[1], clusters)
        return cell

    def used(self, results: Results) -> Iterator[Record]:
        """The development runs on which the matching and the choice rest, as far as they are done."""
        for match in self.matches(results):
            for size in match.tried:
                yield from results.of(self.units("development", match.model, match.candidate, size))

    def artefacts(self, results: Results) -> dict[str, dict[str, list[str]]]:
        """Digests of the calibrations and gates that :meth:`used` runs read, by model and name; more than one where
        they changed."""
        found: dict[str, dict[str, list[str]]] = {}
        for record in self.used(results):
            if record.artefact:
                of = found.setdefault(record.model, {}).setdefault(artefact_name(record.policy), [])
                if record.artefact not in of:
                    of.append(record.artefact)
        return found

    # freeze

    def freeze(self, command: str) -> dict[str, Any]:
        """Chooses by :data:`RULE` and records the choice.

        Returns:
            ``rule``, ``choice`` by arm (``values``, ``policy``, ``budgets``), ``table`` of all candidates, ``weights``,
            ``artefacts`` (digests of calibrations and gates by model and name).

        Raises:
            BrokenPromise: before ``tune`` is complete, a second time, or with changes.
            ValueError: what :meth:`tuned` raises; or the models, their calibrations or gates changed while tuning.
        """
        self.tuning("freeze")
        results = self.results("development")
        table = self.tuned(results)
        choice = {}
        for arm in self.plan.treatments:
            rows = [row for row in table if row["arm"] == arm and row["gain"] is not None]
            best = max(rows, key=lambda row: row["gain"])  # the first of equals
            budgets = [[cell["model"], cell["budget"], cell["own"]] for cell in best["cells"]]
            choice[arm] = {name: best[name] for name in ("label", "values", "policy", "gain")} | {"budgets": budgets}
        weights: dict[str, str] = {}
        for record in self.used(results):
            if weights.setdefault(record.model, record.weights) != record.weights:
                raise ValueError(
                    f"the weights of {record.model} changed during `tune`: pin them to a folder and tune again in "
                    "another folder (--out)"
                )
        artefacts: dict[str, dict[str, str]] = {}
        for model, named in self.artefacts(results).items():
            for name, (first, *others) in named.items():
                if others:
                    raise ValueError(
                        f"the {name} of {model} changed during `tune`, so that runs cannot be compared: tune again in "
                        f"another folder (--out){PIN}"
                    )
                artefacts.setdefault(model, {})[name] = first
        frozen = {"rule": RULE, "choice": choice, "table": table, "weights": weights, "artefacts": artefacts}
        self.lock.save(command, frozen=frozen)
        return frozen

    # confirm

    def confirming(self) -> None:
        """Checks that the held-out split may be run.

        Raises:
            BrokenPromise: before ``freeze``, or with changes.
        """
        if not self.frozen:
            why = f"`kvretain study {'freeze' if self.lock else 'init'} {self.path}` comes first"
            raise BrokenPromise("confirm", why, ONE_CHOICE)
        self.unchanged("confirm")

    def chosen(self, arm: str) -> Candidate:
        """The frozen candidate of an arm, or the baseline."""
        if arm == self.plan.baseline:
            return self.control
        assert self.frozen is not None
        policy = self.frozen["choice"][arm]["policy"]
        return next(c for c in self.plan.candidates(arm) if c.policy == policy)

    def own_budget(self, arm: str, model: str, budget: int) -> int:
        """The frozen budget of an arm in a cell that is named by the baseline's."""
        if arm == self.plan.baseline:
            return budget
        assert self.frozen is not None
        budgets = self.frozen["choice"][arm]["budgets"]
        return next(own for m, b, own in budgets if (m, b) == (model, budget))

    def heldout_units(self) -> list[Unit]:
        """All runs of ``confirm``."""
        return [
            unit
            for model in self.plan.models
            for budget in self.plan.budgets
            for arm in (self.plan.baseline, *self.plan.treatments)
            for unit in self.units("heldout", model, self.chosen(arm), self.own_budget(arm, model, budget))
        ]

    def as_tuned(self, record: Record) -> None:
        """Checks that a model, and its calibration or gate, are still those that were tuned.

        Raises:
            BrokenPromise: they differ.
        """
        assert self.frozen is not None
        name = artefact_name(record.policy)
        tuned = self.frozen.get("artefacts", {}).get(record.model, {}).get(name)
        if tuned is not None and record.artefact != tuned:
            why = f"the {name} of {record.model} is not the one that was tuned with: restore it{PIN}"
            raise BrokenPromise("confirm", why, SAME)
        if record.weights != self.frozen["weights"][record.model]:
            raise BrokenPromise("confirm", f"the weights of {record.model} are not those that were tuned", SAME)
