"""Plans of tests, and runs whose outcome is planted: no model is loaded."""

import hashlib
import json
import re

from kvretain.evidence.study import Study
from kvretain.evidence.units import Record

PLAN = """
title = "planted"
models = ["owner/one", "owner/two"]
budgets = [32, 64]
baseline = "topk"

[arms]
topk = "knorm@model"
diverse = "knorm/diverse(weight={weight})@model"

[grid]
weight = [0.25, 1.0]

[workload]
kind = "recall"
problems = 60

[statistics]
resamples = 1000
"""


def write_plan(folder, text=PLAN, **replaced):
    """``plan.toml`` in ``folder``; ``replaced`` are lines by their key."""
    for key, value in replaced.items():
        text, count = re.subn(rf"^{key} = .*$", lambda _, k=key, v=value: f"{k} = {v}", text, flags=re.MULTILINE)
        assert count == 1, key
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def luck(*parts) -> float:
    """A number in [0, 1) that depends on ``parts`` alone."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:6]) / 2**48


def gain(policy: str) -> float:
    """Of the planted policies: 0.25 gains most."""
    return 0.6 if "weight=0.25" in policy else 0.2 if "diverse" in policy else 0.0


def planted(unit, *, gain=gain, mean=lambda unit: unit.budget + 0.5, weights="w", artefact="", right=None) -> Record:
    """What a unit finds: right with probability 0.3 plus the policy's gain, the same luck for all arms."""
    chance = 0.3 + gain(unit.policy)
    found = luck(unit.model, unit.problem.id, unit.sample) < chance if right is None else right(unit)
    verdict = "right" if found else "wrong"
    nll = 2 - chance + 0.1 * luck(unit.key)
    return Record(
        unit.key, unit.model, unit.policy, unit.budget, unit.problem.id, unit.sample, verdict, verdict, nll,
        mean(unit), unit.budget + 1.0, float(unit.budget), 5, f"<reply of {unit.key}>", 0.1, 1e9, weights, artefact,
    )  # fmt: skip


def tune(study: Study, run=planted) -> int:
    """Runs what ``tune`` would; returns how many runs it took."""
    study.tuning()
    results, done = study.results("development"), 0
    while todo := {unit.key: unit for match in study.matches(results) for unit in match.todo}:
        for unit in todo.values():
            results.add(run(unit))
            done += 1
    return done


def confirm(study: Study, run=planted) -> None:
    """Runs what ``confirm`` would."""
    study.confirming()
    results = study.results("heldout")
    for unit in results.missing(study.heldout_units()):
        record = run(unit)
        study.as_tuned(record)
        results.add(record)
    study.lock.save(confirmed="now")


def whole(path, run=planted) -> Study:
    """A study from init to confirm."""
    study = Study(path)
    study.init("kvretain study init")
    tune(study, run)
    study.freeze("kvretain study freeze")
    confirm(study, run)
    return Study.as_locked(path)
