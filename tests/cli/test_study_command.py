"""``kvretain study`` from init to report on a tiny model: what it prints, kills and goes on from, and refuses."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from checkpoint import save_tiny_checkpoint
from evidence.studies import planted, write_plan
from gates import random_gate
from typer.testing import CliRunner

from kvretain import load_model
from kvretain.artefacts import own_path
from kvretain.calibrate import calibrate
from kvretain.commands import app
from kvretain.data import chapter
from kvretain.evidence import station
from kvretain.evidence.plan import parse_plan
from kvretain.evidence.units import Results, units_of

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

RECALL = """
title = "tiny"
models = ["MODEL"]
budgets = [32]
baseline = "topk"

[arms]
topk = "knorm@model"
diverse = "knorm/diverse(weight={weight})@model"

[grid]
weight = [0.25, 1.0]

[workload]
kind = "recall"
problems = 12
length = 200
chunk = 32

[statistics]
resamples = 500
"""

MATHS = (
    re.sub(r'("knorm/diverse.*")', r"{policy = \1, every = 32}", RECALL)
    .replace('kind = "recall"\nproblems = 12\nlength = 200\nchunk = 32', 'kind = "maths"\nname = "gsm8k"\n'
             'file = "rows.jsonl"\nmax_length = 200')
    .replace("budgets = [32]", "budgets = [32]\nsamples = 2\ntolerance = 0.03")
    + "\n[cache]\nevery = 16\n"
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def plan(checkpoint, tmp_path):
    return write_plan(tmp_path, RECALL.replace("MODEL", checkpoint))


def run(command, *arguments):
    return CliRunner().invoke(app, ["study", command, *map(str, arguments)])


def fine(command, *arguments):
    result = run(command, *arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def refused(command, *arguments):
    result = run(command, *arguments)
    assert result.exit_code == 2 and result.stderr.startswith("error: "), result.output
    return " ".join(result.stderr.split())


def history(plan):
    """The steps that the lock remembers (their commands are the test runner's)."""
    return json.loads((plan.with_suffix(".study") / "lock.json").read_text())["history"]


def test_help_teaches():
    text = fine("--help")
    for step in ("init", "tune", "freeze", "confirm", "report", "status"):
        assert step in text
        assert f"kvretain study {step}" in fine(step, "--help")


def test_from_init_to_report(plan):
    assert "comes first" in refused("tune", plan) and not plan.with_suffix(".study").exists()
    text = fine("init", plan)
    assert "3 problems for development, 9 held out; 1 cells" in text and "if 20% of pairs differ" in text
    assert "4 runs are left" in fine("tune", plan, "--limit", 5)
    assert len(history(plan)) == 2
    assert "5 of 9 runs" in fine("status", plan) and "study tune" in fine("status", plan)
    assert "development split" in refused("freeze", plan)
    assert "diverse weight=0.25:" in fine("tune", plan)
    assert "held-out problems are run once" in refused("confirm", plan)
    assert len(history(plan)) == 2  # init and the first tune; others go on
    assert "largest mean gain" in fine("freeze", plan)
    assert "by one choice" in refused("freeze", plan) and "by one choice" in refused("init", plan)
    assert "10 runs are left" in fine("confirm", plan, "--limit", 8)
    assert "No verdict: 8 of 18" in fine("report", plan)
    assert json.loads(run("status", plan, "--json").stdout)["heldout"]["done"] == 8
    fine("confirm", plan)
    assert "is not run again" in fine("confirm", plan)
    assert "Branch B" in fine("report", plan)
    data = json.loads(run("report", plan, "--json").stdout)
    (cell,) = data["cells"]
    assert cell["matched"] and cell["ratio"] == pytest.approx(1) and cell["treatment"]["peak_cache"] == 32
    folder = plan.with_suffix(".study")
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "kvretain study report" in fine("status", plan)


def test_only_the_development_side_says_its_verdicts(plan, monkeypatch):
    monkeypatch.setattr(station, "run", lambda plan, units, **options: map(planted, units))
    fine("init", plan)
    said = r"single/\d+, knorm@model at 32: (right|wrong); \d+ of"
    assert re.search(said, " ".join(run("tune", plan).stderr.split()))
    fine("freeze", plan)
    for options in (("--limit", 8), ()):
        text = " ".join(run("confirm", plan, *options).stderr.split())
        assert re.search(r"single/\d+, knorm\S* at 32; \d+ of", text)
        assert not re.search("right|wrong", text)


def test_a_default_calibration_that_changes_is_noticed(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "cache"))
    net, tokenizer = load_model(checkpoint, device="cpu")
    place = own_path("calibration", net)
    one, other = (calibrate(net, chapter()[start:], tokenizer, tokens=300) for start in (0, 9000))
    one.save(place)
    plan = write_plan(tmp_path, RECALL.replace("MODEL", checkpoint).replace("knorm", "trig"))
    fine("init", plan)
    fine("tune", plan)
    other.save(place)
    fine("freeze", plan)
    assert "default calibration" in refused("confirm", plan, "--limit", 1)
    assert not list((plan.with_suffix(".study") / "heldout").glob("*.json"))
    # What a file says beside its tensors is nobody's business.
    dataclasses.replace(one, metadata={**one.metadata, "torch": "99"}).save(place)
    fine("confirm", plan)
    fine("report", plan)
    assert "default calibration of" in (plan.with_suffix(".study") / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("policy", ["knorm", "full", "snapkv", "fastkvzip"])
def test_a_record_names_the_gate_that_it_used_and_nothing_else(checkpoint, tmp_path, monkeypatch, policy):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "cache"))
    net, _ = load_model(checkpoint, device="cpu")
    made, found = parse_plan(RECALL.replace("MODEL", checkpoint), tmp_path), []
    candidate = dataclasses.replace(made.candidates("topk")[0], policy=policy)
    for seed in (1, 2, 1):
        random_gate(net, seed).save(own_path("gate", net))
        units = units_of(made, "base", checkpoint, candidate, 32, made.workload.load()[:1])
        found += [record.artefact for record in station.run(made, units)]
    assert found[0] == found[2] and (found == [""] * 3) == (policy != "fastkvzip") == (found[0] == found[1])


