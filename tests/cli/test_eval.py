"""``kvretain eval``: what it writes and shows, and every bad input."""

import json
import re
from pathlib import Path

import pytest
from checkpoint import save_tiny_checkpoint
from typer.testing import CliRunner

from kvretain import models
from kvretain.commands import app
from kvretain.evidence import runner

pytest.importorskip("pyarrow")
from pyarrow import parquet


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def run(*arguments, **options):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], **options)


SMALL = ("--length", 300, "--following", 8, "--n", 2, "--ratios", "0.5,0.9", "--policies", "knorm,knorm+hub")


def test_help_teaches():
    result = run("--help")
    assert result.exit_code == 0
    assert "kvretain eval" in result.stdout


def test_it_writes_rows_and_a_summary(checkpoint, tmp_path):
    out = tmp_path / "out"
    arguments = ("-m", checkpoint, *SMALL, "--tasks", "single,continuation", "--scopes", "head,layer", "--out", out)
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    cases = 1 + 2 * (2 + 4)
    rows = parquet.read_table(out / "rows.parquet").to_pylist()
    assert len(rows) == 2 * 2 * cases
    page = (out / "summary.md").read_text(encoding="utf-8")
    assert page in result.stdout and "4 examples measured now" in result.stdout
    for text in ("## single", "## continuation", "`knorm+hub@layer`", "`streaming`", "paired by example", checkpoint):
        assert text in page
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert len(summary["cells"]) == 2 * cases and len(summary["differences"]) == 2 * 2 * 2
    assert summary["command"].startswith("kvretain ") and summary["torch"] and summary["seed"] == 0
    # Once more: nothing is left to do and nothing changes.
    again = run(*arguments)
    assert again.exit_code == 0
    assert (out / "summary.md").read_text(encoding="utf-8") == page
    assert "0 examples measured now" in again.stdout


