"""The same cells on a CUDA device: against the CPU's oracle, and against the CPU's own choices.

pytest -m gpu tests/cache/test_gpu.py
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import pytest
import torch

from kvretain import RetentionCache, hub_refine, select_diverse, select_topk

from .models import cache_argument, model
from .oracle import Oracle, Step, Turn, compare, play
from .test_oracle import POLICIES, SCRIPTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = ("llama", "qwen3", "gemma3", "gpt_oss")
CELLS = [
    *((policy, "llama", situation) for policy in POLICIES for situation in SCRIPTS),
    *((policy, name, "left-padded ratio") for policy in ("snapkv+hub", "keydiff@model") for name in MODELS[1:]),
]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    """Full float32 products, so that the CPU's oracle binds."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on(device: str, turns: list[Turn]) -> list[Turn]:
    return [
        dataclasses.replace(turn, ids=turn.ids.to(device), mask=None if turn.mask is None else turn.mask.to(device))
        for turn in turns
    ]


def record(name: str, policy: str, situation: str, device: str) -> list[Step]:
    options, script = SCRIPTS[situation]
    net = copy.deepcopy(model(name)).to(device)
    cache = RetentionCache.for_model(net, policy, **options)
    with torch.device(device):
        steps = play(net, cache, on(device, script))
    cache.check_integrity()
    return [
        Step(
            step.ids.cpu(),
            step.mask.cpu(),
            step.logits.cpu(),
            {layer: held.cpu() for layer, held in step.before.items()},
            {layer: held.cpu() for layer, held in step.after.items()},
        )
        for step in steps
    ]


@pytest.mark.parametrize(("policy", "name", "situation"), CELLS)
def test_cell_on_the_gpu_agrees_with_the_oracle_on_the_cpu(policy, name, situation):
    steps = record(name, policy, situation, "cuda")
    verdict = compare(Oracle(name), steps, atol=5e-4)
    assert policy == "full" or verdict.evictions >= 2


@pytest.mark.parametrize("policy", ["random", "streaming"])
def test_policies_without_arithmetic_keep_the_same_entries_on_both_devices(policy):
    there, here = record("llama", policy, "left-padded", "cuda"), record("llama", policy, "left-padded", "cpu")
    for a, b in zip(there, here, strict=True):
        assert all(torch.equal(a.after[layer], b.after[layer]) for layer in b.after)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nothing_evicted_is_bitwise_dynamic_cache(dtype):
    from transformers import DynamicCache

    net = copy.deepcopy(model("llama")).to("cuda", dtype)
    ids = torch.randint(1, 90, (2, 20), device="cuda")
    runs = []
    for cache in (DynamicCache(config=net.config), RetentionCache.for_model(net, "snapkv+hub", budget=512)):
        arguments = {cache_argument(net): cache, "max_new_tokens": 12, "do_sample": False, "output_logits": True}
        out = net.generate(ids, return_dict_in_generate=True, **arguments)
        runs.append((out.sequences, torch.stack(out.logits)))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_and_refinement_are_the_same_on_both_devices(dtype):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(3, 4, 2000, generator=generator).to(dtype).float()  # bfloat16 makes ties
    protected = torch.rand(3, 4, 2000, generator=generator) < 0.02
    assert torch.equal(
        select_topk(scores, 200, protected=protected), select_topk(scores.cuda(), 200, protected=protected.cuda()).cpu()
    )
    refined = hub_refine(scores, 0.9, protected=protected)
    assert torch.allclose(refined, hub_refine(scores.cuda(), 0.9, protected=protected.cuda()).cpu(), rtol=1e-6)
    smd = hub_refine(scores, 0.9, calibrate=False)
    assert torch.equal(select_topk(smd, 200), select_topk(hub_refine(scores.cuda(), 0.9, calibrate=False), 200).cpu())
    signatures = torch.nn.functional.normalize(torch.randn(3, 4, 2000, 64, generator=generator), dim=-1)
    for redundancy in ("max", "mean"):
        chosen, other = (
            select_diverse(*given, 200, protected=shut, redundancy=redundancy).cpu()
            for *given, shut in ((scores, signatures, protected), (scores.cuda(), signatures.cuda(), protected.cuda()))
        )
        assert torch.equal(chosen, other)
