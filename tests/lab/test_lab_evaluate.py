"""What is counted, on replies that are written here; and both commands and a study on a barely trained animal."""

import dataclasses
import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from checkpoint import save_tiny_checkpoint
from typer.testing import CliRunner

from kvretain import load_model
from kvretain.commands import app
from kvretain.evidence.plan import Split, parse_plan
from kvretain.evidence.station import grouped
from kvretain.evidence.station import run as work_off
from kvretain.evidence.units import units_of
from kvretain.evidence.workloads import WORKLOADS, Chains
from kvretain.lab.chains import series
from kvretain.lab.evaluate import Recall, by_distance, recalls, solve
from kvretain.lab.recipe import Recipe, Stage
from kvretain.lab.train import train
from kvretain.lab.vocabulary import WORDS, tokenizer


class Scripted:
    """Writes what it is told, padded as ``generate`` pads."""

    device, config = torch.device("cpu"), SimpleNamespace(vocab_size=len(WORDS))

    def __init__(self, replies):
        self.replies = iter(replies)

    def generate(self, ids, *, attention_mask, max_new_tokens, do_sample):
        assert attention_mask.all() and not do_sample
        words = tokenizer()
        rows = [words(next(self.replies) + " <eos>", add_special_tokens=False)["input_ids"] for _ in ids]
        assert max(map(len, rows)) <= max_new_tokens
        rows = [row + [words.pad_token_id] * (max(map(len, rows)) - len(row)) for row in rows]
        return torch.cat([ids, torch.tensor(rows)], 1)


def test_solving_tells_right_from_wrong():
    problems = series(4, steps=3)
    replies = [problem.solution for problem in problems]
    replies[1] = replies[1].replace(f"{{ {problems[1].answer} }}", f"{{ {(int(problems[1].answer) + 1) % 10} }}")
    replies[3] = replies[3].partition("?")[0].strip()
    done = []
    attempts = solve(Scripted(replies), tokenizer(), problems, batch=3, report=done.append)
    assert [str(one.verdict) for one in attempts] == ["right", "wrong", "right", "cut_off"] and done == [3, 4]
    assert [one.right for one in attempts] == [True, False, True, False]
    assert [one.faultless for one in attempts] == [True, False, True, False]
    assert [len(one.recalls) for one in attempts] == [7, 7, 7, 6]
    assert by_distance(attempts).keys() <= {"1-32", "33-64", "65-128"}
    assert all(all(right) for right in by_distance(attempts).values())


def test_recalls_are_told_from_first_statements_and_from_slips():
    prompt = "a 4 ; b 7 : x = a + b y = x - a ? y :"
    reply = "x = a + b : a 4 ; b 6 ; x 0 ; y = x - a : x 0 ; a 5 ; y 6 ;"
    found = recalls(prompt, reply)
    assert [recall.right for recall in found] == [True, False, True, False]
    words = f"{prompt} {reply}".split()
    places = [at for at, pair in enumerate(pairwise(words)) if pair[0] == "a" and pair[1].isdigit()]
    assert [found[0].distance, found[3].distance] == [places[1] - places[0], places[2] - places[1]]
    assert recalls(prompt, "") == []
    assert by_distance([]) == {}


def test_distances_fall_into_bins():
    @dataclasses.dataclass
    class One:
        recalls: list

    one = One([Recall(distance, distance != 65) for distance in (1, 32, 33, 64, 65, 128, 129, 256, 257, 999)])
    assert by_distance(iter([one])) == {
        "1-32": [True, True], "33-64": [True, True], "65-128": [False, True], "129-256": [True, True],
        "over 256": [True, True],
    }  # fmt: skip


@pytest.fixture(scope="module")
def animal(tmp_path_factory):
    """Wired, and trained for a moment."""
    folder = tmp_path_factory.mktemp("animal")
    train(Recipe(layers=3, inner=64, stages=(Stage(3, 1, 2),), tokens=200), folder)
    return str(folder)


# The workload of a study

PLAN = """
title = "chains"
models = ["{model}"]
budgets = [24]
samples = 2
baseline = "all"

[arms]
all = "full"
some = "keydiff@model"

[cache]
every = 8

[workload]
kind = "chains"
steps = 3
problems = 12
temperature = 5.0
"""


def test_the_default_problems_split_as_math_500_does():
    workload = Chains()
    problems = workload.load()
    assert [len(side) for side in Split().sides(problems)] == [201, 299]
    for index, problem in enumerate(problems):  # the numbers of given variables take turns
        if index % 97 == 0:
            given = (2, 3, 4, 5)[index % 4]
            assert problem.question == series(index + 1, steps=20, given=given, seed=workload.series)[index].prompt


def test_what_is_written_together_has_prompts_of_one_length(tmp_path):
    plan = parse_plan(PLAN.replace("{model}", "m"), tmp_path)
    units = units_of(plan, "base", "m", plan.candidates("some")[0], 24, plan.workload.load())
    groups = grouped(plan, units)
    assert sorted(map(len, groups)) == [6, 6, 6, 6]  # 12 problems of 4 lengths, twice
    assert all(len({len(unit.problem.question.split()) for unit in group}) == 1 for group in groups)


