"""``kvretain eval`` on files of LongBench, RULER and GSM8K, end to end on a tiny checkpoint."""

import importlib.util
import json
import re

import pytest
from checkpoint import save_tiny_checkpoint
from tasks.test_benchmarks import document, problem, recall, write
from typer.testing import CliRunner

from kvretain import models
from kvretain.commands import app
from kvretain.tasks import gsm8k
from kvretain.tasks.metrics import Metric

pytest.importorskip("pyarrow")
from pyarrow import parquet

graded = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "data" / "hotpotqa.jsonl", [document(i) for i in range(3)])
    write(tmp_path / "data" / "vt" / "validation.jsonl", [recall(i) for i in range(3)])
    write(tmp_path / "data" / "test.jsonl", [problem(i) for i in range(3)])
    write(tmp_path / "data" / "train.jsonl", [problem(i) for i in range(10, 18)])
    return tmp_path / "data"


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


SMALL = ("--length", 300, "--policies", "knorm,knorm+hub", "--budgets", 100)
TASKS = "longbench:hotpotqa,ruler:vt"


def test_scores_are_those_of_the_replies_and_a_run_goes_on(checkpoint, folder, tmp_path):
    arguments = ("-m", checkpoint, *SMALL, "--tasks", TASKS, "--data", folder, "--out", tmp_path / "out", "--n", 50)
    first = run(*arguments, "--limit", 2)
    assert first.exit_code == 0, first.output
    assert "4 examples are left" in first.stdout
    parts = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "parts").iterdir()}
    assert set(parts) == {"longbench.hotpotqa-00000.parquet", "ruler.vt-00000.parquet"}
    second = run(*arguments)
    assert second.exit_code == 0 and "4 examples measured now" in second.stdout, second.output
    assert parts.items() <= {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out" / "parts").iterdir()}.items()
    rows = parquet.read_table(tmp_path / "out" / "rows.parquet").to_pylist()
    assert len(rows) == 2 * 3 * 5  # all examples there are, of two tasks, under five policies
    for row in rows:
        name, answers = {
            "longbench:hotpotqa": ("f1", document()["answers"]), "ruler:vt": ("match_all", recall()["outputs"]),
        }[row["task"]]  # fmt: skip
        assert row["score"] == Metric(name)(row["reply"], answers) and row["exact"] is None
        assert row["policy"] == "full" or row["kept"] == min(100, row["context_tokens"])
    page = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    for text in (
        "## longbench:hotpotqa",
        "| kept | score, % | NLL |",
        "adds, score, %: policy",
        "- data: {'longbench:hot",
    ):
        assert text in page
    again = CliRunner().invoke(app, ["report", str(tmp_path / "out")])
    assert again.exit_code == 0 and page in again.stdout


def test_long_documents_are_cut_to_the_length(checkpoint, folder, tmp_path):
    lengths = {}
    for length in (200, 300):
        arguments = ("--length", length, "--policies", "knorm", "--ratios", "0.5", "--n", 1, "--no-generate")
        result = run("-m", checkpoint, *arguments, "--tasks", "longbench:hotpotqa", "--data",
                     folder / "hotpotqa.jsonl", "--out", tmp_path / f"{length}", "--aware")  # fmt: skip
        assert result.exit_code == 0, result.output
        rows = parquet.read_table(tmp_path / f"{length}" / "rows.parquet").to_pylist()
        lengths[length] = {row["context_tokens"] for row in rows}
        assert {row["score"] for row in rows} == {None}
    for length, (tokens,) in lengths.items():
        assert abs(tokens - length) <= 4  # the template's tokens, and those that fall apart at the cut


@graded
def test_gsm8k(checkpoint, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(gsm8k, "MOST", 8)
    result = run("-m", checkpoint, *SMALL, "--tasks", "gsm8k", "--data", folder, "--out", tmp_path / "out", "--n", 1)
    assert result.exit_code == 0, result.output
    rows = parquet.read_table(tmp_path / "out" / "rows.parquet").to_pylist()
    assert {row["exact"] for row in rows} == {False} and "| kept | exact, % | NLL |" in result.stdout


def test_more_tasks_may_come_but_not_other_data(checkpoint, folder, tmp_path):
    arguments = ("-m", checkpoint, *SMALL, "--data", folder, "--out", tmp_path / "out", "--n", 1, "--no-generate")
    assert run(*arguments, "--tasks", "single").exit_code == 0
    before = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert "sources" not in before and "data" not in before["identity"]
    for tasks in ("ruler:vt", TASKS):
        assert run(*arguments, "--tasks", tasks).exit_code == 0
    run_file = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert run_file["identity"] == before["identity"] and run_file["sources"].keys() == {
        "longbench:hotpotqa",
        "ruler:vt",
    }
    write(folder / "hotpotqa.jsonl", [document(context="Something else. " * 60)])
    result = run(*arguments, "--tasks", TASKS)
    assert result.exit_code == 2
    assert "holds results of longbench:hotpotqa on other data (" in " ".join(result.stderr.split())


BAD = [
    (
        ("--tasks", "longbench:qasper"),
        "the task 'longbench:qasper' needs --data with its folder or file, or --data hub",
    ),
    (("--tasks", "longbench:qasper", "--data", "FOLDER"), "holds no qasper.jsonl or data/qasper.jsonl"),
    (("--tasks", "longbench:qaspar", "--data", "FOLDER"), "unknown task 'longbench:qaspar'; longbench: is followed by"),
    (("--tasks", "longbensh:qasper"), "unknown task 'longbensh:qasper'; valid: .*, longbench:NAME, ruler:NAME, gsm8k"),
    (("--tasks", "longbench:hotpotqa,ruler:vt", "--data", "FILE"), "is one file, but longbench:hotpotqa and ruler:vt"),
    (("--tasks", "ruler:vt", "--data", "FILE"), r"hotpotqa.jsonl, line 1: no outputs; a row of RULER needs input, out"),
    (("--tasks", "ruler:vt", "--data", "hub"), "run its scripts/data/prepare.py"),
    (("--tasks", "ruler:vt", "--data", "FOLDER", "--skip", "3"), "ruler:vt has 3 examples: --skip 3 leaves none"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_code_2(arguments, message, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    places = {"FOLDER": folder, "FILE": folder / "hotpotqa.jsonl"}
    result = run("--out", tmp_path / "out", *(places.get(a, a) for a in arguments))
    assert result.exit_code == 2
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", result.stderr), result.stderr


@pytest.mark.parametrize(
    ("task", "module", "extra"), [("gsm8k", "math_verify", "study"), ("longbench:dureader", "jieba", "longbench")]
)
def test_a_missing_grader_is_named_before_the_model_is_loaded(task, module, extra, folder, tmp_path, monkeypatch):
    write(folder / "dureader.jsonl", [document()])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == module else find(name, *_))
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    result = run("--tasks", task, "--data", folder, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert f'{task} is graded with {module}: pip install "kvretain[{extra}]"' in " ".join(result.stderr.split())
