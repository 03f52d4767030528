"""Where the units of a study are worked off: a process with a loaded model. And the engines that run many of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from typing import Any

import torch

from ..answer import Prompt, Sampling, answer, build_prompt
from ..artefacts import digest, fingerprint
from ..cache import RetentionCache
from ..cache.layer import RetentionLayer
from ..lab import vocabulary
from ..models import load_model
from ..policy import Policy
from ..scores import Random
from ..tasks.example import Source
from ..tasks.needles import build_needle
from .grading import Verdict
from .measure import Case, policy_of
from .plan import Plan
from .replay import forward
from .stream import measure_streamed
from .together import write_together
from .units import Record, Unit
from .workloads import Chains, Recall

ENGINES = ("local", "ray")


class Station:
    """Works off units of a plan, with one model in memory at a time.

    Args:
        plan: the study's.
        rank: which of several stations this is; on a machine with several GPUs they take turns, unless the plan names
            a device.
        threads: CPU threads.
    """

    def __init__(self, plan: Plan, rank: int = 0, threads: int = 1) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.plan, self.rank = plan, rank
        self._name: str | None = None
        self.model: Any = None
        self.tokenizer: Any = None
        self._weights = ""

    def _load(self, name: str) -> None:
        if name == self._name:
            return
        device = self.plan.device
        if device is None and torch.cuda.device_count() > 1:
            device = f"cuda:{self.rank % torch.cuda.device_count()}"
        self._name = self.model = self.tokenizer = None  # frees the previous one first
        self.__dict__.pop("source", None)
        self.model, self.tokenizer = load_model(name, dtype=self.plan.dtype, device=device)
        self._name, self._weights = name, fingerprint(self.model)

    @cached_property
    def source(self) -> Source:
        """The text of streamed recall, as the current model counts it."""
        assert isinstance(self.plan.workload, Recall)
        return Source(self.plan.workload.read_text(), self.tokenizer)

    def work(self, units: Sequence[Unit]) -> list[Record]:
        """Runs units that differ in problem and sample alone, see :func:`grouped`.

        Raises:
            ValueError: a problem that does not fit the model or the budget; names the unit.
        """
        one = units[0]
        self._load(one.model)
        began = time.perf_counter()
        try:
            artefact = self._artefact(one)
            if isinstance(self.plan.workload, Recall):
                found = [self._recall(unit) for unit in units]
            elif len(units) == 1:
                found = [self._written(one)]
            else:
                found = self._written_together(units)
        except ValueError as error:
            problems = ", ".join(repr(unit.problem.id) for unit in units[:3])
            where = f"{one.model}, {one.policy} at budget {one.budget}, problem {problems}"
            raise ValueError(f"{where}: {error}") from error
        spent, now = (time.perf_counter() - began) / len(units), time.time()
        return [
            Record(
                key=unit.key,
                model=unit.model,
                policy=unit.policy,
                budget=unit.budget,
                problem=unit.problem.id,
                sample=unit.sample,
                seconds=spent,
                finished=now,
                weights=self._weights,
                artefact=artefact,
                **about,
            )
            for unit, about in zip(units, found, strict=True)
        ]

    def _recall(self, unit: Unit) -> dict[str, Any]:
        task = self.plan.workload
        assert isinstance(task, Recall)
        depth = task.depth[0], task.depth[1]
        index = unit.problem.index
        made = build_needle(self.source, task.task, index, tokens=task.length, seed=task.seed, depth=depth)
        case = Case(unit.policy, budget=unit.budget)
        (row,) = measure_streamed(
            self.model,
            self.tokenizer,
            made,
            [case],
            chunk=task.chunk,
            every=unit.cache.every,
            summary=unit.cache.summary,
        )
        verdict = str(Verdict.RIGHT if row.exact else Verdict.WRONG)
        return {
            "verdict": verdict,
            "exact": verdict,
            "nll": row.nll,
            "mean_cache": row.mean_cache,
            "peak_cache": row.peak_cache,
            "prefill_cache": row.kept,
            "tokens": 0,
            "reply": row.reply,
        }

    def _prepared(self, unit: Unit) -> tuple[Prompt, Sampling, int]:
        """Prompt, how tokens are drawn, and how many there may be."""
        task, problem = self.plan.workload, unit.problem
        assert not isinstance(task, Recall)
        if isinstance(task, Chains):
            vocabulary.check(self.tokenizer, self.model.config.vocab_size, unit.model)
        sampling = task.sampling
        prompt = build_prompt(self.tokenizer, task.prompt_of(problem), raw=not task.chat)
        room = sampling.max_length - len(prompt)
        if room < 1:
            raise ValueError(f"the prompt of {len(prompt)} tokens fills max_length={sampling.max_length}")
        seed = sampling.seed_of(unit.sample, problem.index)
        return prompt, Sampling(sampling.temperature, sampling.top_p, seed=seed), room

    def _cache(self, unit: Unit) -> RetentionCache:
        policy = policy_of(Case(unit.policy, budget=unit.budget), unit.problem.index)
        names = ("every", "trigger", "sinks", "recent", "protect_prompt")
        arguments = {name: getattr(unit.cache, name) for name in names}
        return RetentionCache.for_model(self.model, policy, budget=unit.budget, **arguments)

    def _artefact(self, unit: Unit) -> str:
        """The digest of the calibration or gate that the cache of ``unit`` reads, see :class:`Record`.

        A default one lies in the user's cache folder, where the plan's own hashes do not see it change.
        """
        if not Policy.parse(unit.policy).needs & {"calibration", "hidden"}:
            return ""
        tensors: list[torch.Tensor] = []
        for layer in self._cache(unit).layers:
            if isinstance(layer, RetentionLayer):
                tensors += layer.calibration or ()
                tensors += layer.gate.state_dict().values() if layer.gate is not None else ()
        return digest(tensors)

    def _written(self, unit: Unit) -> dict[str, Any]:
        prompt, drawn, room = self._prepared(unit)
        cache = self._cache(unit)
        reply = answer(self.model, self.tokenizer, prompt, cache, max_new_tokens=room, sampling=drawn)
        sizes = {"mean_cache": reply.mean_kept, "peak_cache": float(reply.peak_kept), "prefill_cache": reply.kept}
        return sizes | self._graded(unit, prompt, reply.text, reply.new_tokens, room)

    def _written_together(self, units: Sequence[Unit]) -> list[dict[str, Any]]:
        """As :meth:`_written`, for prompts of one length."""
        prompts, drawn, rooms = zip(*(self._prepared(unit) for unit in units), strict=True)
        ids, cache = torch.cat([prompt.ids for prompt in prompts]), self._cache(units[0])
        replies = write_together(self.model, self.tokenizer, ids, cache, room=min(rooms), samplings=drawn)
        found = []
        for unit, prompt, reply in zip(units, prompts, replies, strict=True):
            text = self.tokenizer.decode(reply.tokens, skip_special_tokens=True)
            sizes = {"mean_cache": reply.mean, "peak_cache": float(reply.peak), "prefill_cache": reply.kept}
            found.append(sizes | self._graded(unit, prompt, text, len(reply.tokens), min(rooms)))
        return found

    def _graded(self, unit: Unit, prompt: Prompt, text: str, tokens: int, room: int) -> dict[str, Any]:
        task = self.plan.workload
        assert not isinstance(task, Recall)
        # A prompt that opens a thought has the model close it.
        opened = "<think>" if self.tokenizer.decode(prompt.ids[0]).rstrip().endswith("<think>") else ""
        verdict, exact = task.grade(opened + text, unit.problem.answer, cut_off=tokens >= room)
        return {
            "verdict": str(verdict),
            "exact": str(exact),
            "nll": self._likelihood(prompt.ids[0].tolist(), text) if task.proxy else None,
            "tokens": tokens,
            "reply": text,
        }

    def _likelihood(self, prompt: list[int], reply: str, chunk: int = 256) -> float | None:
        """Mean negative log-likelihood of ``reply`` after ``prompt`` under a full cache, nats per token."""
        written = self.tokenizer(reply, add_special_tokens=False)["input_ids"]
        if not written:
            return None
        cache, ids, total = RetentionCache.for_model(self.model, "full"), prompt + written, 0.0
        for start in range(0, len(ids) - 1, chunk):
            fed = ids[start : min(start + chunk, len(ids) - 1)]
            logits = forward(self.model, fed, cache)
            first = max(len(prompt) - 1 - start, 0)  # predictions before it are of the prompt
            if first < len(fed):
                targets = torch.tensor(ids[start + first + 1 : start + len(fed) + 1], device=logits.device)
                total += torch.nn.functional.cross_entropy(logits[first:], targets, reduction="sum").item()
        return total / len(written)


def grouped(plan: Plan, units: Sequence[Unit]) -> list[list[Unit]]:
    """Units in groups that a station works off at once, model by model: as many runs of one arm, with prompts of one
    length, as the workload's ``together`` says, otherwise one."""
    order = {model: place for place, model in enumerate(plan.models)}
    size = getattr(plan.workload, "together", 1)
    arms: dict[Any, list[Unit]] = {}
    for unit in sorted(units, key=lambda unit: order[unit.model]):
        policy = Policy.parse(unit.policy).scorer
        # A policy that draws does so anew for each problem, which rows of one cache cannot.
        alone = unit.key if isinstance(policy, Random) else ""
        length = len(unit.problem.question.split()) if size > 1 else 0  # words are the animals' tokens
        arms.setdefault((unit.model, unit.policy, unit.budget, unit.cache, length, alone), []).append(unit)
    return [arm[at : at + size] for arm in arms.values() for at in range(0, len(arm), size)]