def test_a_plan_that_begins_anew_is_tuned_anew(plan, monkeypatch):
    monkeypatch.setattr(station, "run", lambda plan, units, **options: map(planted, units))
    for weights in ("[0.25, 1.0]", "[0.25, 2.0]"):
        plan.write_text(re.sub("weight = .*", f"weight = {weights}", plan.read_text()))
        fine("init", plan)
        fine("tune", plan)
    assert [event.get("runs") for event in history(plan)] == [None, None, 9, None]


def test_maths_with_arms_of_other_cadences_are_matched(checkpoint, tmp_path):
    pytest.importorskip("math_verify")
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    plan = write_plan(tmp_path, MATHS.replace("MODEL", checkpoint))
    fine("init", plan)
    assert re.search(r"equal mean cache at budget (\d+)", fine("tune", plan))
    fine("freeze", plan)
    fine("confirm", plan)
    data = json.loads(run("report", plan, "--json").stdout)
    (cell,) = data["cells"]
    assert cell["treatment"]["budget"] < cell["baseline"]["budget"] and cell["runs"] == 2 * cell["problems"]
    assert cell["ratio"] == pytest.approx(1, abs=0.06) and cell["baseline"]["nll"] > 0
    assert cell["treatment"]["verdicts"]["no_answer"] + cell["treatment"]["verdicts"]["cut_off"] > 0.9
    # The same seed draws the same reply, so a run can be repeated.
    (first,) = list((plan.with_suffix(".study") / "heldout").glob("*.json"))[:1]
    before = json.loads(first.read_text())
    first.unlink()
    from kvretain.evidence.study import Study

    made = Study(plan)
    (unit,) = made.results("heldout").missing(made.heldout_units())
    (again,) = station.Station(made.plan).work([unit])
    assert (again.reply, again.mean_cache, again.nll) == (before["reply"], before["mean_cache"], before["nll"])


