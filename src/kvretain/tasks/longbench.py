"""LongBench (Bai et al. 2024, arXiv 2308.14508): 21 datasets of long documents, and LongBench-E's 13 (``NAME_e``).

Metrics, lengths of replies and which datasets go without a chat template are those of its scripts. A prompt longer than
asked for is cut in its middle, as there.

Deviations: the prompts are in words of our own, unless LongBench's ``dataset2prompt.json`` lies beside the data; the
prompt is cut where the context is, so that the question always stays whole; ``samsum`` ends at a line break in the text
and not at that token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .benchmark import Benchmark
from .example import Written
from .metrics import Metric
from .rows import HUB, checked, digest, find, from_file, from_hub, text, texts

ARCHIVE = "https://huggingface.co/datasets/THUDM/LongBench/resolve/main/data.zip"
"""All datasets, as LongBench publishes them."""

PROMPTS = "dataset2prompt.json"
"""LongBench's own prompts: an object that maps a dataset to a text with ``{context}`` and ``{input}``."""


@dataclass(frozen=True)
class Dataset:
    """How a dataset is asked and graded.

    Attributes:
        prompt: with ``{context}``, and ``{input}`` where the dataset has one.
        metric: of :data:`~kvretain.tasks.metrics.NAMES`.
        most: tokens of a reply.
        chat: whether a chat template stands around the prompt.
        first_line: only the reply's first line is graded.
        stops: texts that end a reply.
    """

    prompt: str
    metric: str
    most: int
    chat: bool = True
    first_line: bool = False
    stops: tuple[str, ...] = ()


_PASSAGES = (
    "Here are some passages.\n\n{context}\n\nAnswer a question from these passages. Write the answer alone.\n\n"
    "Question: {input}\nAnswer:"
)
DATASETS: dict[str, Dataset] = {
    "narrativeqa": Dataset(
        "Read this story, a novel or a film script.\n\n{context}\n\nAnswer a question about it in as few words as you "
        "can and do not explain.\n\nQuestion: {input}\n\nAnswer:",
        "f1", 128,
    ),
    "qasper": Dataset(
        "Read this scientific article.\n\n{context}\n\nAnswer a question about it in a phrase or a sentence and do not "
        'explain. Write "unanswerable" if the article does not tell. A question that wants a yes or a no gets "yes", '
        '"no" or "unanswerable".\n\nQuestion: {input}\n\nAnswer:',
        "f1", 128,
    ),
    "multifieldqa_en": Dataset(
        "Read this text.\n\n{context}\n\nAnswer a question about it. Write the answer alone.\n\n"
        "Question: {input}\nAnswer:",
        "f1", 64,
    ),
    "multifieldqa_zh": Dataset(
        "请先读这篇文章。\n\n{context}\n\n请根据文章用中文回答问题，只写答案本身。\n\n问题：{input}\n回答：",
        "f1_chinese", 64,
    ),
    "hotpotqa": Dataset(_PASSAGES, "f1", 32),
    "2wikimqa": Dataset(_PASSAGES, "f1", 32),
    "musique": Dataset(_PASSAGES, "f1", 32),
    "dureader": Dataset(
        "下面有几篇文章。\n\n{context}\n\n请根据这些文章回答问题。\n\n问题：{input}\n回答：", "rouge_l_chinese", 128
    ),
    "gov_report": Dataset(
        "Here is a government agency's report.\n\n{context}\n\nSum it up in about a page.\n\nSummary:", "rouge_l", 512
    ),
    "qmsum": Dataset(
        "Here is what was said at a meeting.\n\n{context}\n\nAnswer this query about the meeting in one sentence or a "
        "few.\n\nQuery: {input}\nAnswer:",
        "rouge_l", 512,
    ),
    "multi_news": Dataset(
        "Here are several news articles.\n\n{context}\n\nSum up all of them together in about a page.\n\nSummary:",
        "rouge_l", 512,
    ),
    "vcsum": Dataset("下面是一次会议的记录。\n\n{context}\n\n请总结这次会议的内容。\n\n总结：", "rouge_l_chinese", 512),
    "trec": Dataset(
        "Name the type of the last question, as the examples do.\n\n{context}\n{input}",
        "classification", 64, chat=False, first_line=True,
    ),
    "triviaqa": Dataset(
        "Answer the last question from its passage, as the examples do. Write the answer alone.\n\n{context}\n\n"
        "{input}",
        "f1", 32, chat=False, first_line=True,
    ),
    "samsum": Dataset(
        "Sum up the last dialogue in a few short sentences, as the examples do.\n\n{context}\n\n{input}",
        "rouge_l", 128, chat=False, first_line=True, stops=("\n",),
    ),
    "lsht": Dataset(
        "请仿照例子，给出最后一条新闻的类别。\n\n{context}\n{input}",
        "classification", 64, chat=False, first_line=True,
    ),
    "passage_count": Dataset(
        "Below are paragraphs from Wikipedia; some stand there more than once.\n\n{context}\n\nHow many different "
        "paragraphs are there? Write the number alone.\n\nNumber:",
        "count", 32,
    ),
    "passage_retrieval_en": Dataset(
        "Below are 30 numbered paragraphs from Wikipedia.\n\n{context}\n\nThis abstract is of one of them:\n\n{input}"
        '\n\nOf which? Answer in the form "Paragraph 1".\n\nAnswer:',
        "retrieval", 32,
    ),
    "passage_retrieval_zh": Dataset(
        "下面是一些编了号的段落。\n\n{context}\n\n这段摘要概括了其中一段：\n\n{input}\n\n是哪一段？请照“段落1”的样子回答。"
        "\n\n答案：",
        "retrieval", 32,
    ),
    "lcc": Dataset("Continue this program.\n{context}Next line:\n", "edit_similarity", 64, chat=False),
    "repobench-p": Dataset("Continue this program.\n{context}{input}Next line:\n", "edit_similarity", 64, chat=False),
}  # fmt: skip
UNIFORM = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
    "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