def test_a_study_writes_word_by_word_through_a_budget(animal, tmp_path):
    plan = parse_plan(PLAN.replace("{model}", animal), tmp_path)
    problems = plan.workload.load()
    (full,), (some,) = plan.candidates("all"), plan.candidates("some")
    units = [unit for one in (full, some) for unit in units_of(plan, "base", animal, one, 24, problems[::4][:2])]
    records = list(work_off(plan, units))
    assert len(records) == 8 and {record.verdict for record in records} <= {"right", "wrong", "no_answer", "cut_off"}
    assert all(record.exact == record.verdict and record.nll > 0 for record in records)
    assert {record.reply for record in records[:2]} != {records[0].reply}  # two samples are two draws
    size = len(problems[0].question.split()) + 1
    for record in records:
        if record.policy == full.policy:
            assert record.prefill_cache == size and record.peak_cache > size
        else:
            assert record.prefill_cache == 24 and record.peak_cache <= max(size, 24 + 8)
    again = list(work_off(plan, units[:1]))
    assert again[0].reply == records[0].reply


def test_a_right_reply_is_right_in_a_study():
    workload = Chains(steps=4)
    problem = workload.load()[7]
    solution = series(8, steps=4, given=5, seed=workload.series)[7].solution
    assert workload.grade(solution, problem.answer, cut_off=False) == ("right", "right")
    assert workload.grade("x 1 ;", problem.answer, cut_off=True) == ("cut_off", "cut_off")
    assert len(f"<bos> {problem.question} {solution} <eos>".split()) + 64 == workload.sampling.max_length


@pytest.mark.parametrize(
    "keys, message",
    [
        ("steps = 0", "workload.steps must be at least 1, not 0"),
        ("steps = 50", "50 steps and 3 given variables are more than the 52 names"),
        ("given = []", "workload.given must be at least 1, not 0"),
        ("given = [2, 0]", "workload.given must be at least 1, not 0"),
        ("length = 3", "unknown key workload.length; valid: steps, given"),
    ],
)
def test_plans_that_make_no_chains_are_refused(keys, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse_plan(PLAN.replace("steps = 3", keys), tmp_path)
    assert WORKLOADS["chains"] is Chains


def test_a_study_refuses_a_model_of_other_words(tmp_path):
    other = str(save_tiny_checkpoint(tmp_path))
    plan = parse_plan(PLAN.replace("{model}", other), tmp_path)
    units = units_of(plan, "base", other, plan.candidates("all")[0], 24, plan.workload.load()[:1])
    with pytest.raises(ValueError, match=r"another vocabulary .* `kvretain lab train` makes"):
        list(work_off(plan, units))


@pytest.mark.parametrize("size", [60, 120])
def test_an_animal_with_other_embeddings_is_refused_before_it_runs(size, animal, tmp_path):
    net, words = load_model(animal, device="cpu")
    net.resize_token_embeddings(size)
    folder = str(tmp_path / "other")
    net.save_pretrained(folder)
    words.save_pretrained(folder)
    with pytest.raises(ValueError, match=f"has {size} embeddings"):
        solve(net, words, series(1, steps=2, given=2))
    plan = parse_plan(PLAN.replace("{model}", folder), tmp_path)
    with pytest.raises(ValueError, match=f"has {size} embeddings"):
        plan.check()
    with pytest.raises(ValueError, match=f"has {size} embeddings"):
        list(work_off(plan, units_of(plan, "base", folder, plan.candidates("all")[0], 24, plan.workload.load()[:1])))


def test_init_refuses_chains_on_a_model_of_other_words(tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN.replace("{model}", str(save_tiny_checkpoint(tmp_path / "other"))))
    done = run("study", "init", tmp_path / "plan.toml", "--out", tmp_path / "out")
    assert done.exit_code == 2 and "another vocabulary" in " ".join(done.stderr.split())
    assert not (tmp_path / "out" / "lock.json").exists()


# The commands


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_help_teaches():
    for command in ((), ("train",), ("eval",)):
        result = run("lab", *command, "--help")
        assert result.exit_code == 0 and "laboratory animal" in " ".join(result.stdout.split())


def test_train_stops_in_time_and_goes_on(tmp_path):
    first = run("lab", "train", "--out", tmp_path / "a", "--minutes", 0)
    assert first.exit_code == 0, first.stderr
    words = " ".join(first.stdout.split())
    assert "1 of 2,200 updates" in words and "the same command goes on" in words and "a laboratory animal" in words
    second = json.loads(run("lab", "train", "--out", tmp_path / "a", "--minutes", 0, "--json").stdout)
    assert second["updates"] == 2 and second["of"] == Recipe().updates
    longer = run("lab", "train", "--out", tmp_path / "b", "--minutes", 0, "--stretch", 2, "--json")
    assert json.loads(longer.stdout)["of"] == 2 * Recipe().updates
    refused = run("lab", "train", "--out", tmp_path / "a", "--seed", 1)
    assert refused.exit_code == 2 and "another recipe (seed differ)" in " ".join(refused.stderr.split())


def test_eval_says_what_it_found(animal):
    found = json.loads(run("lab", "eval", "-m", animal, "--n", 3, "--steps", 2, "--steps", 1, "--json").stdout)
    assert [row["steps"] for row in found["accuracy"]] == [1, 2]
    for row in found["accuracy"]:
        assert row["n"] == 3 and row["low"] <= row["share"] <= row["high"] and row["high"] > row["low"]
    table = run("lab", "eval", "-m", animal, "--n", 2, "--steps", 1)
    assert table.exit_code == 0 and "laboratory animal" in table.stdout


def test_eval_refuses_what_is_no_animal(tmp_path):
    refused = run("lab", "eval", "-m", save_tiny_checkpoint(tmp_path), "--n", 1)
    assert refused.exit_code == 2 and "another vocabulary" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(("given", "warned"), [("[4]", True), ("[2, 5]", False)])
def test_init_warns_of_prompts_of_one_length(given, warned, animal, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("{model}", animal).replace("steps = 3", f"steps = 3\ngiven = {given}"))
    done = run("study", "init", plan, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert ("let their lengths differ" in done.stderr) == warned