@pytest.mark.parametrize("options", [("--workers", "1"), ("--workers", "2")])
def test_a_killed_run_repeats_nothing(plan, options):
    killed_and_continued(plan, options)


@pytest.mark.slow
def test_a_killed_run_on_ray_repeats_nothing(plan):
    pytest.importorskip("ray")
    killed_and_continued(plan, ("--engine", "ray", "--workers", "2"))


def killed_and_continued(plan, options):
    plan.write_text(plan.read_text().replace("problems = 12", "problems = 250"))
    fine("init", plan)
    folder = plan.with_suffix(".study") / "development"
    command = [sys.executable, "-m", "kvretain.cli", "study", "tune", str(plan), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while len(list(folder.glob("*.json"))) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = Results(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert 3 <= len(done) == len(before) < 300
    # Afterwards one worker goes on; it does not matter which engine began.
    assert "runs are left" in fine("tune", plan, "--limit", 6)
    after = {path: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert before.items() <= after.items() and len(after) == len(before) + 6
    assert len(Results(folder)) == len(after)


@pytest.mark.slow
def test_two_workers_find_what_one_does(plan, tmp_path):
    for name, options in (("one", ()), ("two", ("--workers", 2))):
        fine("init", plan, "--out", tmp_path / name)
        fine("tune", plan, "--out", tmp_path / name, *options)
    one, two = (
        {r.key: (r.verdict, r.nll, r.mean_cache, r.weights) for r in Results(tmp_path / n / "development").all()}
        for n in ("one", "two")
    )
    assert one == two and len(one) == 9


def test_one_command_at_a_time(plan):
    from kvretain.evidence.lock import alone

    fine("init", plan)
    with alone(plan.with_suffix(".study")):
        assert "another command is at work" in refused("tune", plan)
    fine("tune", plan, "--limit", 1)


def test_errors_are_one_line(plan, tmp_path, monkeypatch):
    assert "there is no plan" in refused("init", tmp_path / "none.toml")
    assert "holds no study" in refused("status", plan)
    fine("init", plan)
    assert "unknown engine 'spark'; valid: local, ray" in refused("tune", plan, "--engine", "spark")
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run("tune", plan, "--engine", "ray")
    assert result.exit_code == 1 and 'pip install "kvretain[ray]"' in result.stderr
    text = plan.read_text()
    plan.write_text(text.replace("length = 200", "length = 20"))
    fine("init", plan)
    assert "knorm@model at budget 32, problem 'single/" in refused("tune", plan)
    plan.write_text(text.replace("budgets", "budget"))
    assert "did you mean budgets?" in refused("init", plan)


def test_init_refuses_a_mechanism_that_the_model_cannot_serve(tmp_path):
    folder = save_tiny_checkpoint(tmp_path / "one-head")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    text = RECALL.replace("MODEL", str(folder)).replace('"knorm@model"', '"routing"')
    assert "'routed' needs layers with at least 2 KV heads" in refused("init", write_plan(tmp_path, text))


def test_a_damaged_result_stops_with_its_name(plan, monkeypatch):
    monkeypatch.setattr(station, "run", lambda plan, units, **options: map(planted, units))
    fine("init", plan)
    fine("tune", plan)
    path = next((plan.with_suffix(".study") / "development").glob("*.json"))
    path.write_text(path.read_text()[:-20])
    for command in ("tune", "freeze", "status"):
        assert f"{path.name} is damaged" in refused(command, plan)
    path.unlink()
    fine("tune", plan)
    fine("freeze", plan)
