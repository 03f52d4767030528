"""What the commands share: places that can be written, and errors of the system in one line."""

import errno
import os
import re
import sys
from pathlib import Path

import pytest
import typer
from checkpoint import save_tiny_checkpoint
from typer.testing import CliRunner

from kvretain import models
from kvretain.commands import app
from kvretain.commands.shared import check_device, check_place, clear_errors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


# Places


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("name", ["new", "a/b/new", "there"])
def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path, name, folder):
    there = tmp_path / "there"
    there.mkdir() if folder else there.write_bytes(b"kept")
    check_place(tmp_path / name, folder=folder)
    assert list(tmp_path.rglob("*")) == [there]
    assert folder or there.read_bytes() == b"kept"


def test_a_place_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("g.safetensors", "a/g.safetensors"):
        check_place(Path(name))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "folder", "words"),
    [
        ("file", True, "--out FOLDER/file is not a folder"),
        ("file/sub", True, "--out FOLDER/file/sub cannot be written: FOLDER/file is not a folder"),
        ("file/a/b", False, "--out FOLDER/file/a/b cannot be written: FOLDER/file is not a folder"),
        (".", False, "--out FOLDER is a folder; it must be a file"),
        ("/dev/null", False, "--out /dev/null is a device; it must be a file"),
        ("x" * 300, False, f"--out FOLDER/{'x' * 300} cannot be written: {os.strerror(errno.ENAMETOOLONG)}"),
    ],
)
def test_a_place_that_cannot_be_written(tmp_path, name, folder, words):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError) as caught:
        check_place(tmp_path / name, folder=folder)
    assert str(caught.value).startswith(words.replace("FOLDER", str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_is_opened_and_written_may_be_a_device_or_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "page.html").write_text("kept")
    for place in (Path("/dev/null"), tmp_path / "pipe", tmp_path / "page.html", tmp_path / "new" / "page.html"):
        check_place(place, streamed=True)
    assert (tmp_path / "page.html").read_text() == "kept" and not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="is a folder; it must be a file"):
        check_place(tmp_path, streamed=True)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_folder_that_takes_no_files():
    with pytest.raises(ValueError, match=r"--out /proc/g.safetensors cannot be written: .* \(/proc\)"):
        check_place(Path("/proc/g.safetensors"))


COMMANDS = {
    "observe": ("observe", "--out"),
    "calibrate": ("calibrate", "--out"),
    "calibrate-plot": ("calibrate", "--plot"),
    "train-gate": ("train-gate", "--out"),
    "eval": ("eval", "--n", 1, "--length", 300, "--out"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_look_at_the_place_before_they_load_a_model(name, checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "file").touch()
    command, *more = COMMANDS[name]
    place = tmp_path / "file" / ("new.safetensors" if name == "calibrate" else "new.png")
    result = run(command, "-m", checkpoint, *more, place)
    assert f"error: {more[-1]} {place} cannot be written: {place.parent} is not a folder\n" == result.stderr
    assert (result.exit_code, result.stdout) == (2, "")


def test_folders_that_no_model_is_loaded_for(tmp_path):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "new"
    result = run("lab", "train", "--minutes", 0, "--out", place)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: --out {place} cannot be written: {place.parent} is not a folder\n"
    plan = Path(__file__).parents[2] / "plans" / "recall-cpu.toml"
    result = run("study", "init", plan, "--out", place)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: the study's folder {place} cannot be written: {place.parent} is not a folder\n"


# Devices, and prompts that are protected


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "xla", ""])
def test_a_device_that_is_not_there(device, checkpoint):
    result = run("generate", "-m", checkpoint, "--prompt", "Hi", "-b", 8, "--device", device)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: --device {device}: torch finds no such device here, only cpu")
    assert result.stderr.count("\n") == 1


def test_eval_asks_for_the_device_before_it_starts_workers(checkpoint, tmp_path):
    result = run("eval", "-m", checkpoint, "--n", 1, "--device", "tpu", "--out", tmp_path / "results")
    assert result.exit_code == 2 and result.stderr.startswith("error: --device tpu: torch finds no such device here")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", "auto"])
def test_devices_that_are_there(device):
    check_device(device)


LONG = "Off with her head! " * 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "--prompt", LONG, "-b", 16), "protected entries .* budget of 16"),
        (("generate", "--prompt", LONG, "-b", "TOKENS", "--raw"), "fills the budget"),
        (("view",), "1000 protected entries .* budget of 256"),
        (("view", "--tokens", 40, "-b", 40, "--policies", "full,knorm"), "fills the budget of 40"),
    ],
)
def test_a_prompt_that_the_budget_does_not_hold_is_refused_before_a_model_is_loaded(
    arguments, words, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    tokens = len(models.load_tokenizer(checkpoint)(LONG.strip())["input_ids"])
    monkeypatch.chdir(tmp_path)
    result = run(*(tokens if a == "TOKENS" else a for a in arguments), "-m", checkpoint, "--protect-prompt")
    assert result.exit_code == 2 and re.fullmatch(rf"error: [^\n]*{words}[^\n]*\n", result.stderr), result.stderr


@pytest.mark.parametrize(("budget", "new"), [("MORE", 3), ("TOKENS", 1)])
def test_a_protected_prompt_that_fits(budget, new, checkpoint):
    tokens = len(models.load_tokenizer(checkpoint)(LONG.strip())["input_ids"])
    size = tokens + (budget == "MORE")
    arguments = "--prompt", LONG, "--raw", "-b", size, "--recent", 5, "--max-new-tokens", new, "--protect-prompt"
    result = run("generate", "-m", checkpoint, *arguments)
    assert result.exit_code == 0, result.output


# Errors


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("nonsense"), 2, "nonsense"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "f/g"), 2, "Not a directory: f/g"),
        (FileExistsError(errno.EEXIST, "File exists", "f"), 2, "File exists: f"),
        (FileNotFoundError("there is no gate 'g'"), 2, "there is no gate 'g'"),
        (OSError(errno.ENOSPC, "No space left on device", "f"), 1, "No space left on device: f"),
        (OSError(errno.EIO, "Input/output error"), 1, "[Errno 5] Input/output error"),
        (RuntimeError("no network"), 1, "no network"),
    ],
)
def test_errors_are_one_line_with_the_path(error, code, line, capsys):
    with pytest.raises(typer.Exit) as caught, clear_errors():
        raise error
    assert caught.value.exit_code == code and capsys.readouterr().err == f"error: {line}\n"


def test_a_reader_that_has_seen_enough_is_no_error(capsys):
    with pytest.raises(BrokenPipeError), clear_errors():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    assert capsys.readouterr().err == ""
