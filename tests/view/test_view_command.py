"""``kvretain view`` on a tiny checkpoint: the page that it writes, and every bad input."""

import json
import re
import sys

import pytest
from checkpoint import save_tiny_checkpoint
from typer.testing import CliRunner

from kvretain.commands import app
from kvretain.data import chapter


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def run(*arguments, **options):
    return CliRunner().invoke(app, ["view", *(str(a) for a in arguments)], **options)


def data_of(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])


def test_alone_it_shows_hubkv_beside_snapkv(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kvretain", "view", "--model", checkpoint])
    result = run("--model", checkpoint)
    assert result.exit_code == 0, result.output
    assert re.search(r"snapkv +128 +4 +287\.0", result.stdout) and "kvretain-view.html" in result.stdout
    page = tmp_path / "kvretain-view.html"
    shown = data_of(page)
    assert [found["policy"] for found in shown["runs"]] == ["snapkv", "snapkv+hub"]
    assert (
        len(shown["prompt"]["ids"]) == 1000
        and "".join(shown["prompt"]["pieces"]) == chapter()[: len("".join(shown["prompt"]["pieces"]))]
    )
    assert [e["step"] for e in shown["runs"][0]["evictions"]] == [0, 32, 64, 96]
    text = page.read_text(encoding="utf-8")
    assert (
        "(Alice, chapter VII)" in text
        and "256 entries per head" in text
        and f"kvretain view --model {checkpoint}" in text
    )


def test_options_reach_the_runs_and_json_tells_them(checkpoint, tmp_path):
    book, page = tmp_path / "book.txt", tmp_path / "shown.html"
    book.write_text("The Walrus <keeps> the key in Oslo. " * 20, encoding="utf-8")
    result = run(
        "-m", checkpoint, "--file", book, "--policies", "snapkv(window=4,kernel=3),adakv,full", "--ratio", 0.5,
        "--generate", 10, "--every", 4, "--tokens", 80, "--out", page, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["page"] == str(page) and told["ratio"] == 0.5 and told["budget"] is None and told["tokens"] == 80
    assert [found["policy"] for found in told["runs"]] == ["snapkv(window=4,kernel=3)", "adakv", "full"]
    first, _, whole = told["runs"]
    assert whole["evictions"] == 0 and whole["kept_at_end"] == 80 + 9
    assert first["evictions"] > 1 and first["kept_at_end"] < 50 and first["new_tokens"] == 10
    assert whole["cache_bytes_at_end"] > first["cache_bytes_at_end"] > 0
    shown = data_of(page)
    assert ["".join(found["pieces"]) for found in shown["runs"]] == [found["written"] for found in told["runs"]]
    assert "book.txt" in page.read_text(encoding="utf-8") and "50% of the tokens removed" in page.read_text(
        encoding="utf-8"
    )


def test_help_teaches():
    result = run("--help")
    assert result.exit_code == 0 and "kvretain view --text report.txt" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "nonsense"], "unknown scorer 'nonsense'"),
        (["--policies", "snapkv,,knorm"], "--policies has an empty item"),
        (["--policies", "snapkv,snapkv"], "--policies names one twice: snapkv, snapkv"),
        (["--budget", 9, "--ratio", 0.5], "not budget=9 and ratio=0.5"),
        (["--ratio", 2], r"a number in \[0, 1\), not 2.0"),
        (["--text", "nowhere.txt"], "No such file"),
        (["--text", "-"], "--text - is empty"),
        (["--out", "FOLDER"], "--out .* is a folder"),
        (["--out", f"FOLDER/{'x' * 300}.html"], "--out .* cannot be written: .*too long"),
        (["--out", "FOLDER/none/page.html"], "--out .* is in a folder that is not there"),
        (["--dtype", "int8"], "unknown dtype"),
        (["--model", "./nowhere"], "no model at './nowhere'"),
        (["--tokens", 12, "--budget", 4, "--policies", "snapkv(window=50)"], "snapkv values .* its window of 50"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_code_2(checkpoint, tmp_path, arguments, message):
    given = [str(a).replace("FOLDER", str(tmp_path)) for a in arguments]
    if "--model" not in given:
        given += ["--model", checkpoint]
    result = run(*given, *(() if "--out" in given else ("--out", tmp_path / "page.html")))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    line = result.stderr.strip().splitlines()[-1]
    assert re.match(f"error: .*{message}", line), result.stderr
    assert not (tmp_path / "page.html").exists()
