"""Files of RULER (Hsieh et al. 2024, arXiv 2404.06654), as NVIDIA's ``prepare.py`` writes them.

A row has ``input``, ``outputs`` and, from newer versions, ``answer_prefix``. What comes after the last line break of
``input`` is the question, all before it the context. Metrics and lengths of replies are RULER's.

Make the files with ``--model_template_type base``: the chat template is put around the prompt here, and the answer's
prefix after it.
"""

from __future__ import annotations

from typing import Any

from .benchmark import Benchmark
from .example import Written
from .metrics import Metric
from .rows import HUB, checked, digest, find, from_file, text, texts

NAMES = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
MOST = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Tokens of a reply, by the first part of a task's name."""


def load(name: str, data: str) -> Benchmark:
    """A task from ``NAME/validation.jsonl`` or ``NAME.jsonl`` in the folder ``data``, or a file.

    Raises:
        ValueError: no such file, a row that lacks a field (names the line), or the hub, which has no RULER files.
    """
    if data == HUB:
        raise ValueError(
            f"ruler:{name} is made for a tokenizer and a length by RULER's own scripts and not on the hub: run its "
            "scripts/data/prepare.py and give --data with the folder"
        )
    path = find(data, (f"{name}/validation.jsonl", f"{name}.jsonl"), f"ruler:{name}")
    rows = []
    for row in checked(from_file(path), ("input", "outputs"), "a row of RULER", str(path)):
        context, line_break, question = text(row, "input").rpartition("\n")
        if not context.strip() or not question.strip():
            raise ValueError(
                f"{row['place']}: input does not end with a question on a line of its own: make the file with "
                "--model_template_type base and without --remove_newline_tab"
            )
        opening = text(row, "answer_prefix") if row.get("answer_prefix") is not None else ""
        rows.append((context + line_break, question, opening, texts(row, "outputs")))
    family = name.partition("_")[0]
    metric = Metric("match_part" if family == "qa" else "match_all")

    def make(index: int, tokenizer: Any, length: int, seed: int) -> Written:
        context, question, opening, outputs = rows[index]
        tokens = len(tokenizer(context + question + opening, add_special_tokens=False)["input_ids"])
        if tokens > length:
            raise ValueError(
                f"example {index} of ruler:{name} has {tokens:,} tokens, more than --length {length:,}, and cutting it "
                f"could remove what is asked for: raise --length"
            )
        target = " " + (outputs[0] if family == "qa" else ", ".join(outputs))
        return Written(
            f"ruler:{name}", index, context, question, opening, outputs, target, most=MOST[family], metric=metric
        )

    return Benchmark(f"ruler:{name}", str(path), digest(rows), len(rows), make)
