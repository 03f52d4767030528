"""The released lm-evaluation-harness with our model. `make test-lm-eval` runs this; without the harness it is skipped.

Tasks are YAML files with local JSONL data, the model is a tiny random checkpoint: nothing comes from a hub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from checkpoint import save_tiny_checkpoint

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: see `make test-lm-eval`")

import datasets  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from kvretain import RetentionCache, load_model  # noqa: E402
from kvretain.answer import answer, build_prompt  # noqa: E402
from kvretain.data import chapter  # noqa: E402
from kvretain.integrations import lm_eval as ours  # noqa: E402

GSM8K = next(
    (p / "shared/data/gsm8k/test.jsonl" for p in Path(__file__).resolve().parents if (p / "shared").is_dir()), None
)
NEW = 40
BUDGET, EVERY = 32, 8
LENGTHS = (400, 700, 550, 900, 620)
"""Characters of the contexts; all give more tokens than the budget, in prompts of different lengths."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def tiny(checkpoint):
    return load_model(checkpoint, device="cpu", progress=lambda message: None)


def prompt_of(row):
    return f"{row['context']}\n\nQuestion: {row['question']}\nAnswer:"


def write_task(folder: Path, name: str, rows: list[dict], **settings) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{context}}\n\nQuestion: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["nothing says this"], "max_gen_toks": NEW, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
        "metadata": {"version": 1.0},
        **settings,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


ROWS = [
    {
        "context": chapter()[at * 997 : at * 997 + length].strip(),
        "question": f"Who speaks in part {at}?",
        "answer": "Alice",
    }
    for at, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    write_task(folder, "tea_party", ROWS)
    write_task(
        folder, "tea_choice", ROWS[:2], output_type="multiple_choice", doc_to_choice=["Alice", "Hatter"],
        doc_to_target=0, metric_list=[{"metric": "acc"}], generation_kwargs=None,
    )  # fmt: skip
    return folder


@pytest.fixture(autouse=True)
def _own_data_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def evaluate(checkpoint, tasks, names=("tea_party",), *, batch_size=1, chat=False, **model_args):
    model_args = {"pretrained": checkpoint, **model_args}
    found = lm_eval.simple_evaluate(
        model="kvretain", model_args=model_args, tasks=list(names), batch_size=batch_size, device="cpu",
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False), apply_chat_template=chat,
        bootstrap_iters=0,
    )  # fmt: skip
    return {name: [sample["resps"][0][0] for sample in found["samples"][name]] for name in names}, found["config"]


def own_replies(tiny, policy, rows=ROWS, *, chat=False, **limits):
    """What ``kvretain``'s own function answers, each prompt alone."""
    model, tokenizer = tiny
    replies = []
    for row in rows:
        prompt = build_prompt(tokenizer, prompt_of(row), raw=not chat)
        assert len(prompt) > BUDGET
        cache = RetentionCache.for_model(model, policy, **limits)
        replies.append(answer(model, tokenizer, prompt, cache, max_new_tokens=NEW).text)
    return replies


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", ["knorm", "snapkv+hub@layer", "keydiff/diverse(weight=0.5,centre=True)@model"])
def test_replies_are_those_of_our_own_function_and_memory_is_bounded(checkpoint, tiny, tasks, policy, batch_size):
    limits = {"budget": BUDGET, "every": EVERY}
    replies, config = evaluate(checkpoint, tasks, batch_size=batch_size, policy=policy, **limits)
    assert replies["tea_party"] == own_replies(tiny, policy, **limits)
    held = config["kvretain"]
    assert held["batches"] == -(-len(ROWS) // batch_size)
    assert held["batches"] * NEW / 2 < held["passes"] <= held["batches"] * NEW  # one row ends by itself
    assert held["evictions"] >= held["passes"] / EVERY
    assert BUDGET <= held["mean_cache"] < held["peak_cache"] < BUDGET + EVERY
    heads, width, layers, numbers = 2, 8, 2, 2 * 4  # of the tiny checkpoint; keys and values, float32
    assert held["peak_bytes"] <= batch_size * heads * width * layers * numbers * (BUDGET + EVERY)


def test_a_full_cache_is_the_harness_own_model(checkpoint, tasks):
    replies, config = evaluate(checkpoint, tasks, policy="full", batch_size=2)
    plain = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": checkpoint}, tasks=["tea_party"], batch_size=2, device="cpu",
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False), bootstrap_iters=0,
    )  # fmt: skip
    assert replies["tea_party"] == [sample["resps"][0][0] for sample in plain["samples"]["tea_party"]]
    bounded, _ = evaluate(checkpoint, tasks, policy="knorm", budget=BUDGET, batch_size=2)
    assert config["kvretain"]["evictions"] == 0 and bounded != replies


