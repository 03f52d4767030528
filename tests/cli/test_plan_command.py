"""``kvretain plan`` on a tiny checkpoint."""

import json

import pytest
from checkpoint import save_tiny_checkpoint
from typer.testing import CliRunner

from kvretain.commands import app


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    for weights in folder.glob("*.safetensors"):
        weights.unlink()  # the configuration must do
    return str(folder)


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_json(checkpoint):
    result = run("-m", checkpoint, "-c", 1000, "-b", 64, "-b", 32, "--batch", 3, "--memory", "1GiB", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    full, small, large = plan["per_sequence"]
    assert (full["budget"], small["budget"], large["budget"]) == (None, 32, 64)
    assert small["decoding"] * 1000 == full["decoding"] * (32 + 128)
    assert small["batch"] == (2**30 - plan["weights"]) // small["peak"]
    assert plan["fits"] == [True, True, True] and plan["layers"]["sliding"] == 0


def test_table(checkpoint):
    result = run("-m", checkpoint, "--batch", 2, "--memory", "1GiB", "--chunk", 256)
    assert result.exit_code == 0, result.output
    assert "budget 4,096" in result.stdout and "passes of 256 tokens" in " ".join(result.stdout.split())


def test_full_has_one_row(checkpoint):
    [row] = json.loads(run("-m", checkpoint, "-p", "full", "-b", 64, "--json").stdout)["per_sequence"]
    assert row["budget"] is None
    printed = " ".join(run("-m", checkpoint, "-p", "full", "-b", 64).stdout.split())
    assert "keeps everything, whatever the budget" in printed and "budget 64" not in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--memory", "lots"], "such as 24GiB"),
        (["--policy", "nonsense"], "nonsense"),
        (["--dtype", "int3"], "unknown dtype"),
        (["-m", "./no/such/model"], "there is no model at"),
    ],
)
def test_bad_input_is_one_line(checkpoint, arguments, message):
    result = run("-m", checkpoint, *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.split()), result.output
    assert "Traceback" not in result.output