"""The datasets that LongBench-E has too."""
NAMES = (*DATASETS, *(f"{name}_e" for name in UNIFORM))


def load(name: str, data: str) -> Benchmark:
    """A dataset from ``NAME.jsonl`` in the folder ``data`` (or its subfolder ``data``), a file, or the hub.

    Raises:
        ImportError: the hub is asked for without ``datasets``.
        ValueError: no such file, or a row that lacks a field (names the line).
    """
    about = DATASETS[name.removesuffix("_e")]
    fields = ("input", "context", "answers") + (("all_classes",) if about.metric == "classification" else ())
    if data == HUB:
        source, prompt = ARCHIVE, about.prompt
        found = from_hub("json", data_files={"test": f"zip://data/{name}.jsonl::{ARCHIVE}"}, split="test")
    else:
        path = find(data, (f"{name}.jsonl", f"data/{name}.jsonl"), f"longbench:{name}")
        source, prompt, found = str(path), _own_prompt(path, name) or about.prompt, from_file(path)
    rows = [_row(row, about) for row in checked(found, fields, "a row of LongBench", source)]

    def make(index: int, tokenizer: Any, length: int, seed: int) -> Written:
        row = rows[index]
        before, _, after = prompt.partition("{context}")
        question = after.replace("{input}", row["input"])
        context = cut_middle(before.replace("{input}", row["input"]) + row["context"], question, tokenizer, length)
        metric = Metric(about.metric, row["classes"], about.first_line)
        answers = row["answers"]
        return Written(
            f"longbench:{name}", index, context, question, "", answers, f" {answers[0]}", raw=not about.chat,
            most=about.most, stops=about.stops, metric=metric,
        )  # fmt: skip

    grader = ("jieba", "longbench") if about.metric.endswith("_chinese") else None
    return Benchmark(f"longbench:{name}", source, digest(prompt, rows), len(rows), make, grader)


def _row(row: Mapping[str, Any], about: Dataset) -> dict[str, Any]:
    made = {"input": text(row, "input"), "context": text(row, "context"), "answers": texts(row, "answers")}
    return made | {"classes": texts(row, "all_classes") if about.metric == "classification" else ()}


def _own_prompt(path: Path, name: str) -> str | None:
    """LongBench's prompt, if its file lies beside the data.

    Raises:
        ValueError: the file has no usable prompt for the dataset.
    """
    file = path.with_name(PROMPTS)
    if not file.is_file():
        return None
    try:
        prompt = json.loads(file.read_text(encoding="utf-8"))[name.removesuffix("_e")]
    except (ValueError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or prompt.count("{context}") != 1 or prompt.endswith("{context}"):
        raise ValueError(f"{file} maps {name.removesuffix('_e')!r} to no text with words after one {{context}}")
    return prompt


def cut_middle(context: str, question: str, tokenizer: Any, length: int) -> str:
    """``context`` without its middle, if it and ``question`` have more than ``length`` tokens together: of the whole,
    the first and the last ``length // 2`` tokens stay.

    Raises:
        ValueError: the question alone fills the second half.
    """

    def ids(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False)["input_ids"])

    tokens, asked, half = ids(context), len(ids(question)), length // 2
    if len(tokens) + asked <= length:
        return context
    if asked >= half:
        raise ValueError(f"half of {length} tokens leaves no context beside a question of {asked}: raise --length")
    kept = tokens[:half], tokens[asked - half :]
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in kept)
