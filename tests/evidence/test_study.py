"""The order of a study, its matched mean cache, its verdict and its diagnostics, on planted runs."""

import csv
import dataclasses
import gzip
import json
import os

import pytest
from evidence.studies import PLAN, confirm, luck, planted, tune, whole, write_plan
from evidence.test_measure import Letters

from kvretain.evidence import page, study
from kvretain.evidence.analysis import cells_of, in_random_order, outcomes
from kvretain.evidence.diagnostics import rank_correlation
from kvretain.evidence.lock import BrokenPromise
from kvretain.evidence.study import Study, best_budget, next_budget
from kvretain.evidence.units import Results, digest_of

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module", autouse=True)
def _quick_disk():
    """Thousands of small files: nothing here survives a power cut, and nothing here needs to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: None)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return whole(write_plan(tmp_path_factory.mktemp("study")))


def begun(folder, text=PLAN, **replaced):
    made = Study(write_plan(folder, text, **replaced))
    made.init("init")
    return made


def diagnostics(made):
    found = page.contents(made, "report")
    return {d["name"]: d for d in found["diagnostics"]}, found


def verdicts(made):
    cells = cells_of(made, "heldout", made.results("heldout"))
    return outcomes(made, cells), cells


# The order


def test_each_side_sees_its_own_problems_only(done):
    locked = done.lock.content
    for side in ("development", "heldout"):
        assert {record.problem for record in done.results(side).all()} == set(locked[side])
    assert not set(locked["development"]) & set(locked["heldout"])


def test_the_choice_is_that_with_the_largest_mean_gain(done):
    assert done.frozen["choice"]["diverse"]["values"] == {"weight": 0.25}
    for row in done.frozen["table"]:
        assert row["gain"] == pytest.approx(sum(c["gain"] for c in row["cells"]) / 4)
    gains = {row["label"]: row["gain"] for row in done.frozen["table"]}
    assert gains["weight=0.25"] > gains["weight=1.0"] > 0


def test_among_equals_the_first_is_chosen(tmp_path):
    made = begun(tmp_path)
    tune(made, lambda unit: planted(unit, gain=lambda policy: 0.0))
    assert made.freeze("freeze")["choice"]["diverse"]["label"] == "weight=0.25"


def test_every_step_out_of_order_names_its_promise(tmp_path):
    path = write_plan(tmp_path)
    made = Study(path)
    for step in (made.tuning, made.confirming, lambda: made.freeze("freeze")):
        with pytest.raises(BrokenPromise, match=r"`kvretain study init .*comes first. It would break the promise"):
            step()
    made.init("init")
    with pytest.raises(BrokenPromise, match=r"`kvretain study freeze .*comes first.*one choice"):
        made.confirming()
    with pytest.raises(BrokenPromise, match=r"runs of `kvretain study tune` are missing.*whole development split"):
        made.freeze("freeze")
    tune(made)
    with pytest.raises(BrokenPromise, match="one choice"):
        made.confirming()
    made.freeze("freeze")
    for step in (made.tuning, lambda: made.freeze("freeze"), lambda: made.init("init")):
        with pytest.raises(BrokenPromise, match=r"frozen.*held-out problems are run once, by one choice"):
            step()
    confirm(made)
    for step in (made.tuning, lambda: made.freeze("freeze"), lambda: made.init("init")):
        with pytest.raises(BrokenPromise):
            step()
    assert Study(path).confirmed


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plan", "the plan file"),
        ("data", r"the data \(problems"),
        ("code", "kvretain's source code"),
        ("torch", r"torch \(.* then, 99.0 now\)"),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_changed_is_said(tmp_path, monkeypatch, what, words, frozen):
    book = tmp_path / "book.txt"
    book.write_text("Tea is served. " * 50)
    made = begun(tmp_path, PLAN.replace("problems = 60", 'problems = 60\ntext = "book.txt"'))
    if frozen:
        tune(made)
        made.freeze("freeze")
    from kvretain.evidence import lock

    if what == "plan":
        made.path.write_text(made.text.replace("0.25", "0.3"))
    elif what == "data":
        book.write_text("Coffee is served. " * 50)
    elif what == "code":
        monkeypatch.setattr(lock, "code_hash", lambda: "another")
    else:
        before = lock.environment
        monkeypatch.setattr(lock, "environment", lambda plan: before(plan) | {"torch": "99.0"})
    again = Study(made.path)
    promise = "what is confirmed is what was tuned" if frozen else "fixed before anything is measured"
    with pytest.raises(BrokenPromise, match=rf"there changed {words}.*{promise}"):
        again.confirming() if frozen else again.tuning()
    if not frozen:  # nothing held out was seen, so the study may begin anew
        assert again.init("init") and Study(made.path).tuning() is None


def test_other_weights_are_not_confirmed(tmp_path):
    made = begun(tmp_path)
    tune(made)
    made.freeze("freeze")
    with pytest.raises(BrokenPromise, match=r"weights of owner/one are not those that were tuned.*what was tuned"):
        confirm(made, lambda unit: planted(unit, weights="other"))
    assert not len(made.results("heldout"))


TRIG = PLAN.replace("knorm", "trig")


def test_another_calibration_is_neither_chosen_by_nor_confirmed(tmp_path):
    made = begun(tmp_path, TRIG)
    tune(made, lambda unit: planted(unit, artefact="one" if "weight=1.0" in unit.policy else "two"))
    with pytest.raises(ValueError, match=r"default calibration of owner/one changed during `tune`.*trig\(calibration="):
        made.freeze("freeze")
    text, _ = page.publish(Study.as_locked(made.path), "report")
    assert "- default calibration of two: two and one" in text
    (tmp_path / "steady").mkdir()
    made = begun(tmp_path / "steady", TRIG)
    tune(made, lambda unit: planted(unit, artefact=f"of {unit.model}"))
    frozen = made.freeze("freeze")
    assert frozen["artefacts"] == {model: {"default calibration": f"of {model}"} for model in made.plan.models}
    with pytest.raises(BrokenPromise, match=r"default calibration of owner/one is not the one that was tuned with"):
        confirm(made, lambda unit: planted(unit, artefact="of another"))
    assert not len(made.results("heldout"))
    confirm(made, lambda unit: planted(unit, artefact=f"of {unit.model}"))
    text, files = page.publish(Study.as_locked(made.path), "report")
    assert "- default calibration of one: of owner/one" in text
    assert "default calibration of one (SHA-256)" in files[1].read_text(encoding="utf-8")


def test_records_from_before_calibrations_were_kept_are_still_reported(tmp_path):
    made = whole(write_plan(tmp_path, TRIG), lambda unit: planted(unit, artefact="of then"))
    for path in made.folder.glob("*/*.json"):
        content = json.loads(path.read_text())
        del content["checksum"], content["artefact"]
        path.write_text(json.dumps({**content, "checksum": digest_of(content)}))
    del made.lock.content["frozen"]["artefacts"]
    made.lock.save()
    text, _ = page.publish(Study.as_locked(made.path), "report")
    assert (
        "**Branch A**" in text
        and "calibration" not in text[text.index("## How to repeat it") :].partition("```toml")[0]
    )


def test_an_edited_lock_is_refused(tmp_path):
    made = begun(tmp_path)
    tune(made)
    made.freeze("freeze")
    path = made.folder / "lock.json"
    text = path.read_text()
    path.write_text(text.replace("diverse(weight=0.25)", "diverse(weight=1.0)"))
    with pytest.raises(ValueError, match="was edited or is damaged"):
        Study(made.path)
    path.write_text(text[:100])
    with pytest.raises(ValueError, match="was edited or is damaged"):
        Study(made.path)
    path.unlink()
    confirm_left = made.folder / "heldout"
    confirm_left.mkdir()
    (confirm_left / "x.json").write_text("{}")
    with pytest.raises(BrokenPromise, match="holds results of the held-out split"):
        Study(made.path).init("init")


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    made = Study(write_plan(tmp_path))
    made.folder.mkdir()
    (made.folder / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"holds no study \(thesis.tex\)"):
        made.init("init")
    with pytest.raises(ValueError, match="is a file"):
        Study(made.path, made.path)


# Results


def test_a_damaged_result_is_named_and_only_it_is_repeated(tmp_path):
    made = begun(tmp_path)
    runs = tune(made)
    paths = sorted((made.folder / "development").glob("*.json"))
    assert len(paths) == runs
    text = paths[0].read_text()
    old, new = ("wrong", "right") if '"wrong"' in text else ("right", "wrong")
    for content in (text.replace(f'"{old}"', f'"{new}"'), text[:-9], ""):
        before = {path: path.read_bytes() for path in paths[1:]}
        paths[0].write_text(content)
        with pytest.raises(ValueError, match=rf"{paths[0].name} is damaged .*delete this file"):
            made.results("development")
        paths[0].unlink()
        assert tune(made) == 1
        assert {path: path.read_bytes() for path in paths[1:]} == before


def test_a_plan_that_grows_keeps_what_was_measured(tmp_path):
    made = begun(tmp_path)
    first = tune(made)
    write_plan(tmp_path, weight="[0.25, 1.0, 2.0]", budgets="[32, 64]")
    more = Study(made.path)
    assert more.init("init") == ["the plan file"]
    assert tune(more) == first // 3  # one more candidate beside two and the baseline
    assert tune(more) == 0


def test_the_history_keeps_what_was_given_up(tmp_path):
    made = begun(tmp_path)
    first = tune(made)
    write_plan(tmp_path, weight="[0.25, 2.0]")
    more = Study(made.path)
    more.init("kvretain study init again")
    event = more.lock.content["history"][-1]
    assert event["command"] == "kvretain study init again" and event["changed"] == ["the plan file"]
    assert event["runs"] == first and event["plan_text"] == made.text
    more.init("for nothing")
    assert more.lock.content["history"][-1].keys() == {"command", "at"}
    text, files = page.publish(Study.as_locked(made.path), "report")
    told = f"after {first:,} runs of the development split: `init` again, since there changed the plan file."
    assert told in text and text.count("weight = [0.25, 2.0]") == text.count("weight = [0.25, 1.0]") == 1
    html = files[1].read_text(encoding="utf-8")
    assert told in html and "weight = [0.25, 1.0]" in html and "The plan until 20" in html


# Matched mean cache


@pytest.mark.parametrize(("slope", "offset"), [(1, 0.5), (1, 64), (2, 0), (0.5, 10), (1.3, -7)])
def test_the_search_finds_the_budget(slope, offset):
    def mean(budget):
        return slope * budget + offset

    tried: dict[int, float] = {}
    while (size := next_budget(tried, 200.0, 0.01, 64)) is not None:
        assert size not in tried and size >= 1
        tried[size] = mean(size)
    assert len(tried) <= 6
    best = best_budget(tried, 200.0, 0.01)
    assert best is not None and abs(mean(best) / 200 - 1) <= 0.01


@pytest.mark.parametrize("mean", [lambda b: 500.0, lambda b: 100.0, lambda b: 150.0 if b < 80 else 250.0])
def test_the_search_ends_where_there_is_none(mean):
    tried: dict[int, float] = {}
    while (size := next_budget(tried, 200.0, 0.01, 64)) is not None:
        tried[size] = mean(size)
    assert best_budget(tried, 200.0, 0.01) is None and len(tried) <= study.TRIES


def test_the_search_does_not_go_below_the_least_budget():
    tried: dict[int, float] = {}
    while (size := next_budget(tried, 16.0, 0.01, 16, 14)) is not None:
        assert size >= 14 and size not in tried
        tried[size] = size + 32.0
    assert set(tried) == {16, 14} and best_budget(tried, 16.0, 0.01) is None


@pytest.mark.parametrize(
    ("arm", "least"),
    [
        ('{policy = "knorm", every = 64, sinks = 4, recent = 10}', 14),
        ('{policy = "knorm", every = 64, protect_prompt = true}', 12 + 1),
        ('{policy = "knorm", every = 64, protect_prompt = true, recent = 3}', 12 + 3),
    ],
)
def test_a_protection_that_leaves_no_room_ends_the_search(tmp_path, arm, least):
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"question": f"{i}?", "answer": f"#### {i}"}) for i in range(9))
    )
    text = PLAN.replace('kind = "recall"\nproblems = 60', 'kind = "maths"\nname = "gsm8k"\nfile = "rows.jsonl"')
    text = text.replace('"knorm/diverse(weight={weight})@model"', arm).replace("weight = [0.25, 1.0]", "")
    made = begun(tmp_path, text.replace("budgets = [32, 64]", "budgets = [16]"))

    def run(unit):
        assert unit.budget >= least
        mean = unit.budget + 30.0 if unit.cache.every == 64 else unit.budget
        return dataclasses.replace(planted(unit, mean=lambda unit: mean), prefill_cache=12.0)

    tune(made, run)
    with pytest.raises(ValueError, match=rf"'diverse' cannot reach the baseline's mean cache.*at budget {least}"):
        made.freeze("freeze")


def test_summaries_that_leave_no_room_end_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr("kvretain.evidence.plan.load_tokenizer", lambda name: Letters())
    monkeypatch.setattr("kvretain.evidence.summaries.CUE", "so:")
    text = PLAN.replace('"knorm/diverse(weight={weight})@model"', '{policy = "full", summary = 9}')
    text = text.replace("weight = [0.25, 1.0]", "")
    with pytest.raises(ValueError, match=r"summary of 9 tokens needs a budget of at least 29 on owner/one, not 28"):
        begun(tmp_path, text.replace("budgets = [32, 64]", "budgets = [28]"))
    made = begun(tmp_path, text.replace("budgets = [32, 64]", "budgets = [32]"))

    def run(unit):
        assert unit.budget >= 29
        return planted(unit, mean=lambda unit: unit.budget + 30.0 * unit.cache.summary)

    tune(made, run)
    with pytest.raises(ValueError, match=r"'diverse' cannot reach the baseline's mean cache.*at budget 29"):
        made.freeze("freeze")


def roomy(unit):
    """An arm that holds 16 entries more than its budget says."""
    return unit.budget + 16 * ("diverse" in unit.policy)


def test_an_arm_that_holds_more_gets_a_smaller_budget(tmp_path):
    made = whole(write_plan(tmp_path), lambda unit: planted(unit, mean=roomy))
    budgets = {(m, b): own for m, b, own in made.frozen["choice"]["diverse"]["budgets"]}
    assert budgets == {(m, b): b - 16 for m in made.plan.models for b in (32, 64)}
    found, content = diagnostics(made)
    assert all(cell["matched"] and cell["ratio"] == 1 for cell in content["data"]["cells"])
    assert "mean cache 1.50 of the baseline's" in found["equal-cache"]["sentence"]


def test_gains_that_came_from_more_cache_are_shown(tmp_path):
    def run(unit):
        return planted(unit, mean=roomy, gain=lambda policy: 0.4 * ("diverse" in policy) * (unit.budget in (32, 64)))

    found, content = diagnostics(whole(write_plan(tmp_path), run))
    assert found["equal-cache"]["flagged"] and "gain came from more cache" in found["equal-cache"]["sentence"]
    assert {cell["difference"] for cell in content["data"]["cells"]} == {0.0}
    assert content["data"]["branch"] == {"diverse": "B"}


def test_an_arm_that_cannot_reach_the_mean_is_an_error_and_nothing_is_lost(tmp_path):
    text = PLAN.replace("knorm/diverse(weight={weight})@model", "full").replace("weight = [0.25, 1.0]", "")
    made = begun(tmp_path, text)
    runs = tune(made, lambda unit: planted(unit, mean=lambda unit: 300.0 if unit.policy == "full" else unit.budget))
    with pytest.raises(ValueError, match=r"'diverse' cannot reach the baseline's mean cache: 32.0 entries.*300.0 at"):
        made.freeze("freeze")
    assert len(made.results("development")) == runs and not made.frozen


def test_candidates_out_of_reach_are_not_chosen(tmp_path):
    made = begun(tmp_path)
    tune(made, lambda unit: planted(unit, mean=lambda unit: 500.0 if "0.25" in unit.policy else unit.budget))
    frozen = made.freeze("freeze")
    assert frozen["choice"]["diverse"]["label"] == "weight=1.0"
    assert [row["gain"] is None for row in frozen["table"]] == [True, False]


def test_a_mean_that_no_longer_agrees_carries_no_verdict(tmp_path):
    made = begun(tmp_path)
    tune(made)
    made.freeze("freeze")

    def drifted(unit):
        more = 1 + 0.02 * ("diverse" in unit.policy and unit.model == "owner/one" and unit.budget == 32)
        return planted(unit, mean=lambda unit: unit.budget * more)

    confirm(made, drifted)
    found, content = diagnostics(Study.as_locked(made.path))
    bad, *good = content["data"]["cells"]
    assert bad["verdict"] == "no verdict: mean cache differs" and bad["p_corrected"] is None
    assert bad["ratio"] == pytest.approx(1.02) and all(cell["verdict"] == "better" for cell in good)
    # It still counts in Bonferroni's correction.
    assert all(cell["p_corrected"] == pytest.approx(4 * cell["p"]) for cell in good)
    assert found["overrun"]["flagged"] and "1.02" in found["overrun"]["sentence"]
    assert "NO: more than 1.0% apart" in page.markdown(content)


# The verdict


def test_a_planted_gain_is_confirmed(done):
    found, content = diagnostics(done)
    assert content["data"]["branch"] == {"diverse": "A"}
    assert not any(found[name]["flagged"] for name in ("equal-cache", "n-evaporation", "overrun", "one-model", "proxy"))
    assert "no longer" not in found["n-evaporation"]["sentence"]


def test_harm_is_branch_c_and_a_gain_on_one_model_b(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "b").mkdir()
    harmed = whole(
        write_plan(tmp_path / "c"), lambda unit: planted(unit, gain=lambda p: -0.3 if "diverse" in p else 0.6)
    )
    assert verdicts(harmed)[0] == {"diverse": "C"}

    def lonely(unit):
        return planted(unit, gain=lambda p: 0.6 if "diverse" in p and unit.model == "owner/one" else 0.0)

    found, content = diagnostics(whole(write_plan(tmp_path / "b"), lonely))
    assert content["data"]["branch"] == {"diverse": "B"}
    assert found["one-model"]["flagged"] and "better on one, not on two" in found["one-model"]["sentence"]


def test_two_arms_share_the_error(tmp_path):
    text = PLAN.replace("[grid]", 'window = "streaming@model"\n\n[grid]')
    branches, cells = verdicts(whole(write_plan(tmp_path, text)))
    assert branches == {"diverse": "A", "window": "B"}
    assert len(cells) == 8
    assert all(cell.corrected == pytest.approx(min(1, 8 * cell.comparison.p_value)) for cell in cells)


def test_evaporation_is_told(tmp_path):
    """A gain that the first 25 problems show and the others undo."""
    path = write_plan(tmp_path, problems="150")
    made = Study(path)
    made.init("init")
    order = {name: at for at, name in enumerate(in_random_order(made.lock.content["heldout"]))}

    def right(unit):
        treated = "diverse" in unit.policy
        if order.get(unit.problem.id, 99) < 25:
            return treated
        return luck(unit.problem.id, treated) < (0.25 if treated else 0.6)

    def run(unit):
        return planted(unit, right=right)

    tune(made, run)
    made.freeze("freeze")
    confirm(made, run)
    told = diagnostics(Study.as_locked(path))[0]["n-evaporation"]
    assert told["flagged"] and "one b=32 (+100.0 at n=25, " in told["sentence"]


def test_a_proxy_that_prefers_the_other_arm_is_told(tmp_path):
    def run(unit):
        record = planted(unit)
        return dataclasses.replace(record, nll=4 - record.nll)

    found, _ = diagnostics(whole(write_plan(tmp_path), run))
    assert found["proxy"]["flagged"] and "prefers the other arm in: one b=32, one b=64" in found["proxy"]["sentence"]


def test_extraction_collapse_is_told(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = PLAN.replace('kind = "recall"\nproblems = 60', 'kind = "maths"\nname = "gsm8k"\nfile = "rows.jsonl"')
    pytest.importorskip("math_verify")

    def run(unit):
        record = planted(unit)
        if "diverse" in unit.policy and record.verdict == "wrong":
            return dataclasses.replace(record, verdict="no_answer", exact="no_answer")
        return record

    found, content = diagnostics(whole(write_plan(tmp_path, text), run))
    assert found["collapse"]["flagged"] and "no answer or cut off 0 % against" in found["collapse"]["sentence"]
    assert content["data"]["facts"]["environment"]["math-verify"]


@pytest.mark.parametrize("first, second", [([1, 2, 3, 5], [4, 4, 1, 0]), ([0, 1, 1, 0, 2], [0.5, 3, 3, 1, 2])])
def test_rank_correlation_is_scipys(first, second):
    stats = pytest.importorskip("scipy.stats")
    assert rank_correlation(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)


# The report


def test_the_report_is_one_page_and_repeats_itself(done):
    text, files = page.publish(done, "kvretain study report")
    once = {path: path.read_bytes() for path in files}
    again = page.publish(Study.as_locked(done.path), "kvretain study report")
    assert again[0] == text and {path: path.read_bytes() for path in again[1]} == once
    html = (done.folder / "report.html").read_text(encoding="utf-8")
    assert html.index("Branch A") < html.index("Held-out result") < html.index("Mean cache") < html.index("Diagnostics")
    assert html.count("data:image/svg+xml") == 7 and "http" not in html.replace("http://www.w3.org", "").replace(
        "http%3A//", ""
    )
    assert "&lt;reply of" in html and "<reply of" not in html
    for words in ("Branch A", "kvretain study init", "torch", "weight = [0.25, 1.0]"):
        assert words in text and words.replace('"', "&#34;") in html
    data = json.loads((done.folder / "report.json").read_text())
    assert len(data["cells"]) == 4 and data["branch"] == {"diverse": "A"}
    runs = list(csv.DictReader(gzip.decompress((done.folder / "runs.csv.gz").read_bytes()).decode().splitlines()))
    assert len(runs) == sum(len(done.results(side)) for side in ("development", "heldout"))
    assert {run["arm"] for run in runs} == {"topk", "diverse"}
    assert {run["split"] for run in runs} == {"development", "heldout"} and "reply" not in runs[0]
    kept = {
        (side, r.model, r.policy, str(r.budget), r.problem, str(r.sample)): r.verdict
        for side in ("development", "heldout")
        for r in done.results(side).all()
    }
    names = ("split", "model", "policy", "budget", "problem", "sample")
    assert all(run["verdict"] == kept[tuple(run[name] for name in names)] for run in runs)


def test_before_the_end_there_is_no_verdict(tmp_path):
    made = begun(tmp_path)
    assert "No verdict: nothing is frozen" in page.publish(Study.as_locked(made.path), "report")[0]
    tune(made)
    screened, _ = page.publish(Study.as_locked(made.path), "report")
    assert "A screening, not a confirmation" in screened and "Held-out result" not in screened
    table = screened[screened.index("## Development") :]
    results, plan = made.results("development"), made.plan
    for match in made.matches(results):
        if match.candidate.arm != plan.baseline and match.own:
            before = results.of(made.units("development", match.model, made.control, match.budget))
            after = results.of(made.units("development", match.model, match.candidate, match.own))
            means = [sum(record.right for record in side) / len(side) for side in (before, after)]
            assert f"| {100 * means[0]:.1f} | {100 * means[1]:.1f} | {100 * (means[1] - means[0]):+.1f} [" in table
    made.freeze("freeze")
    results = made.results("heldout")
    for unit in made.heldout_units()[:50]:
        results.add(planted(unit))
    text, _ = page.publish(Study.as_locked(made.path), "report")
    assert "No verdict: 50 of" in text and "Held-out result" not in text and "| chosen |" in text


def test_the_report_needs_the_lock_and_not_the_plan(done, tmp_path):
    with pytest.raises(ValueError, match="holds no study"):
        Study.as_locked(tmp_path / "plan.toml")
    text = done.path.read_text()
    try:
        done.path.write_text(text + "\n# changed")
        assert "there changed the plan file" in page.publish(Study.as_locked(done.path), "report")[0]
    finally:
        done.path.write_text(text)


def test_a_lock_without_its_records_is_not_reported_on(done, tmp_path):
    (tmp_path / "lock.json").write_bytes((done.folder / "lock.json").read_bytes())
    with pytest.raises(ValueError, match=r"complete, but \d+ held-out runs are not there.*report.md"):
        page.publish(Study.as_locked(done.path, tmp_path), "report")
    assert [path.name for path in tmp_path.iterdir()] == ["lock.json"]


def test_records_are_read_as_written(done):
    results = Results(done.folder / "heldout")
    record = results.all()[0]
    assert record == planted(next(u for u in done.heldout_units() if u.key == record.key))
