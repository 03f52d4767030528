"""The process behind :mod:`kvretain.evidence.grading`: compares answers that it reads as lines of JSON.

Run as a script, so that it costs sympy and no torch. Whatever a comparison does, the operating system ends it: CPU time
by a timer whose signal kills, which also works inside C code and after the caller died; memory by a limit.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Any

MEMORY = 2 << 30
"""Bytes of address space."""


def equal(answer: str, truth: str) -> bool:
    """Whether math-verify calls two LaTeX strings equivalent; False for what it cannot handle."""
    from math_verify import LatexExtractionConfig, parse, verify

    # Only LaTeX: its parser is a grammar, of which number literals alone reach sympy as text. Plain expressions would
    # go through Python's eval.
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    truth_parsed, answer_parsed = (
        parse(f"\\boxed{{{latex.rstrip('. ')}}}", config, parsing_timeout=None) for latex in (truth, answer)
    )
    return bool(verify(truth_parsed, answer_parsed, timeout_seconds=None))


def _limit_memory() -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, most))


def _limit_cpu(seconds: float) -> None:
    """Kills this process after so much CPU time; 0 lifts the limit."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Says that it is ready or why not, then answers each line of stdin with one line."""
    # Replies have the pipe for themselves: what a library prints goes nowhere.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    logging.disable(logging.CRITICAL)

    def reply(content: dict[str, Any]) -> None:
        replies.write(json.dumps(content) + "\n")
        replies.flush()

    try:
        equal("1", "1")
    except Exception as error:
        reply({"error": repr(error)})
        return
    _limit_memory()
    reply({"error": None})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit_cpu(request["seconds"])
        try:
            same = equal(request["answer"], request["truth"])
        except Exception:  # such as MemoryError and RecursionError: not shown to be equal
            same = False
        _limit_cpu(0)
        reply({"equal": same})


if __name__ == "__main__":
    main()
