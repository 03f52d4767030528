"""Plans: what they say, and that whatever is wrong is said before any work, with the ways out."""

import json
from pathlib import Path

import pytest
from evidence.studies import PLAN, write_plan

from kvretain.evidence import split
from kvretain.evidence.plan import Cache, parse_plan, read_plan
from kvretain.evidence.workloads import Maths, Recall

HERE = Path(__file__).parents[2]


def parse(text=PLAN, **replaced):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return read_plan(write_plan(Path(folder), text, **replaced))[0]


def test_a_plan_says_what_it_says():
    plan = parse()
    assert plan.models == ("owner/one", "owner/two") and plan.treatments == ["diverse"] and plan.cells == 4
    assert plan.workload == Recall(problems=60) and plan.statistics.resamples == 1000
    assert [c.policy for c in plan.candidates("diverse")] == [
        "knorm/diverse(weight=0.25)@model", "knorm/diverse(weight=1.0)@model",
    ]  # fmt: skip
    assert [c.label for c in plan.candidates("diverse")] == ["weight=0.25", "weight=1.0"]
    assert [c.label for c in plan.candidates("topk")] == ["–"]


def test_an_arm_may_have_arguments_of_its_own():
    text = PLAN.replace('kind = "recall"\nproblems = 60', 'kind = "maths"\nname = "gsm8k"')
    plan = parse(text, topk='{policy = "knorm@model", every = 32, recent = 4}')
    (topk,) = plan.candidates("topk")
    assert topk.cache == Cache(every=32, recent=4) and plan.candidates("diverse")[0].cache == Cache()
    assert isinstance(plan.workload, Maths) and plan.workload.sampling.max_length == 8192


def test_an_arm_may_sum_up():
    plan = parse(topk='{policy = "full", summary = 8}')
    assert plan.candidates("topk")[0].cache == Cache(summary=8)


def test_a_grid_of_two_fields_is_crossed():
    text = PLAN.replace("(weight={weight})", "(weight={weight}, redundancy={how})")
    plan = parse(text.replace("[workload]", 'how = ["max", "mean"]\n\n[workload]'))
    assert len({c.policy for c in plan.candidates("diverse")}) == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("budgets =", "budget =", r"unknown key budget \(did you mean budgets\?\); valid: title, models, budgets"),
        ("resamples", "resample", r"unknown key statistics.resample \(did you mean resamples\?\); valid: level"),
        ("problems = 60", "problem = 60", r"unknown key workload.problem .*valid: task, problems, length"),
        ('baseline = "topk"\n', "", "the key baseline is missing"),
        ('baseline = "topk"', 'baseline = "top"', "baseline is 'top'; valid: topk, diverse"),
        ("budgets = [32, 64]", 'budgets = ["32"]', r"budgets\[0\] must be a whole number, not '32'"),
        ("budgets = [32, 64]", "budgets = 32", "budgets must be a list"),
        ("budgets = [32, 64]", "budgets = [0]", "budget is a whole number of at least 1"),
        ("budgets = [32, 64]", "budgets = [32, 32]", "none twice"),
        ("knorm@model", "knrm@model", "arms.topk: policy 'knrm@model': unknown scorer 'knrm'; valid: "),
        ("weight=", "wait=", "arms.diverse: .*takes no 'wait'; valid: weight"),
        ("{weight}", "{w}", r"an arm has the field \{w\}, but grid has no values"),
        ("{weight}", "0.5", r"grid.weight has values, but no arm has the field \{weight\}"),
        ("weight = [0.25, 1.0]", "weight = 0.25", "grid.weight must be a list"),
        ("{weight}", "{weight", "fields of the grid stand in braces|expected '}'"),
        ('kind = "recall"', 'kind = "recal"', "workload.kind is 'recal'; valid: recall, maths"),
        ('kind = "recall"', 'kind = "recall"\ntask = "double"', "workload.task is 'double'; valid: single"),
        ('kind = "recall"', 'kind = "recall"\ndepth = [0.5, 0.1]', "workload.depth wants two shares in order"),
        ("title =", 'required = ["owner/three"]\ntitle =', r"required models \['owner/three'\] are not among"),
        ("title =", "samples = 3\ntitle =", "streamed recall draws nothing"),
        ("title =", "tolerance = 1\ntitle =", "tolerance is a share"),
        ("title =", 'dtype = "float8"\ntitle =', "unknown dtype 'float8'"),
        ("[workload]", "[cache]\nsinks = 2\n[workload]", "streamed recall takes no argument of the cache but every"),
        ("[workload]", "[cache]\nsummary = 8\n[workload]", "'full' and the workload recall"),
        ("[workload]", "[cache]\nsummary = -1\n[workload]", "cache.summary must be at least 0"),
        ("[workload]", "[cache]\nsinks = 30\nrecent = 40\n[workload]", "at budget 32: 70 protected entries"),
        ("[workload]", "[split]\ndevelopment = [0, 1]\nheldout = [1, 2]\n[workload]", r"overlaps: buckets \[1\]"),
        ("resamples = 1000", "resamples = 50", "50 resamples cannot give a p-value below"),
        ("resamples = 1000", "resamples = true", "statistics.resamples must be a whole number, not True"),
        ("title =", "title", "not TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(old, new, message):
    assert old in PLAN
    with pytest.raises(ValueError, match=message):
        parse(PLAN.replace(old, new))


def test_a_missing_plan_and_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no plan"):
        read_plan(tmp_path / "none.toml")
    text = PLAN.replace("problems = 60", 'text = "book.txt"')
    plan = parse_plan(text, tmp_path)
    assert plan.files == [str(tmp_path / "book.txt")]
    with pytest.raises(FileNotFoundError, match=r"book.txt', which is not there"):
        plan.check()
    named = PLAN.replace("knorm@model", "trig(calibration='stats.safetensors')@model")
    with pytest.raises(FileNotFoundError, match=r"stats.safetensors', which is not there"):
        parse_plan(named, tmp_path).check()


def test_the_same_question_on_both_sides_is_an_overlap(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = PLAN.replace('kind = "recall"\nproblems = 60', 'kind = "maths"\nname = "gsm8k"\nfile = "rows.jsonl"')
    plan = parse_plan(text, tmp_path)
    development, heldout = plan.split.sides(plan.workload.load())
    assert not set(development) & set(heldout) and len(development) + len(heldout) == 20
    twin = int(heldout[0].rpartition("/")[2])
    rows[twin]["question"] = "  " + rows[int(development[0].rpartition("/")[2])]["question"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="asks the same question"):
        plan.split.sides(plan.workload.load())


def test_heldout_buckets_may_be_fewer():
    plan = parse(PLAN.replace("[workload]", "[split]\nheldout = [3]\n[workload]"))
    development, heldout = plan.split.sides(plan.workload.load())
    ids = [problem.id for problem in plan.workload.load()]
    assert development == split(ids)[0] and heldout == split(ids, development=(3,))[0]


@pytest.mark.parametrize("name", ["recall-cpu", "alpha-math500"])
def test_the_plans_that_ship_are_whole(name):
    plan, _ = read_plan(HERE / "plans" / f"{name}.toml")
    plan.check()
    assert len(plan.candidates("diverse")) > 2
    if name == "alpha-math500":
        assert (plan.cells, plan.samples, plan.budgets) == (4, 3, (64, 128))
    else:
        sides = plan.split.sides(plan.workload.load())
        assert sum(map(len, sides)) == 40
