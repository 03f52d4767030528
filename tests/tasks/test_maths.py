import json
import sys
from pathlib import Path

import pytest

from kvretain.evidence import grade_exact, split
from kvretain.tasks import maths
from kvretain.tasks.maths import WORKLOADS, Problem, Sampling, load_problems, prompt

DATA = next(
    (p / "shared/data" for p in Path(__file__).resolve().parents if (p / "shared/data").is_dir()), Path("absent")
)
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")

ROWS = {
    "math500": {
        "unique_id": "test/a/1.json", "problem": " 1+1? ", "answer": "2", "subject": "Algebra", "level": 3, "more": 0,
    },
    "gsm8k": {"question": "How many?", "answer": "1 + 1 = <<1+1=2>>2\n#### 1,002"},
    "aime24": {"id": 60, "problem": "Find $n$.", "answer": "025"},
    "aime25": {"problem": "Find $n$.", "answer": 70},
}  # fmt: skip
PROBLEMS = {
    "math500": Problem("test/a/1.json", "1+1?", "2", "Algebra", 3),
    "gsm8k": Problem("gsm8k/0", "How many?", "1002"),
    "aime24": Problem("aime24/60", "Find $n$.", "25"),
    "aime25": Problem("aime25/0", "Find $n$.", "70"),
}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_row_becomes_a_problem_from_either_format(workload, tmp_path):
    row = ROWS[workload]
    for text in (json.dumps([row], indent=1), json.dumps(row) + "\n\n"):
        assert load_problems(workload, write(tmp_path / "rows", text)) == [PROBLEMS[workload]]


@pytest.mark.parametrize(
    ("workload", "count", "last"),
    [("math500", 500, r"106^\circ"), ("gsm8k", 1319, "14"), ("aime24", 30, "902")],
)
@needs_data
def test_the_real_files(workload, count, last):
    (path,) = (DATA / workload).glob("*.json*")
    problems = load_problems(workload, path)
    assert len({problem.id for problem in problems}) == count
    assert [grade_exact(f"so \\boxed{{{p.answer}}}", p.answer).value for p in problems].count("right") == count
    assert problems[-1].answer == last
    if workload == "math500":
        assert [len(side) for side in split(p.id for p in problems)] == [201, 299]
        assert {p.level for p in problems} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("workload", "text", "message"),
    [
        ("math501", "[]", "unknown workload 'math501'; valid: math500, gsm8k, aime24, aime25"),
        ("gsm8k", "", "has no rows"),
        ("gsm8k", "[", "is not JSON"),
        ("gsm8k", '{"question": "a", "answer": "#### 1"}\n{"question', "line 2: not JSON"),
        ("gsm8k", "[3]", "row 1: a row must be an object with columns, not int"),
        ("gsm8k", '{"question": "a"}', "row 1: no answer; gsm8k needs question, answer"),
        ("math500", json.dumps({**ROWS["math500"], "unique_id": None}), "row 1: no unique_id; math500 needs"),
        ("math500", json.dumps({**ROWS["math500"], "answer": " "}), "row 1: its answer is ' ', not text"),
        ("math500", json.dumps([ROWS["math500"]] * 2), "row 2: the id 'test/a/1.json' comes twice"),
        ("gsm8k", '{"question": "a", "answer": "5"}', "row 1: its answer has no '#### '"),
        ("gsm8k", '{"question": 5, "answer": "#### 5"}', "row 1: its question is 5, not text"),
        ("aime24", '{"id": 1, "problem": "a", "answer": "1000"}', "row 1: its answer is '1000'; AIME's are"),
        ("aime24", '{"id": 1, "problem": "a", "answer": "-1"}', "row 1: its answer is '-1'"),
    ],
)
def test_bad_files(workload, text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_problems(workload, write(tmp_path / "rows.jsonl", text))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_problems("gsm8k", tmp_path / "none.jsonl")
    (tmp_path / "binary").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        load_problems("gsm8k", tmp_path / "binary")


def test_unusual_line_separators_stay_inside_their_row(tmp_path):
    row = {"question": "one\u2028two\x85three", "answer": "#### 1"}
    path = write(tmp_path / "rows.jsonl", json.dumps(row, ensure_ascii=False))
    assert load_problems("gsm8k", path)[0].question == row["question"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_hub_is_read_through_datasets(workload, tmp_path, monkeypatch):
    # A folder stands in for the repository: datasets reads it the same way, without a network.
    pytest.importorskip("datasets")
    about = WORKLOADS[workload]
    write(tmp_path / f"{about.split}.jsonl", json.dumps(ROWS[workload]) + "\n")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    local = maths.Workload(str(tmp_path), None, about.split, about.columns, about.read, about.sampling)
    monkeypatch.setitem(maths.WORKLOADS, workload, local)
    assert load_problems(workload) == [PROBLEMS[workload]]


def test_without_datasets_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"kvretain\[hub\].*or give a local file"):
        load_problems("gsm8k")


def test_the_prompt_holds_the_problem_and_asks_for_a_box():
    problem = Problem("1", "What is {x} in \\frac{1}{x}?", "1")
    assert problem.question in prompt(problem) and "\\boxed{}" in prompt(problem)
    assert prompt(problem, "{question}\n{{}}") == problem.question + "\n{}"
    for template in ("{questions}", "{}", "{question", "\\boxed{}: {question}"):
        with pytest.raises(ValueError, match="a field other than"):
            prompt(problem, template)
    with pytest.raises(ValueError, match=r"has no \{question\}"):
        prompt(problem, "solve it")


def test_the_reference_sampling():
    assert WORKLOADS["math500"].sampling == Sampling(0.6, 0.95, 8192, 1, 888)
    assert WORKLOADS["aime24"].sampling == WORKLOADS["aime25"].sampling == Sampling(0.6, 0.95, 32768, 8, 888)
    assert Sampling().seed_of(2, 7) == 2_000_895
