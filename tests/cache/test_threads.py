"""Several caches on one model, interleaved and in parallel threads: each behaves as if it were alone."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvretain import RetentionCache

from .models import build, forward, left_padded, model, tokens
from .oracle import Step, Turn, held, play

PAIRS = [
    ("snapkv", "h2o"),
    ("snapkv+hub", "snapkv+hub"),
    ("tova", "knorm"),
    ("h2o", "full"),
    ("snapkv", "keydiff@model"),
]
SCRIPTS = (
    [Turn(tokens(1, 1, 24), decode=14), Turn(tokens(2, 1, 6), decode=8)],
    [Turn(*left_padded([tokens(3, 19), tokens(4, 27)]), decode=20)],
)


def make(net, policy: str) -> RetentionCache:
    return RetentionCache.for_model(net, policy, budget=10, every=4)


def same(left: list[Step], right: list[Step]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.logits, b.logits)
        assert all(torch.equal(a.after[layer], b.after[layer]) for layer in b.after)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policies", PAIRS, ids="|".join)
def test_two_caches_interleaved_in_one_thread(name, policies) -> None:
    net = model(name)
    ids = [tokens(5, 1, 20), tokens(6, 2, 26)]
    alone = []
    for policy, prompt in zip(policies, ids, strict=True):
        cache = make(net, policy)
        alone.append([forward(net, part, cache) for part in (prompt, *_decoded(prompt))])
        alone[-1].append(held(cache))
    caches = [make(net, policy) for policy in policies]
    parts = [(prompt, *_decoded(prompt)) for prompt in ids]
    for step in range(len(parts[0])):
        for which in (0, 1) if step % 2 else (1, 0):
            logits = forward(net, parts[which][step], caches[which])
            assert torch.equal(logits, alone[which][step])
    for cache, expected in zip(caches, alone, strict=True):
        assert all(torch.equal(positions, expected[-1][layer]) for layer, positions in held(cache).items())
        cache.check_integrity()


def _decoded(prompt: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tokens(int(prompt.sum()), len(prompt), 16).split(1, 1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policies", PAIRS, ids="|".join)
def test_two_caches_in_two_threads(name, policies) -> None:
    net = model(name)
    alone = [play(net, make(net, policy), script) for policy, script in zip(policies, SCRIPTS, strict=True)]
    caches = [make(net, policy) for policy in policies]
    barrier = threading.Barrier(2)

    def work(which: int) -> list[Step]:
        torch.set_num_threads(1)
        barrier.wait()
        return play(net, caches[which], SCRIPTS[which])

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(work, (0, 1)))
    for run, expected, cache in zip(together, alone, caches, strict=True):
        same(run, expected)
        cache.check_integrity()


def test_caches_are_made_and_dropped_in_many_threads() -> None:
    """The model is tapped while at least one cache needs it, whoever comes and goes meanwhile."""
    net = build("llama")
    implementation = net.config._attn_implementation
    script = [Turn(tokens(7, 1, 20), decode=6)]
    expected = {policy: play(net, make(net, policy), script) for policy in ("snapkv", "h2o", "knorm")}
    gc.collect()
    failures: list[BaseException] = []

    def work(policy: str) -> None:
        try:
            torch.set_num_threads(1)
            for _ in range(6):
                same(play(net, make(net, policy), script), expected[policy])
                gc.collect()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(policy,)) for policy in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    gc.collect()
    assert net.config._attn_implementation == implementation
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