def test_chat_templates(checkpoint, tiny, tasks):
    replies, _ = evaluate(checkpoint, tasks, chat=True, batch_size=5, policy="knorm", budget=BUDGET, every=EVERY)
    assert replies["tea_party"] == own_replies(tiny, "knorm", chat=True, budget=BUDGET, every=EVERY)
    assert replies["tea_party"] != own_replies(tiny, "knorm", budget=BUDGET, every=EVERY)


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.75},
        {"budget": BUDGET, "sinks": 2, "recent": 7},
        {"budget": 400, "every": EVERY, "protect_prompt": True},
        {"budget": BUDGET, "every": EVERY, "trigger": "periodic"},
    ],
    ids=lambda options: ",".join(options),
)
def test_options_reach_the_cache(checkpoint, tiny, tasks, options):
    replies, config = evaluate(checkpoint, tasks, policy="knorm", scope="layer", **options)
    assert replies["tea_party"] == own_replies(tiny, "knorm@layer", **options)
    assert config["kvretain"]["policy"] == "knorm@layer"
    assert {name: config["kvretain"][name] for name in options} == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 8}, "names no policy"),
        ({"policy": "knorm"}, "give either budget .* or ratio .*, not neither"),
        ({"policy": "knorm", "budget": 8, "ratio": 0.5}, "not budget=8 and ratio=0.5"),
        ({"policy": "nonsense", "budget": 8}, "unknown scorer 'nonsense'"),
        ({"policy": "knorm@layer", "scope": "head", "budget": 8}, "names its scope: leave out scope=head"),
        ({"policy": "knorm", "scope": "planet", "budget": 8}, "unknown scope 'planet'"),
        ({"policy": "knorm", "budget": 8, "every": 0}, "every is a whole number of at least 1"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        ours.RetentionLM("./no/such/model", **options)


def test_likelihoods_are_refused(checkpoint, tasks):
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    ours.check_tasks(manager.load(["tea_party"])["tasks"])
    with pytest.raises(ValueError, match=r"^tea_choice cannot be run with --model kvretain: a bounded cache evicts"):
        ours.check_tasks(manager.load(["tea_party", "tea_choice"])["tasks"])
    model = ours.RetentionLM(checkpoint, policy="knorm", budget=BUDGET, device="cpu")
    for method in (model.loglikelihood, model.loglikelihood_rolling):
        with pytest.raises(NotImplementedError, match="would never evict"):
            method([])


def command(*arguments, home):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    line = [sys.executable, "-m", "kvretain.integrations.lm_eval", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=environment)


@pytest.mark.timeout(1200)  # the harness reads 15,000 task files as it starts, and again for our check
def test_the_command(checkpoint, tiny, tasks, tmp_path):
    options = ("--include_path", tasks, "--device", "cpu", "--output_path", tmp_path / "out", "--log_samples")
    policy = "keydiff/diverse(weight=0.5,centre=True)@model"
    result = command(
        "--model", "kvretain", "--model_args", f"pretrained={checkpoint},policy={policy},budget={BUDGET},every={EVERY}",
        "--tasks", "tea_party", "--batch_size", 5, *options, home=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "tea_party" in result.stdout and "kvretain (" in result.stdout
    (samples,) = (tmp_path / "out").rglob("samples_tea_party_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text(encoding="utf-8").splitlines()), key=lambda row: row["doc_id"])
    assert [row["resps"][0][0] for row in rows] == own_replies(tiny, policy, budget=BUDGET, every=EVERY)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text(encoding="utf-8"))["config"]["kvretain"]["peak_cache"] < BUDGET + EVERY


@pytest.mark.parametrize(
    ("model_args", "names", "message"),
    [
        ("pretrained=./no/such/model,policy=knorm,budget=32", "tea_party,tea_choice", "tea_choice cannot be run"),
        ("pretrained=./no/such/model,policy=knorm", "tea_party", "give either budget"),
    ],
)
@pytest.mark.timeout(1200)
def test_the_command_refuses_before_any_work(model_args, names, message, tasks, tmp_path):
    result = command(
        "--model", "kvretain", "--model_args", model_args, "--tasks", names, "--include_path", tasks, home=tmp_path
    )
    assert result.returncode == 2
    assert f"error: {message}" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.skipif(GSM8K is None or not GSM8K.is_file(), reason="../shared/data/gsm8k is not there")
def test_gsm8k_as_the_harness_defines_it_on_a_local_file(checkpoint, tmp_path):
    """The harness's own YAML; only where its data lies is replaced."""
    lines = GSM8K.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:8]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(lines[8:11]), encoding="utf-8")
    task = {
        "include": str(Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml"),
        "task": "gsm8k_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {part: str(tmp_path / f"{part}.jsonl") for part in ("train", "test")}},
    }
    (tmp_path / "gsm8k_local.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    found = lm_eval.simple_evaluate(
        model="kvretain", model_args={"pretrained": checkpoint, "policy": "knorm", "budget": 128, "every": 32},
        tasks=["gsm8k_local"], batch_size=3, device="cpu", bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )  # fmt: skip
    assert {"exact_match,strict-match", "exact_match,flexible-extract"} <= found["results"]["gsm8k_local"].keys()
    samples = found["samples"]["gsm8k_local"]
    assert all(sample["arguments"][0][0].count("Question:") == 6 for sample in samples)  # five solved, one asked
    held = found["config"]["kvretain"]
    assert held["evictions"] > 1 and held["peak_cache"] < 128 + 32
