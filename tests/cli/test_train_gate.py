"""``kvretain train-gate`` on a tiny random checkpoint: it makes the gate that the policy then finds."""

import json
import os
import signal

import pytest
from checkpoint import save_tiny_checkpoint
from typer.testing import CliRunner

from kvretain import distil, models
from kvretain.commands import app


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "cache"))


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def train(checkpoint, *arguments):
    return run("train-gate", "-m", checkpoint, "--tokens", 600, "--context", 200, "--steps", 4, *arguments)


def test_help_teaches():
    result = run("train-gate", "--help")
    assert result.exit_code == 0 and "kvretain train-gate" in result.stdout


def test_the_policy_works_after_it_and_says_so_before(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The Walrus keeps the key in Oslo. " * 20, encoding="utf-8")
    ask = ("ask", "-m", checkpoint, "--context", text, "--question", "Where?", "-p", "fastkvzip", "-r", 0.5)
    refused = run(*ask)
    assert refused.exit_code == 2
    assert f"kvretain train-gate --model {checkpoint}" in refused.stderr.replace("\n", "")
    made = train(checkpoint)
    assert made.exit_code == 0
    for words in ("tokens, 2 layers", "held out: loss", "rank correlation with KVzip", "kept in"):
        assert words in made.stdout
    assert run(*ask).exit_code == 0


def test_json_and_a_file_of_ones_own(checkpoint, tmp_path):
    path = tmp_path / "deep" / "mine.safetensors"
    result = train(checkpoint, "--out", path, "--json", "--seed", 3)
    record = json.loads(result.stdout)
    assert record["path"] == str(path) and path.is_file()
    assert record["metadata"]["seed"] == "3" and record["metadata"]["steps"] == "4"
    assert not (tmp_path / "cache").exists()
    policy = f"fastkvzip(gate={str(path)!r})"
    assert (
        run("generate", "-m", checkpoint, "--prompt", "Alice", "-p", policy, "-b", 8, "--max-new-tokens", 3).exit_code
        == 0
    )


def test_ctrl_c_while_training_keeps_what_was_learnt(checkpoint, monkeypatch):
    real = distil._loss

    def pressing(*arguments):
        if not pressed:
            pressed.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    pressed: list[int] = []
    monkeypatch.setattr(distil, "_loss", pressing)
    before = signal.getsignal(signal.SIGINT)
    result = train(checkpoint)
    assert result.exit_code == 0, result.output
    assert "stopped after 1 of 4 steps" in result.stdout and "kept in" in result.stdout
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_anything_was_learnt_says_that_nothing_is_written(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(distil, "_read", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    result = train(checkpoint)
    assert result.exit_code == 130 and "interrupted: no gate was written" in result.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "."), "is a folder"),
        (("--out", __file__ + "/g.safetensors"), "test_train_gate.py is not a folder"),
        (("--out", "/dev/null"), "--out /dev/null is a device"),
        (("--text", "no-such-file"), "no-such-file"),
        (("--tokens", 100), "Invalid value for '--tokens'"),
        (("--context", 3), "Invalid value for '--context'"),
    ],
)
def test_bad_input(checkpoint, arguments, words, monkeypatch):
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    result = train(checkpoint, *arguments)
    assert result.exit_code == 2 and words in result.stderr.replace("\n", " ")


def test_a_cache_folder_that_cannot_be_is_found_before_training(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    result = train(checkpoint)
    assert result.exit_code == 2 and "kvretain's cache folder" in result.stderr and "is not a folder" in result.stderr


def test_a_file_of_any_name_serves(checkpoint, tmp_path):
    assert train(checkpoint, "--out", tmp_path / "mine.pt").exit_code == 0
    policy = f"fastkvzip(gate={str(tmp_path / 'mine.pt')!r})"
    result = run("generate", "-m", checkpoint, "--prompt", "Alice", "-p", policy, "-b", 8, "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