def run(
    plan: Plan, units: Sequence[Unit], *, engine: str = "local", workers: int = 1, threads: int = 1
) -> Iterator[Record]:
    """Works off ``units`` and yields each record as it is there; the caller keeps it.

    Units are handed out model by model, so that a worker loads each model once.

    Args:
        plan: the study's.
        units: what is to be done.
        engine: ``local`` processes, or actors of a ``ray`` cluster (``RAY_ADDRESS``, or one on this machine).
        workers: how many; one local worker is this process.
        threads: CPU threads of each.

    Raises:
        ImportError: ``ray`` is asked for and not installed.
        RuntimeError: a worker died.
        ValueError: an unknown engine, or what :meth:`Station.work` refuses.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; valid: {', '.join(ENGINES)}")
    groups = grouped(plan, units)
    workers = min(workers, len(groups))
    if not groups:
        return
    if engine == "ray":
        yield from _ray(plan, groups, workers, threads)
    elif workers == 1:
        station = Station(plan, threads=threads)
        for group in groups:
            yield from station.work(group)
    else:
        yield from _processes(plan, groups, workers, threads)


def _processes(plan: Plan, groups: Sequence[list[Unit]], workers: int, threads: int) -> Iterator[Record]:
    spawn = multiprocessing.get_context("spawn")
    arguments = (plan, spawn.Value("i", 0), threads)
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start, initargs=arguments) as pool:
        # Workers inherit that Ctrl-C is ignored: it reaches this process, which then ends them.
        before, interrupt = set(multiprocessing.active_children()), signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            pending = {pool.submit(_work, group) for group in groups}
        finally:
            signal.signal(signal.SIGINT, interrupt)
        started = set(multiprocessing.active_children()) - before
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process died (out of memory?); what is stored is kept, and the same command goes on"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                process.terminate()
            raise


_station: list[Station] = []


def _start(plan: Plan, count: Any, threads: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        # A killed parent cannot end its workers: they end themselves.
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    with count.get_lock():
        rank, count.value = count.value, count.value + 1
    _station.append(Station(plan, rank, threads))


def _work(units: list[Unit]) -> list[Record]:
    return _station[0].work(units)


def _ray(plan: Plan, groups: Sequence[list[Unit]], workers: int, threads: int) -> Iterator[Record]:
    try:
        import ray
    except ImportError:
        raise ImportError('--engine ray needs ray: pip install "kvretain[ray]"') from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    # An actor takes one GPU where the cluster has any, and one CPU slot otherwise.
    gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
    actor: Any = ray.remote(num_cpus=threads, num_gpus=gpus)(Station)
    stations = [actor.remote(plan, rank=0 if gpus else rank, threads=threads) for rank in range(workers)]
    left = iter(groups)
    pending = {station.work.remote(group): station for station, group in zip(stations, left, strict=False)}
    try:
        while pending:
            (ready,), _ = ray.wait(list(pending), num_returns=1)
            station = pending.pop(ready)
            if (following := next(left, None)) is not None:
                pending[station.work.remote(following)] = station
            yield from ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(
            f"a Ray actor died ({error}); what is stored is kept, and the same command goes on"
        ) from None
    finally:
        for station in stations:
            ray.kill(station)
