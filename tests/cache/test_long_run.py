"""Thousands of generated tokens under a small budget: flat memory, right at every step, and a complete trace."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from kvretain import RetentionCache

from .models import cache_argument, forward, left_padded, model, tokens
from .oracle import Oracle, Recorder, Step, check_positions, compare, held
from .test_oracle import oracle

BUDGET, EVERY, PROMPT = 128, 128, 50


def live_bytes() -> int:
    """Bytes of every tensor storage alive in this process."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        # Plain ones: what a compiler traced with has no storage. (And isinstance would wake lazy modules.)
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    """Resident memory of this process, or 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


class LongRun:
    """Samples ``count`` tokens after a prompt, and records a step for each *span*: the passes between two evictions.

    Within a span a query sees what was left by the last eviction and everything since, which is what the oracle's
    multi-token step shows it; so replaying spans checks every single pass.
    """

    def __init__(self, name: str, policy: str, count: int, **options) -> None:
        net = model(name)
        self.cache = cache = RetentionCache.for_model(net, policy, budget=BUDGET, **options)
        ids = torch.zeros(1, PROMPT + count, dtype=torch.long)
        ids[:, :PROMPT] = tokens(1, 1, PROMPT)
        rng = torch.Generator().manual_seed(0)
        logits = forward(net, ids[:, :PROMPT], cache)
        self.steps = [Step(ids[:, :PROMPT], torch.ones(1, PROMPT), logits, {}, held(cache))]
        buffer = torch.empty(1, count, logits.shape[-1])
        self.kept, self.nbytes, self.live, self.resident = [cache.layers[-1].kept], [cache.nbytes], [], []
        start = PROMPT
        for seen in range(PROMPT, PROMPT + count):
            ids[0, seen] = torch.multinomial(logits[0, -1].softmax(-1), 1, generator=rng)
            logits = forward(net, ids[:, seen : seen + 1], cache)
            buffer[:, seen - PROMPT] = logits[:, -1]
            self.kept.append(cache.layers[-1].kept)
            self.nbytes.append(cache.nbytes)
            if self.kept[-1] <= self.kept[-2] or seen == PROMPT + count - 1:
                span, mask = ids[:, start : seen + 1], torch.ones(1, seen + 1)
                part = buffer[:, start - PROMPT : seen + 1 - PROMPT]
                self.steps.append(Step(span, mask, part, self.steps[-1].after, held(cache)))
                start = seen + 1
                if self.kept[-1] <= self.kept[-2]:
                    # The recording itself grows: what it holds is taken off.
                    recorded = sum(t.nbytes for step in self.steps for t in (step.mask, *step.after.values()))
                    self.resident.append(resident_bytes() - recorded)
                    if len(self.resident) % max(1, count // (5 * EVERY)) == 0:  # a walk over all objects is slow
                        self.live.append(live_bytes() - recorded)

    def check(self, name: str) -> None:
        cache, passes = self.cache, len(self.kept)
        cache.check_integrity()
        for step in self.steps:
            check_positions(step)
        verdict = compare(oracle(name, torch.float32), self.steps, atol=1e-4)
        assert verdict.evictions == len(self.resident) == cache.trace.evictions

        # Memory: storage is reserved once, and nothing else grows.
        reserved = self.nbytes[1:]
        assert set(reserved) == {reserved[0]} and max(self.kept) == BUDGET + EVERY - 1
        assert len(self.live) >= 4 and set(self.live) == {self.live[0]}, "tensors pile up"

        # The trace: one record per pass, exact, in memory that grows by evictions and not by tokens.
        trace = cache.trace
        assert len(trace) == passes and [step.kept[-1] for step in trace] == self.kept
        assert [step.seen for step in trace] == [PROMPT + i for i in range(passes)]
        assert trace.mean_length == pytest.approx(sum(self.kept) / passes, rel=1e-12)
        assert trace.peak_length == max(self.kept)
        assert len(trace._spans) <= 2 * trace.evictions + 3


@pytest.mark.parametrize(
    ("policy", "trigger", "count"), [("snapkv+hub", "slack", 2000), ("rkv", "periodic", 800)], ids=str
)
def test_thousands_of_tokens(policy, trigger, count) -> None:
    run = LongRun("llama", policy, count, trigger=trigger)
    assert len(run.resident) >= count // EVERY - 1
    run.check("llama")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["keydiff@model", "rkv"])
def test_twenty_thousand_tokens(policy) -> None:
    run = LongRun("llama", policy, 20_000)
    assert len(run.resident) >= 155
    run.check("llama")
    quarter = len(run.resident) // 4
    assert max(run.resident[-quarter:]) - max(run.resident[:quarter]) < 16 * 2**20, "resident memory grows"


def test_the_long_oracle_notices_one_wrong_entry() -> None:
    run = LongRun("llama", "knorm", 350)
    late = run.steps[-1]
    late.before = {layer: positions.clone() for layer, positions in late.before.items()}
    late.before[1][0, 0, 40] += 1 if late.before[1][0, 0, 41] > late.before[1][0, 0, 40] + 1 else -1
    with pytest.raises(AssertionError, match=f"step {len(run.steps) - 1} of .*: logits differ"):
        compare(oracle("llama", torch.float32), run.steps, atol=1e-4)


# --- rows that finish at different times ----------------------------------------------------------


def generate(net, ids, mask, policy: str, count: int, eos: list[int] | None, **options):
    """Greedy ``generate`` under a budget of 24, recorded: new tokens ``(B, T)``, steps, cache."""
    cache = RetentionCache.for_model(net, policy, budget=24, every=8, **options)
    recorder = Recorder(cache, mask)
    out = net.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        logits_processor=[recorder],
        output_logits=True,
        return_dict_in_generate=True,
        **{cache_argument(net): cache},
    )
    cache.check_integrity()
    return out.sequences[:, ids.shape[1] :], recorder.steps(out.logits), cache


def ends(new: torch.Tensor, eos: list[int]) -> list[int]:
    """How many tokens each row has written when it meets ``eos``, that token included."""
    met = torch.isin(new, torch.tensor(eos))
    return [int(row.long().argmax()) + 1 if row.any() else len(row) for row in met]


def staggered(new: torch.Tensor) -> list[int]:
    """A token that the rows of ``new`` write for the first time at very different steps."""
    best = max(new.unique().tolist(), key=lambda token: _spread(ends(new, [token])))
    assert _spread(ends(new, [best])) >= 20, "no token ends the rows at different times"
    return [best]


def _spread(lengths: list[int]) -> int:
    inner = [length for length in lengths if length > 8]
    return max(inner) - min(inner) if len(inner) == len(lengths) and len(set(inner)) == len(inner) else 0


@pytest.mark.parametrize("policy", ["snapkv+hub", "rkv", "lagkv", "keydiff@model"])
def test_rows_that_finish_early_disturb_no_one(llama, policy) -> None:
    """A finished row is fed padding tokens that count as real: its own business. The others equal their solo runs."""
    ids = torch.stack([tokens(seed, 30) for seed in (3, 4, 5)])
    mask, count = torch.ones_like(ids), 90
    eos = staggered(generate(llama, ids, mask, policy, count, None)[0])
    together, steps, cache = generate(llama, ids, mask, policy, count, eos)
    lengths = ends(together, eos)
    assert len(set(lengths)) == 3 and max(lengths) - min(lengths) >= 20
    assert compare(oracle("llama", torch.float32), steps, atol=1e-4).evictions >= 3
    for row, length in enumerate(lengths):
        alone, solo, _ = generate(llama, ids[row : row + 1], mask[:1], policy, count, eos)
        assert alone[0].tolist() == together[row, :length].tolist()
        assert (together[row, length:] == 0).all()
        for batch, single in zip(steps, solo, strict=False):
            torch.testing.assert_close(batch.logits[row, -1], single.logits[0, -1], atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 30 + together.shape[1] - 1


@pytest.mark.parametrize("options", [{}, {"trigger": "periodic"}, {"protect_prompt": True}], ids=str)
def test_padded_rows_that_finish_early(options) -> None:
    """Different prompts: solo runs evict at other steps, so every row of every step is held against the oracle."""
    net = model("qwen3")
    ids, mask = left_padded([tokens(6, 22), tokens(7, 13), tokens(8, 17)])
    eos = staggered(generate(net, ids, mask, "snapkv", 70, None, **options)[0])
    new, steps, _ = generate(net, ids, mask, "snapkv", 70, eos, **options)
    assert len(set(ends(new, eos))) == 3
    reference: Oracle = oracle("qwen3", torch.float32)
    assert compare(reference, steps, atol=1e-4).evictions >= 3
