"""When decoding evicts: both triggers as exact lists of steps, their mean cache, and a protected prompt."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvretain import RetentionCache
from kvretain.cache.budget import Budget

from .models import distinct, forward, left_padded, tokens
from .oracle import Turn, held, play


def run(net, prompt: int, decode: int, policy: str = "knorm", **options) -> RetentionCache:
    cache = RetentionCache.for_model(net, policy, **options)
    play(net, cache, [Turn(tokens(33, 1, prompt), decode=decode)])
    cache.check_integrity()
    return cache


def lengths(cache: RetentionCache) -> list[float]:
    return [step.kept[0] for step in cache.trace]


# Budget 8, every 4. The prompt's pass comes first; numbers are entries kept after each pass.
STEPS = [
    ("slack", 20, [8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8]),  # whatever the prompt's length
    ("slack", 22, [8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8]),
    ("periodic", 20, [8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10, 11, 8]),  # at 24, 28 and 32 tokens seen
    ("periodic", 22, [8, 9, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9, 10]),  # at 24, 28 and 32, too
    ("slack", 3, [3, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 10, 11]),
    ("periodic", 3, [3, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 10, 11]),  # 8 of 8 tokens seen fit; 12 do not
    ("periodic", 9, [8, 9, 10, 8, 9, 10, 11, 8, 9, 10, 11, 8, 9]),
]


@pytest.mark.parametrize(("trigger", "prompt", "kept"), STEPS)
def test_steps_of_both_triggers(llama, trigger, prompt, kept) -> None:
    cache = run(llama, prompt, len(kept) - 1, budget=8, every=4, trigger=trigger)
    assert lengths(cache) == kept
    assert [step.seen for step in cache.trace] == [prompt + step for step in range(len(kept))]
    evicts = [before + 1 > after for before, after in pairwise(kept)]
    assert [any(step.evicted) for step in cache.trace] == [prompt > 8, *evicts]


def test_slack_is_the_default(llama) -> None:
    assert lengths(run(llama, 22, 12, budget=8, every=4)) == STEPS[1][2]


@pytest.mark.parametrize("policy", ["knorm@shared", "knorm@head(layers='pyramid', beta=2)", "keydiff@model"])
@pytest.mark.parametrize("trigger", ["slack", "periodic"])
def test_heads_of_unequal_lengths_evict_at_the_same_steps(llama, policy, trigger) -> None:
    (kept,) = (kept for name, prompt, kept in STEPS if (name, prompt) == (trigger, 22))
    cache = run(llama, 22, len(kept) - 1, policy, budget=8, every=4, trigger=trigger)
    assert [sum(step.kept) / len(step.kept) for step in cache.trace] == kept


@pytest.mark.parametrize("trigger", ["slack", "periodic"])
@pytest.mark.parametrize("every", [1, 4, 16])
def test_the_mean_cache_of_a_long_run(llama, trigger, every) -> None:
    """``budget + (every - 1) / 2``, and never more than ``budget + every`` in storage: whole cycles after the first."""
    cache = run(llama, 30, 2 + every * 12, budget=8, every=every, trigger=trigger)
    steps = list(cache.trace)
    first = next(i for i, step in enumerate(steps) if step.tokens == 1 and any(step.evicted))
    cycles = (len(steps) - first) // every
    kept = [step.kept[0] for step in steps[first : first + cycles * every]]
    assert cycles >= 11 and sum(kept) / len(kept) == 8 + (every - 1) / 2
    assert cache.trace.peak_length == 8 + every - 1
    entry = sum(t.shape[1] * t.shape[3] * t.element_size() for t in (cache.layers[0].keys, cache.layers[0].values))
    assert max(step.nbytes[0] for step in steps) <= (8 + every) * entry


def test_the_period_counts_columns_of_a_padded_batch(llama) -> None:
    """One storage for all rows: they evict together, and a row equals a solo run that has seen as many columns."""
    rows = [distinct(1, 24), distinct(2, 20)]
    ids, mask = left_padded(rows)
    cache = RetentionCache.for_model(llama, "knorm", budget=8, every=4, trigger="periodic")
    steps = play(llama, cache, [Turn(ids, mask, decode=9)])
    assert [step.after[0].shape[-1] for step in steps] == [8, 9, 10, 11, 8, 9, 10, 11, 8, 9]
    solo = RetentionCache.for_model(llama, "knorm", budget=8, every=4, trigger="periodic")
    alone = play(llama, solo, [Turn(rows[1][None], decode=9)])
    for batch, single in zip(steps, alone, strict=True):
        torch.testing.assert_close(batch.logits[1, -1], single.logits[0, -1], atol=1e-4, rtol=0)


def test_a_ratio_with_periods(llama) -> None:
    cache = run(llama, 20, 8, ratio=0.5, every=4, trigger="periodic")
    assert lengths(cache) == [10, 11, 12, 13, 12, 13, 14, 15, 14]


@pytest.mark.parametrize("trigger", ["exact", "Slack", None, 1])
def test_unknown_triggers(trigger) -> None:
    with pytest.raises(ValueError, match=r"trigger is one of 'slack', 'periodic', not"):
        Budget(8, None, trigger=trigger)


# --- a protected prompt ---------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", ["slack", "periodic"])
@pytest.mark.parametrize("policy", ["random", "rkv", "h2o", "lagkv", "keydiff@model", "streaming"])
def test_a_protected_prompt_stays_and_the_rest_shares_what_is_left(llama, policy, trigger) -> None:
    options = {"budget": 16, "every": 4, "trigger": trigger}
    for prompt in (12, 15):
        cache = run(llama, prompt, 21, policy, **options, protect_prompt=True)
        for positions in held(cache).values():
            assert (positions[..., :prompt] == torch.arange(prompt)).all()
        assert min(lengths(cache)[5:]) == 16 and cache.trace.evictions >= 4
    free = run(llama, 15, 21, policy, **options)
    # Streaming keeps 4 sinks without protection, random a sample: the prompt competes.
    assert all(positions[..., :15].amax() > 14 for positions in held(free).values())


@pytest.mark.parametrize(("prompt", "budget"), [(8, 8), (20, 8), (9, 8)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_prompt_that_fills_the_budget_is_refused_before_anything_is_generated(llama, prompt, budget, padded) -> None:
    """Longer: at the prefill. As long: at the first generated token, since all that follows would be dropped."""
    cache = RetentionCache.for_model(llama, "random", budget=budget, every=4, protect_prompt=True)
    rows = [tokens(1, prompt), tokens(2, prompt - 3)] if padded else [tokens(1, prompt)]
    ids, mask = left_padded(rows)
    with pytest.raises(ValueError, match=rf"{prompt} .*prompt|prompt of {prompt} ") as error:
        forward(llama, ids, cache, mask=mask)
        assert cache.get_seq_length() == prompt
        forward(llama, ids[:, :1], cache, mask=torch.cat([mask, mask.new_ones(len(rows), 1)], 1))
    message = str(error.value)
    assert f"budget of {budget} entries" in message and "raise the budget" in message
    assert "protect_prompt=False" in message
    assert cache.get_seq_length() == (prompt if prompt == budget else 0)  # the refusal changed nothing
    cache.check_integrity()


def test_a_protected_prompt_in_chunks_counts_whole(llama) -> None:
    cache = RetentionCache.for_model(llama, "random", budget=8, every=4, protect_prompt=True)
    forward(llama, tokens(1, 1, 6), cache)
    with pytest.raises(ValueError, match=r"11 protected entries \(prompt tokens .* budget of 8"):
        forward(llama, tokens(2, 1, 5), cache)


def test_protection_ends_with_the_first_prompt(llama) -> None:
    """A second turn competes."""
    cache = RetentionCache.for_model(llama, "streaming", budget=8, every=4, protect_prompt=True)
    play(llama, cache, [Turn(tokens(1, 1, 5), decode=2), Turn(tokens(2, 1, 9), decode=1)])
    for positions in held(cache).values():
        assert positions[0, 0].tolist() == [0, 1, 2, 3, 4, 13, 14, 15, 16]
