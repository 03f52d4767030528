"""LongBench, RULER and GSM8K from small files written by hand: prompts, answers, cutting, and every bad file."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
from checkpoint import tiny_tokenizer

from kvretain.tasks import gsm8k, longbench, ruler
from kvretain.tasks.benchmarks import FAMILIES, is_benchmark, load_benchmark
from kvretain.tasks.example import Written
from kvretain.tasks.longbench import DATASETS, UNIFORM, cut_middle
from kvretain.tasks.metrics import NAMES

GSM8K = next(
    (p / "shared/data/gsm8k/test.jsonl" for p in Path(__file__).resolve().parents if (p / "shared").is_dir()), None
)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def document(index=0, **changes):
    row = {
        "input": f"Who poured the tea in part {index}?",
        "context": "The Hatter poured some hot tea upon its nose. " * 40,
        "answers": ["the Hatter", "Hatter"],
        "length": 400, "dataset": "any", "language": "en", "all_classes": ["Person", "City"], "_id": f"id{index}",
    }  # fmt: skip
    return row | changes


def recall(index=0, **changes):
    row = {
        "index": index,
        "input": "Some special magic numbers are hidden below.\nThe number for tea is 123. The number for jam is 456."
        "\nWhat are all the special magic numbers for tea and jam mentioned in the provided text?",
        "outputs": ["123", "456"], "length": 60,
        "answer_prefix": " The special magic numbers for tea and jam mentioned in the provided text are",
    }  # fmt: skip
    return row | changes


def problem(index=0, **changes):
    row = {
        "question": f"Ann has {index} figs and buys 1,000. How many has she?",
        "answer": f"She has {index}+1000=<<{index}+1000={index + 1000}>>{index + 1000} figs.\n#### {index + 1000:,}",
    }
    return row | changes


def test_longbench_names_and_metrics():
    assert len(DATASETS) == 21 and len(UNIFORM) == 13 and set(UNIFORM) <= DATASETS.keys()
    assert {about.metric for about in DATASETS.values()} <= set(NAMES)
    for name, about in DATASETS.items():
        assert about.prompt.count("{context}") == 1 and not about.prompt.endswith("{context}"), name
    without_input = {name for name, about in DATASETS.items() if "{input}" not in about.prompt}
    assert without_input == {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


def test_a_row_of_longbench(tmp_path, tokenizer):
    rows = [document(0), document(1, context="Short. {not} a field", input="Why {this}?")]
    write(tmp_path / "qasper.jsonl", rows)
    benchmark = load_benchmark("longbench:qasper", str(tmp_path))
    assert benchmark.size == 2
    example = benchmark.example(0, tokenizer, length=10_000)
    assert isinstance(example, Written) and (example.task, example.index, example.most) == ("longbench:qasper", 0, 128)
    assert example.context.startswith("Read this scientific article.\n\nThe Hatter poured")
    assert example.context.endswith(rows[0]["context"])
    assert example.question.endswith("\n\nQuestion: Who poured the tea in part 0?\n\nAnswer:")
    assert (example.answers, example.target) == (("the Hatter", "Hatter"), " the Hatter")
    assert example.metric("It was Hatter", example.answers) == pytest.approx(2 / 4)
    assert not example.raw
    braces = benchmark.example(1, tokenizer, length=10_000)
    assert braces.context.endswith("Short. {not} a field") and "Question: Why {this}?" in braces.question
    with pytest.raises(ValueError, match="longbench:qasper has 2 examples, so there is no example 2"):
        benchmark.example(2, tokenizer, length=10_000)


def test_few_shot_datasets_go_without_a_template_and_stop(tmp_path, tokenizer):
    for name in ("trec", "samsum", "lcc_e"):
        write(tmp_path / "data" / f"{name}.jsonl", [document()])
    trec, samsum, lcc = (
        load_benchmark(f"longbench:{name}", str(tmp_path)).example(0, tokenizer, length=10_000)
        for name in ("trec", "samsum", "lcc_e")
    )
    assert trec.raw and trec.metric.classes == ("Person", "City") and trec.metric.first_line
    assert trec.question == "\nWho poured the tea in part 0?"
    assert (
        samsum.stops == ("\n",)
        and samsum.finished("He poured.\n")
        and samsum.trimmed("He poured.\nDia") == "He poured."
    )
    assert (lcc.task, lcc.question, lcc.trimmed("a\nb")) == ("longbench:lcc_e", "Next line:\n", "a\nb")


def test_longbenchs_own_prompts_are_used_if_they_are_there(tmp_path, tokenizer):
    write(tmp_path / "qasper.jsonl", [document()])
    before = load_benchmark("longbench:qasper", str(tmp_path))
    file = tmp_path / "dataset2prompt.json"
    file.write_text(json.dumps({"qasper": "Article: {context}\nQ: {input}\nA:"}), encoding="utf-8")
    after = load_benchmark("longbench:qasper", str(tmp_path))
    example = after.example(0, tokenizer, length=10_000)
    assert example.context == "Article: " + document()["context"]
    assert example.question == "\nQ: Who poured the tea in part 0?\nA:"
    assert before.digest != after.digest
    for bad in ({}, {"qasper": "no field"}, {"qasper": "{input} {context}"}, {"qasper": 3}, []):
        file.write_text(json.dumps(bad), encoding="utf-8")
        with pytest.raises(ValueError, match=r"dataset2prompt.json maps 'qasper' to no text with words after one"):
            load_benchmark("longbench:qasper", str(tmp_path))


def test_long_prompts_are_cut_in_their_middle_as_longbench_does(tokenizer):
    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    context, question = " ".join(f"word{i}" for i in range(600)), "\n\nQuestion: which?\nAnswer:"
    whole = len(ids(context)) + len(ids(question))
    assert cut_middle(context, question, tokenizer, whole) == context
    for length in (200, 201, whole - 1):
        half = length // 2
        kept = cut_middle(context, question, tokenizer, length) + question
        assert kept == tokenizer.decode(ids(context + question)[:half]) + tokenizer.decode(
            ids(context + question)[-half:]
        )
        assert len(ids(kept)) <= length + 2  # tokens may fall apart where the halves meet
    with pytest.raises(ValueError, match="half of 20 tokens leaves no context beside a question of"):
        cut_middle(context, question, tokenizer, 20)


def test_a_row_of_ruler(tmp_path, tokenizer):
    write(tmp_path / "niah_multiquery" / "validation.jsonl", [recall()])
    write(tmp_path / "qa_1.jsonl", [recall(answer_prefix=None)])
    example = load_benchmark("ruler:niah_multiquery", str(tmp_path)).example(0, tokenizer, length=500)
    assert example.context + example.question + example.opening == recall()["input"] + recall()["answer_prefix"]
    assert example.question.startswith("What are all") and example.context.endswith("456.\n")
    assert (example.most, example.answers, example.target) == (128, ("123", "456"), " 123, 456")
    assert example.metric("123 only", example.answers) == 1 / 2
    qa = load_benchmark("ruler:qa_1", str(tmp_path)).example(0, tokenizer, length=500)
    assert (qa.most, qa.opening, qa.target, qa.metric("123 only", qa.answers)) == (32, "", " 123", 1)
    with pytest.raises(ValueError, match=r"example 0 of ruler:qa_1 has \d+ tokens, more than --length 40, and cutting"):
        load_benchmark("ruler:qa_1", str(tmp_path)).example(0, tokenizer, length=40)


def test_gsm8k_after_solved_problems_of_the_training_file(tmp_path, tokenizer):
    write(tmp_path / "test.jsonl", [problem(i) for i in range(3)])
    write(tmp_path / "train.jsonl", [problem(i) for i in range(100, 120)])
    benchmark = load_benchmark("gsm8k", str(tmp_path))
    assert benchmark.size == 3
    example = benchmark.example(2, tokenizer, length=1)
    assert example.context.count("Question:") == example.context.count(r"Final answer: \boxed{1") == 8
    assert "<<" not in example.context and "####" not in example.context
    assert example.question == "Question: Ann has 2 figs and buys 1,000. How many has she?\n"
    assert (example.answers, example.metric) == (("1002",), None)
    assert example.target == " She has 2+1000=1002 figs.\nFinal answer: \\boxed{1002}"
    assert example.trimmed(example.target + "\n\nQuestion: more") == example.target + "\n\n"
    assert example == benchmark.example(2, tokenizer, length=1) != benchmark.example(2, tokenizer, length=1, seed=1)


def test_gsm8k_without_a_training_file_never_asks_what_it_shows(tmp_path, tokenizer):
    write(tmp_path / "gsm8k" / "test.jsonl", [problem(i) for i in range(120)])
    benchmark = load_benchmark("gsm8k", str(tmp_path))
    examples = [benchmark.example(i, tokenizer, length=1) for i in range(benchmark.size)]
    asked = {example.question for example in examples}
    assert len(asked) == benchmark.size == 20
    assert not any(question in example.context for question in asked for example in examples)


def test_the_same_content_has_the_same_digest_in_any_file(tmp_path):
    rows = [document(i) for i in range(3)]
    first, second = write(tmp_path / "a" / "qasper.jsonl", rows), tmp_path / "b.json"
    second.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    digests = {longbench.load("qasper", str(file)).digest for file in (first, first.parent, second)}
    write(first, [document(0), document(1), document(2, context="Other.")])
    assert len(digests) == 1 and longbench.load("qasper", str(first)).digest not in digests


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("longbench:qasper", [document(), {"input": "a", "context": "b"}],
         r"rows.jsonl, line 2: no answers; a row of LongBench needs input, context, answers"),
        ("longbench:trec", [document(all_classes=None)], "line 1: no all_classes; a row of LongBench needs .*, all_cl"),
        ("longbench:qasper", [document(answers=[])], r"line 1: answers is '\[\]', not a list of texts"),
        ("longbench:qasper", [document(answers="Hatter")], "line 1: answers is 'Hatter', not a list of texts"),
        ("longbench:qasper", [document(context=3)], "line 1: context is '3', not text"),
        ("longbench:qasper", [3], "line 1: a row must be an object with fields, not int"),
        ("longbench:qasper", [], "rows.jsonl has no rows"),
        ("ruler:vt", [recall(), recall(outputs=None)], "line 2: no outputs; a row of RULER needs input, outputs"),
        ("ruler:vt", [recall(input="No line break. What?")], "line 1: input does not end with a question on a line"),
        ("ruler:vt", [recall(input="Ends.\n")], "line 1: input does not end with a question on a line of its own"),
        ("ruler:vt", [recall(answer_prefix=7)], "line 1: answer_prefix is '7', not text"),
        ("gsm8k", [{"question": "How many?"}], "line 1: no answer; a row of GSM8K needs question, answer"),
        ("gsm8k", [problem(answer="5")], "line 1: its answer has no '#### ' with the result behind it"),
        ("gsm8k", [problem(i) for i in range(100)], "100 problems are too few: without a train.jsonl of at least 8"),
    ],
)  # fmt: skip
def test_bad_files_are_named_with_line_and_field(task, rows, message, tmp_path):
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        load_benchmark(task, str(path))


def test_places_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"holds no qasper.jsonl or data/qasper.jsonl, which longbench:qasper reads"):
        load_benchmark("longbench:qasper", str(tmp_path))
    with pytest.raises(ValueError, match=r"nowhere is no file and no folder; ruler:vt reads vt/validation.jsonl or"):
        load_benchmark("ruler:vt", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="the task 'gsm8k' needs --data with its folder or file, or --data hub"):
        load_benchmark("gsm8k", None)
    with pytest.raises(ValueError, match=r"not on the hub: run its scripts/data/prepare\.py"):
        load_benchmark("ruler:vt", "hub")
    (tmp_path / "test.jsonl").write_text('{"question"', encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        load_benchmark("gsm8k", str(tmp_path))


def test_names():
    assert is_benchmark("gsm8k") and is_benchmark("ruler:vt") and is_benchmark("longbench:lcc_e")
    assert not is_benchmark("single") and not is_benchmark("stream-single")
    with pytest.raises(ValueError, match="unknown task 'longbench:narrative'; longbench: is followed by one of narr"):
        is_benchmark("longbench:narrative")
    with pytest.raises(ValueError, match="unknown task 'ruler'; ruler: is followed by one of niah_single_1, "):
        is_benchmark("ruler")
    with pytest.raises(ValueError, match="unknown task 'gsm8k:main'; gsm8k is one task: write gsm8k"):
        is_benchmark("gsm8k:main")
    assert set(FAMILIES) == {"longbench", "ruler", "gsm8k"} and len(ruler.NAMES) == 13


def test_longbench_on_the_hub_is_read_through_datasets(tmp_path, monkeypatch):
    # An archive on the disk stands in for that on the hub: datasets reads it the same way, without a network.
    datasets = pytest.importorskip("datasets")
    rows = [document(i, all_classes=None) for i in range(2)]
    local = write(tmp_path / "qasper.jsonl", rows)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(local, "data/qasper.jsonl")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)  # which refuses archives on the disk too
    monkeypatch.setattr(longbench, "ARCHIVE", str(tmp_path / "data.zip"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    found = load_benchmark("longbench:qasper", "hub")
    assert (found.size, found.digest) == (2, load_benchmark("longbench:qasper", str(local)).digest)


def test_gsm8k_on_the_hub_is_read_through_datasets(tmp_path, tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "repository"
    for split, numbers in (("test", range(3)), ("train", range(50, 60))):
        write(folder / f"{split}.jsonl", [problem(i) for i in numbers])
    about = gsm8k.WORKLOADS["gsm8k"]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(
        gsm8k.WORKLOADS, "gsm8k", type(about)(str(folder), None, "test", about.columns, about.read, about.sampling)
    )
    found, local = load_benchmark("gsm8k", "hub"), load_benchmark("gsm8k", str(folder))
    assert found.digest == local.digest and found.size == 3
    assert found.example(1, tokenizer, length=1) == local.example(1, tokenizer, length=1)


def test_without_datasets_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for task in ("longbench:qasper", "gsm8k"):
        with pytest.raises(ImportError, match=r"kvretain\[hub\].*or give a local file"):
            load_benchmark(task, "hub")


@pytest.mark.skipif(GSM8K is None or not GSM8K.is_file(), reason="../shared/data/gsm8k is not there")
def test_the_real_gsm8k(tokenizer):
    benchmark = load_benchmark("gsm8k", str(GSM8K.parent))
    assert benchmark.size == 1319 - 100
    example = benchmark.example(0, tokenizer, length=1)
    assert example.context.count("Question: ") == 8 and example.answers[0].lstrip("-").replace(".", "").isdigit()
    assert example.target.endswith(f"\\boxed{{{example.answers[0]}}}")
