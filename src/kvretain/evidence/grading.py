"""Grades a reply to a mathematical problem: four verdicts, by equivalence or by exact string."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple


class Verdict(StrEnum):
    """What became of one generation.

    ``NO_ANSWER`` and ``CUT_OFF`` both mean that there is no final answer: the model stopped by itself without one
    (extraction collapse), or the limit on length ended it. Neither is right, but neither shows wrong reasoning.
    """

    RIGHT = "right"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    CUT_OFF = "cut_off"


_TOKEN = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def final_answer(text: str) -> str | None:
    r"""What stands in the last complete ``\boxed{...}`` or ``\fbox{...}`` of ``text``, None if there is none.

    Thoughts do not count: only what follows the last ``</think>`` is read, and of that only what precedes a
    ``<think>`` that is not closed. Empty boxes do not count either, nor do boxes without their closing brace. Of nested
    boxes the outermost is taken, without a box around the whole of it.

    Example:
        >>> final_answer(r"<think>\boxed{1}</think> First \boxed{2}, so \boxed{\frac{3}{4}}.")
        '\\frac{3}{4}'
    """
    reply = text.rpartition("</think>")[2].partition("<think>")[0]
    opened: list[tuple[int, int] | None] = []
    closed: _Box | None = None
    for token in _TOKEN.finditer(reply):
        if token["box"]:
            opened.append(token.span())
        elif token["open"]:
            opened.append(None)
        elif token["close"] and opened and (begin := opened.pop()):
            start, end = _trimmed(reply, begin[1], token.start())
            if start == end:
                continue
            if closed and (closed.begin, closed.end) == (start, end):
                start, end = closed.content
            closed = _Box(begin[0], (start, end), token.end())
    return reply[slice(*closed.content)] if closed else None


class _Box(NamedTuple):
    """Where a box and its content lie in a text."""

    begin: int
    content: tuple[int, int]
    end: int


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """The span without blanks at its ends."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _without_answer(cut_off: bool) -> Verdict:
    return Verdict.CUT_OFF if cut_off else Verdict.NO_ANSWER


def _checked(text: str, truth: str) -> None:
    for name, value in (("text", text), ("truth", truth)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    if not truth.strip():
        raise ValueError("truth is empty: there is nothing to grade against")


def grade_exact(text: str, truth: str, *, cut_off: bool = False) -> Verdict:
    r"""Like :func:`grade`, but an answer is right only if it is ``truth`` character by character, blanks around it
    aside.

    Example:
        >>> grade_exact(r"\boxed{0.5}", r"\frac{1}{2}"), grade_exact(r"\boxed{0.5}", "0.5")
        (<Verdict.WRONG: 'wrong'>, <Verdict.RIGHT: 'right'>)
    """
    _checked(text, truth)
    answer = final_answer(text)
    if answer is None:
        return _without_answer(cut_off)
    return Verdict.RIGHT if answer == truth.strip() else Verdict.WRONG


def grade(text: str, truth: str, *, cut_off: bool = False, seconds: float = 5.0) -> Verdict:
    r"""Whether the final answer of ``text`` is equivalent to ``truth``.

    The answer is the last box outside thoughts, see :func:`final_answer`. Equivalence is decided by ``math-verify``
    with sympy: fractions, roots, sets, intervals, matrices, units, percentages; decimals agree if they round to the
    same six places. A comparison that is not done in time, or breaks, counts as wrong and warns.

    A generation that hit its limit is still graded by the answer it has given; ``cut_off`` only tells the two verdicts
    without an answer apart.

    The work is done in a process of its own, started at the first call and kept: a comparison that hangs, even in C
    code, can be ended there, in any thread. Text is parsed by a grammar and not evaluated as Python; only what that
    grammar took for a number literal is handed on to sympy as text.

    Args:
        text: what the model wrote. If the prompt ended with ``<think>``, put that in front of it.
        truth: the right answer in LaTeX, without a box.
        cut_off: whether generation hit its limit.
        seconds: CPU time that a comparison may take; the wall clock ends it after six times that.

    Raises:
        ImportError: ``math-verify`` is not installed.
        TypeError: ``text`` or ``truth`` is no string.
        ValueError: ``truth`` is empty, or ``seconds`` is not positive.

    Example:
        >>> grade(r"So it is \boxed{0.5}.", r"\frac{1}{2}")
        <Verdict.RIGHT: 'right'>
        >>> grade("Let me think", "7", cut_off=True)
        <Verdict.CUT_OFF: 'cut_off'>
    """
    _checked(text, truth)
    if not seconds > 0:
        raise ValueError(f"seconds must be positive, not {seconds}")
    answer = final_answer(text)
    if answer is None:
        return _without_answer(cut_off)
    truth = truth.strip()
    return Verdict.RIGHT if answer == truth or _judge.equal(answer, truth, seconds) else Verdict.WRONG


INSTALL = 'grading needs math-verify: pip install "kvretain[study]"'


class _Judge:
    """Owns the process that compares answers; one comparison at a time."""

    START_SECONDS = 120

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, answer: str, truth: str, seconds: float) -> bool:
        with self._lock:
            try:
                if self._process and self._process.poll() is not None:
                    self._end()  # killed from outside since the last comparison
                process = self._process or self._start()
                request = json.dumps({"answer": answer, "truth": truth, "seconds": seconds})
                reply = self._ask(process, request.encode() + b"\n", 6 * seconds)
            except BaseException:
                # Whatever interrupted this, the process may still owe a reply that nobody would read.
                self._end()
                raise
            if reply is None:
                self._end()
                warnings.warn(
                    f"graded as wrong, because the comparison of {answer[:80]!r} with {truth[:80]!r} was not done in "
                    f"{seconds:g} s or broke",
                    RuntimeWarning,
                    stacklevel=3,
                )
                return False
            return bool(reply["equal"])

    def _start(self) -> subprocess.Popen[bytes]:
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(INSTALL)
        script = Path(__file__).with_name("judge.py")
        # -P keeps this folder, whose modules it does not need, off the path.
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the caller, who decides
        )
        greeting = self._ask(process, b"", self.START_SECONDS)
        if greeting is None or greeting["error"]:
            reason = greeting["error"] if greeting else f"no sign of life, exit status {process.poll()}"
            raise ImportError(f"{INSTALL} (its process did not start: {reason})")
        return process

    @staticmethod
    def _ask(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> dict[str, Any] | None:
        """The reply to ``request``, None if the process ended before it, at the latest after ``seconds``."""
        assert process.stdin is not None and process.stdout is not None
        limit = threading.Timer(seconds, process.kill)
        limit.daemon = True
        limit.start()
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            limit.cancel()
        return json.loads(line) if line.endswith(b"\n") else None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()


_judge = _Judge()


def _fresh_judge() -> None:
    global _judge
    _judge = _Judge()


atexit.register(lambda: _judge._end())
if hasattr(os, "register_at_fork"):
    # A forked child must not talk into its parent's pipes.
    os.register_at_fork(after_in_child=_fresh_judge)