def test_report_makes_the_tables_again_without_a_model(checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "out"
    result = run("-m", checkpoint, *SMALL, "--tasks", "single,continuation", "--limit", 3, "--out", out)
    assert result.exit_code == 0, result.output
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    for name in ("summary.md", "summary.json", "rows.parquet"):
        (out / name).unlink()
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    again = CliRunner().invoke(app, ["report", str(out)])
    assert again.exit_code == 0, again.output
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    page = (out / "summary.md").read_text(encoding="utf-8")
    assert page in again.stdout and "the selector) adds, KL" in page and "Bonferroni" in page
    as_json = json.loads(CliRunner().invoke(app, ["report", str(out), "--json"]).stdout)
    assert as_json["rows"] == 3 * 9 and as_json["command"].startswith("kvretain ")


def test_report_compares_two_policies_and_writes_nothing(checkpoint, tmp_path):
    out = tmp_path / "out"
    run("-m", checkpoint, *SMALL, "--out", out, "--policies", "knorm,knorm+hub", "--n", 3)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    summary = json.loads(before["summary.json"])
    arguments = ["report", str(out), "--compare"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "knorm+hub,knorm", "--json"]).stdout)["differences"]
    known = [cell for cell in summary["differences"] if cell["policy"] == "knorm+hub"]
    assert found and [line["nll"] for line in found] == [cell["nll"] for cell in known]
    turned = json.loads(CliRunner().invoke(app, [*arguments, "knorm,knorm+hub", "--json"]).stdout)["differences"]
    assert [-line["nll"]["mean"] for line in turned] == pytest.approx([line["nll"]["mean"] for line in found])
    page = CliRunner().invoke(app, [*arguments, "knorm, random"])
    assert page.exit_code == 0 and "`knorm` minus `random`, paired by example" in page.stdout
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    for pair, words in (
        ("knorm", "two policies, A,B, not 1"),
        ("knorm,keydiff", "holds no policy 'keydiff'; it holds full,"),
    ):
        refused = CliRunner().invoke(app, [*arguments, pair])
        assert refused.exit_code == 2 and words in refused.stderr and "Traceback" not in refused.output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "holds no evaluation"),
        (lambda folder: (folder / "run.json").write_text('{"identity": {}, "command": ""}'), "measured nothing yet"),
    ],
    ids=["no evaluation", "no rows"],
)
def test_report_without_rows_is_one_line_and_code_2(make, message, tmp_path):
    make(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2 and result.stdout == ""
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", result.stderr)
    assert {path.name for path in tmp_path.iterdir()} <= {"run.json"}


def test_json_and_limit(checkpoint, tmp_path):
    arguments = ("-m", checkpoint, *SMALL, "--out", tmp_path / "out", "--limit", 1, "--json")
    first = json.loads(run(*arguments).stdout)
    assert (first["examples_left"], first["rows"]) == (1, 1 + 2 * 4)
    second = json.loads(run(*arguments).stdout)
    assert (second["examples_left"], second["rows"]) == (0, 2 * (1 + 2 * 4))
    assert {cell["n"] for cell in second["cells"]} == {2}


def test_skip_takes_another_part_of_the_series(checkpoint, tmp_path):
    arguments = ("-m", checkpoint, *SMALL, "--json")
    run(*arguments, "--out", tmp_path / "a", "--n", 3)
    run(*arguments, "--out", tmp_path / "b", "--n", 1, "--skip", 2)
    (part,) = (tmp_path / "b" / "parts").iterdir()
    other = tmp_path / "a" / "parts" / part.name
    rows = [parquet.read_table(p).drop_columns(["seconds", "prefill_seconds"]) for p in (part, other)]
    assert rows[0].to_pylist() == rows[1].to_pylist() and rows[0].num_rows == 9


def test_depth_is_kept_to_and_binds_a_folder(checkpoint, tmp_path, monkeypatch):
    seen, build = [], runner.build_needle

    def spy(*arguments, **options):
        seen.append(build(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(runner, "build_needle", spy)
    arguments = ("-m", checkpoint, *SMALL, "--no-generate", "--out", tmp_path / "out")
    assert run(*arguments, "--depth", "0.5,0.9", "--n", 3).exit_code == 0
    for example in seen:
        assert example.context.index("One of the special") > 0.4 * len(example.context)
    assert len(seen) == 3
    result = run(*arguments, "--depth", "0,0.5")
    assert result.exit_code == 2 and "another depth ([0.5, 0.9] there, [0.0, 0.5] now)" in result.stderr


def test_aware_and_a_text_of_ones_own(checkpoint, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("The Walrus keeps the key in Oslo. The Carpenter has none. " * 60, encoding="utf-8")
    rows = {}
    for mode in ("--aware", "--blind"):
        result = run("-m", checkpoint, *SMALL, "--text", text, mode, "--no-generate", "--out", tmp_path / mode[2:])
        assert result.exit_code == 0, result.output
        rows[mode] = parquet.read_table(tmp_path / mode[2:] / "rows.parquet").to_pylist()
    lengths = [{row["context_tokens"] for row in rows[mode]} for mode in ("--aware", "--blind")]
    assert min(lengths[0]) > max(lengths[1])


def test_texts_through_a_budget(checkpoint, tmp_path):
    options = ("--length", 200, "--following", 24, "--passages", 3, "--chunk", 32, "--every", 8, "--n", 2)
    arguments = ("-m", checkpoint, *options, "--tasks", "stream-single,decode", "--budgets", "24,48")
    result = run(*arguments, "--policies", "keydiff,keydiff/diverse", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    for text in ("## stream-single", "## decode", "| removed | policy | n | mean cache (peak) | KL | NLL |"):
        assert text in page
    assert "| all but 24 | `keydiff` | 6 | " in page and "| all but 48 | `keydiff` | 2 | " in page
    assert "| policy | n | all but 24 | all but 48 |" in page and "≠" not in page
    run_file = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert (run_file["ratios"], run_file["budgets"]) == ([], [24, 48])
    assert [run_file["identity"][name] for name in ("chunk", "every", "passages")] == [32, 8, 3]
    # More sizes come into the same folder, ratios too.
    more = run(
        *arguments, "--policies", "keydiff", "--ratios", "0.5", "--limit", 1, "--json", "--out", tmp_path / "out"
    )
    cells = json.loads(more.stdout)["cells"]
    assert {(cell["ratio"], cell["budget"]) for cell in cells} == {(None, None), (None, 24), (None, 48), (0.5, None)}
    result = run(*arguments, "--every", 16, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "another every (8 there, 16 now)" in result.stderr


def test_svamp(checkpoint, tmp_path):
    path = tmp_path / "svamp.jsonl"
    row = {"Body": "Ann has 3 figs.", "Question": "How many?", "Equation": "( 1.0 + 2.0 )", "Answer": 3.0}
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(120)), encoding="utf-8")
    result = run("-m", checkpoint, *SMALL, "--tasks", "svamp", "--data", path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "## svamp" in result.stdout
    path.write_text(path.read_text() + "\n")
    other = run("-m", checkpoint, *SMALL, "--tasks", "svamp", "--data", path, "--out", tmp_path / "out")
    assert other.exit_code == 2 and "holds results of svamp on other data" in other.stderr


BAD = [
    (("--tasks", "haystack"), "unknown task 'haystack'; valid: single, "),
    (("--tasks", "single,,words"), "--tasks has an empty item"),
    (("--tasks", "svamp"), "needs --data"),
    (("--tasks", "svamp", "--data", "FOLDER/none"), "No such file"),
    (("--tasks", "svamp", "--data", "TEXT"), "line 1: no SVAMP row"),
    (("--policies", "nonsense"), "unknown scorer 'nonsense'"),
    (("--policies", "snapkv(widow=3,kernel=5),knorm"), "takes no 'widow'"),
    (("--scopes", "planet"), "unknown scope 'planet'"),
    (("--ratios", "half"), "--ratios: 'half' is not a number"),
    (("--ratios", "0.5,1"), r"a number in \[0, 1\), not 1.0"),
    (("--budgets", "64.5"), "--budgets: '64.5' is not a whole number"),
    (("--budgets", "64,0"), "budget is a whole number of at least 1, not 0"),
    (("--budgets", "64", "--every", "0"), "every is a whole number of at least 1, not 0"),
    (("--depth", "0.5"), r"--depth wants two numbers such as 0,0.5, not '0.5'"),
    (("--depth", "0,half"), r"--depth wants two numbers such as 0,0.5, not '0,half'"),
    (("--depth", "0.6,0.4"), r"--depth wants two shares in order, within \[0, 1\], not '0.6,0.4'"),
    (("--depth", "0,nan"), r"--depth wants two shares in order, within \[0, 1\], not '0,nan'"),
    (("--depth", "-0.1,1"), r"--depth wants two shares in order, within \[0, 1\], not '-0.1,1'"),
    (("--text", "FOLDER/none"), "No such file"),
    (("--text", "BINARY"), "is not UTF-8"),
    (("-m", "./nowhere"), "no model at './nowhere'"),
    (("--dtype", "int8"), "unknown dtype"),
    (("--out", "FOLDER"), "is not empty and holds no evaluation"),
    (("--out", "TEXT"), "is a file"),
    (("-m", "CHECKPOINT", "--length", "5"), "5 tokens leave no room"),
    (("-m", "CHECKPOINT", "--length", "90000"), "too few for contexts"),
    (("-m", "CHECKPOINT", "--length", "60", "--tasks", "tracking"), "60 tokens leave no room"),
    (("-m", "CHECKPOINT", "--length", "40", "--tasks", "words"), "40 tokens leave no room for a list"),
    (
        ("-m", "CHECKPOINT", "--length", "8", "--following", "4", "--tasks", "continuation", "--policies", "snapkv"),
        r"snapkv values what stands before its window of 8 tokens, but only 8 .* snapkv\(window=2\)",
    ),
    (("--policies", "snapkv+hub(kernel=4)"), "kernel must be an odd whole number of at least 1, not 4"),
    (("-m", "CHECKPOINT", "--length", "90000", "--tasks", "continuation"), "a continuation needs 90,257"),
    (("-m", "CHECKPOINT", "--tasks", "decode"), "enough for 0 examples of 8 passages of 1,281, so there is no"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_code_2(arguments, message, tmp_path, checkpoint, monkeypatch):
    if "CHECKPOINT" not in arguments:
        monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    (tmp_path / "text").write_text("Tea is served.\n", encoding="utf-8")
    places = {"TEXT": tmp_path / "text", "FOLDER": tmp_path, "BINARY": tmp_path / "binary", "CHECKPOINT": checkpoint}
    places["FOLDER/none"] = tmp_path / "none"
    result = run("--out", tmp_path / "out", *(places.get(a, a) for a in arguments))
    assert result.exit_code == 2
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", result.stderr), result.stderr
    assert result.stdout == ""


def test_another_setting_in_the_same_folder_is_refused(checkpoint, tmp_path):
    assert run("-m", checkpoint, *SMALL, "--out", tmp_path / "out").exit_code == 0
    result = run("-m", checkpoint, *SMALL, "--seed", 3, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "another seed (0 there, 3 now): use another folder" in " ".join(result.stderr.split())


def test_a_folder_without_results_binds_nothing(checkpoint, tmp_path):
    arguments = ("-m", checkpoint, "--policies", "knorm", "--ratios", "0.5", "--n", 1, "--out", tmp_path / "out")
    assert run(*arguments, "--length", 5).exit_code == 2
    assert run(*arguments, "--length", 300).exit_code == 0


def test_a_log_has_a_line_an_example(checkpoint, tmp_path):
    result = run("-m", checkpoint, *SMALL, "--out", tmp_path / "out")
    lines = result.stderr.splitlines()
    assert len(lines) == 2 and "single 1 is done, 2 of 2 examples" in lines[1] and "about 0 s left" in lines[1]


def test_usage_errors():
    for arguments in ((), ("--out", "x", "--n", "0"), ("--out", "x", "--workers", "none")):
        result = run(*arguments)
        assert result.exit_code == 2 and "Usage" in result.stderr
        assert not Path("x").exists()
