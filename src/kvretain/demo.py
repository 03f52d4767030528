"""The demo's work: one hidden fact, one prompt, one answer per policy and ratio. No terminal here."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .answer import answer, build_prompt, decode_speed
from .cache import RetentionCache
from .models import load_model
from .tasks.haystack import Haystack, grade

POLICIES = ("full", "random", "streaming", "snapkv", "snapkv+hub")
RATIOS = (0.8, 0.9)


@dataclass(frozen=True)
class Case:
    """One line of the table: a policy, and the fraction removed (None for ``full``)."""

    policy: str
    ratio: float | None


@dataclass(frozen=True)
class Row:
    """A case's result; sizes are those right after the prefill.

    Attributes:
        policy, ratio: the case.
        answer: the first line that the model wrote.
        right: whether it contains the hidden code.
        prompt_tokens: tokens prefilled.
        kept: entries per KV head and layer.
        cache_mib: key and value storage, measured from the tensors.
        decode_tokens_per_second: single-token passes on that cache, prefill excluded.
        seconds: everything for this case.
    """

    policy: str
    ratio: float | None
    answer: str
    right: bool
    prompt_tokens: int
    kept: float
    cache_mib: float
    decode_tokens_per_second: float
    seconds: float


@dataclass(frozen=True)
class Setting:
    """What all cases of a demo share: the model, as arguments of ``load_model``, and the question."""

    haystack: Haystack
    blind: bool
    model: str
    dtype: str | None = None
    device: str | None = None
    threads: int = 1


def cases(policies: Sequence[str], ratios: Sequence[float]) -> list[Case]:
    """Every policy at every ratio; ``full`` once and first, since it removes nothing."""
    whole = [Case("full", None)] if "full" in policies else []
    return whole + [Case(policy, ratio) for ratio in ratios for policy in policies if policy != "full"]


def run_case(model: Any, tokenizer: Any, setting: Setting, case: Case, report: Callable[[float], None]) -> Row:
    """Prefills the haystack under the case's policy, answers, and measures."""
    began = time.perf_counter()
    haystack = setting.haystack
    prompt = build_prompt(tokenizer, haystack.question, context=haystack.context)
    cache = RetentionCache.for_model(model, case.policy, ratio=case.ratio)
    reply = answer(
        model,
        tokenizer,
        prompt,
        cache,
        max_new_tokens=24,
        blind=setting.blind,
        on_prefill=lambda done: report(done / len(prompt)),
    )
    speed = decode_speed(model, cache)
    text = reply.text.strip().partition("\n")[0]
    return Row(
        policy=case.policy,
        ratio=case.ratio,
        answer=text,
        right=grade(text, haystack.answer),
        prompt_tokens=len(prompt),
        kept=reply.kept,
        cache_mib=reply.cache_bytes / 2**20,
        decode_tokens_per_second=speed,
        seconds=time.perf_counter() - began,
    )


def run_cases(
    setting: Setting,
    todo: Sequence[Case],
    *,
    jobs: int,
    report: Callable[[int, float], None],
    loaded: tuple[Any, Any] | None = None,
) -> Iterator[tuple[int, Row]]:
    """Works off ``todo`` and yields ``(index, row)`` as cases finish.

    Args:
        setting: what the cases share.
        todo: the cases.
        jobs: 1 works in this process; more start that many processes, each with its own model.
        report: receives a case's index and the share of its prefill that is done, from 0 to 1.
        loaded: a model and tokenizer to use if ``jobs`` is 1.
    """
    if jobs == 1:
        torch.set_num_threads(setting.threads)
        model, tokenizer = loaded or load_model(setting.model, dtype=setting.dtype, device=setting.device)
        for index, case in enumerate(todo):
            yield index, run_case(model, tokenizer, setting, case, partial(report, index))
        return
    spawn = multiprocessing.get_context("spawn")
    progress = spawn.Queue()
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_start_worker, initargs=(setting, progress)) as pool:
        # Workers inherit that Ctrl-C is ignored: it reaches this process, which then ends them.
        before, interrupt = set(multiprocessing.active_children()), signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            pending = {pool.submit(_work, index, case): index for index, case in enumerate(todo)}
        finally:
            signal.signal(signal.SIGINT, interrupt)
        workers = set(multiprocessing.active_children()) - before
        try:
            while pending:
                with suppress(queue.Empty):
                    report(*progress.get(timeout=0.1))
                for future in [future for future in pending if future.done()]:
                    yield pending.pop(future), future.result()
        except BaseException:
            for worker in workers:
                worker.terminate()
            raise


# A worker process holds one model and takes cases from the pool.

_worker: dict[str, Any] = {}


def _start_worker(setting: Setting, progress: Any) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(setting.threads)
    model, tokenizer = load_model(setting.model, dtype=setting.dtype, device=setting.device)
    _worker.update(model=model, tokenizer=tokenizer, setting=setting, progress=progress)


def _work(index: int, case: Case) -> Row:
    model, tokenizer, setting, progress = (_worker[name] for name in ("model", "tokenizer", "setting", "progress"))
    return run_case(model, tokenizer, setting, case, lambda done: progress.put((index, done)))
