"""The oracle as one table: policies x models x dtypes x attention x situations, each cell stepwise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache as memoise

import pytest
import torch

from kvretain import RetentionCache

from .models import MODELS, cache_argument, left_padded, model, tokens
from .oracle import Oracle, Recorder, Step, Turn, check_positions, compare, play

POLICIES = (
    "random",
    "streaming",
    "knorm",
    "keydiff",
    "tova",
    "snapkv",
    "h2o",
    "full",
    "snapkv+hub",
    "knorm@layer",
    "keydiff@model",
    "snapkv(window=4,kernel=3)",
)
PER_HEAD = ("random", "knorm", "keydiff", "snapkv", "h2o", "snapkv+hub", "rkv", "lagkv", "value-norm")
CORE = ("snapkv", "keydiff", "streaming", "snapkv+hub", "keydiff@model")

# --- situations -----------------------------------------------------------------------------------

BUDGET = {"budget": 14, "every": 4}
RATIO = {"ratio": 0.6, "every": 4}
PERIODIC = {"trigger": "periodic"}
SEED = 7


def _rows(seed: int, lengths: tuple[int, ...], decode: int = 0) -> Turn:
    """A turn whose rows have these lengths, padded on the left: holes inside the mask from the second turn on."""
    return Turn(*left_padded([tokens(seed + i, length) for i, length in enumerate(lengths)]), decode)


SCRIPTS: dict[str, tuple[dict, list[Turn]]] = {
    "single": (BUDGET, [Turn(tokens(0, 1, 30), decode=20)]),
    "single ratio": (RATIO, [Turn(tokens(0, 1, 30), decode=20)]),
    "left-padded": (BUDGET, [_rows(0, (32, 25, 18), 18)]),
    "left-padded ratio": (RATIO, [_rows(0, (32, 25, 18), 20)]),
    "left-padded short row": (BUDGET, [_rows(40, (30, 5, 1), 18)]),
    "chunked prefill": (BUDGET, [*(Turn(tokens(3, 2, n)) for n in (19, 11)), Turn(tokens(4, 2, 8), decode=16)]),
    "three turns": (BUDGET, [Turn(tokens(5 + n, 2, n), decode=8) for n in (26, 9, 7)]),
    "three turns ratio": (RATIO, [Turn(tokens(5 + n, 2, n), decode=8) for n in (26, 9, 7)]),
    "turns left-padded": (BUDGET, [_rows(10, (28, 17, 9), 7), _rows(20, (4, 13, 7), 8), _rows(30, (6, 1, 3), 5)]),
    "turns left-padded ratio": (RATIO, [_rows(10, (28, 17, 9), 7), _rows(20, (4, 13, 7), 8), _rows(30, (6, 1, 3), 5)]),
    "padded after an unpadded turn": (BUDGET, [Turn(tokens(9, 3, 22), decode=6), _rows(50, (2, 9, 5), 12)]),
}
GENERATES: dict[str, tuple[dict, dict]] = {
    "beams": (BUDGET, {"num_beams": 3, "max_new_tokens": 16}),
    "beams ratio": (RATIO, {"num_beams": 2, "max_new_tokens": 20}),
    "sampling": (BUDGET, {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "max_new_tokens": 18}),
    "greedy generate": (BUDGET, {"max_new_tokens": 18}),
}
SITUATIONS = (*SCRIPTS, *GENERATES)
SCRIPTS |= {
    "single periodic": (BUDGET | PERIODIC, [Turn(tokens(0, 1, 30), decode=20)]),
    "left-padded periodic": (BUDGET | PERIODIC, [_rows(0, (33, 25, 13), 18), _rows(20, (4, 9, 7), 8)]),
    "left-padded ratio periodic": (RATIO | PERIODIC, [_rows(0, (33, 25, 18), 20)]),
}

# --- table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    policy: str
    model: str = "llama"
    situation: str = "single"
    dtype: torch.dtype = torch.float32
    attention: str = "sdpa"

    def __str__(self) -> str:
        return " ".join(
            (self.policy, self.model, str(self.dtype).removeprefix("torch."), self.attention, self.situation)
        )


CELLS = [
    *(Cell(policy, situation=situation) for policy in POLICIES for situation in SITUATIONS),
    *(
        Cell(policy, name, situation, attention=attention)
        for name, (*_, attentions) in MODELS.items()
        for attention in attentions
        for policy in CORE
        for situation in ("single", "left-padded")
        if (name, attention) != ("llama", "sdpa")
    ),
    *(
        Cell(policy, name, situation, attention=MODELS[name][3][0])
        for name in ("gemma3", "gpt_oss", "qwen3")
        for policy in ("snapkv+hub", "keydiff@model")
        for situation in ("left-padded ratio", "three turns", "turns left-padded", "beams")
    ),
    *(
        Cell(policy, "llama", situation, dtype, attention)
        for dtype in (torch.bfloat16, torch.float16)
        for policy in ("snapkv+hub", "knorm")
        for attention in ("sdpa", "eager")
        for situation in ("single", "left-padded", "three turns")
    ),
    *(
        Cell(policy, situation=situation)
        for policy in ("rkv", "lagkv", "value-norm")
        for situation in ("single", "left-padded ratio", "turns left-padded", "beams")
    ),
    *(Cell("rkv", name, "left-padded", attention=MODELS[name][3][0]) for name in ("qwen3", "gemma2", "gpt_oss")),
    *(
        Cell(policy, situation=situation)
        for policy in ("snapkv+hub", "keydiff@model", "rkv")
        for situation in SCRIPTS
        if "periodic" in situation
    ),
    *(
        Cell(policy, situation=situation, attention="eager")
        for policy in ("snapkv+hub", "h2o", "tova")
        for situation in ("left-padded ratio", "turns left-padded", "chunked prefill", "beams")
    ),
]


def tolerance(dtype: torch.dtype) -> float:
    """float32: 1e-4, DESIGN.md's bound. Half precision: 32 units of machine epsilon.

    The run and the oracle sum the same products in another order and over another number of (hidden) entries, in the
    same dtype, so single roundings differ, and sharp attention amplifies them over two layers: on runs that evict
    nothing ``DynamicCache`` and the oracle differ by up to 0.09 in bfloat16 (logits reach 4, where one unit is 0.03)
    and 0.014 in float16. Every cell also asserts that hiding nothing is wrong by more than twice the tolerance, so the
    bound still tells right from wrong.
    """
    return 1e-4 if dtype == torch.float32 else 32 * torch.finfo(dtype).eps


@memoise
def oracle(name: str, dtype: torch.dtype) -> Oracle:
    return Oracle(name, dtype)


def run(cell: Cell) -> list[Step]:
    """The run under test, recorded."""
    net = model(cell.model, cell.attention, cell.dtype)
    if cell.situation in SCRIPTS:
        options, script = SCRIPTS[cell.situation]
        cache = RetentionCache.for_model(net, cell.policy, **options)
        steps = play(net, cache, script, pass_mask="padded" in cell.situation)
    else:
        options, arguments = GENERATES[cell.situation]
        cache = RetentionCache.for_model(net, cell.policy, **options)
        prompt = _rows(0, (32, 25, 18))
        ids, mask = prompt.ids, prompt.mask
        recorder = Recorder(cache, mask)
        torch.manual_seed(SEED)
        out = net.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=[recorder],
            output_logits=True,
            return_dict_in_generate=True,
            **({"do_sample": False, cache_argument(net): cache} | arguments),
        )
        steps = recorder.steps(out.logits)
        if "num_beams" not in arguments:
            check_tokens(cell, steps, out.sequences[:, ids.shape[1] :], sample="do_sample" in arguments)
    cache.check_integrity()
    for step in steps:
        check_positions(step)
        check_budget(step, cell.policy, **options)
    return steps


def agrees_in_beams(policy: str, attention: str = "sdpa") -> None:
    """Beam search over a left-padded batch that evicts, on the tiny Llama: asserts that the oracle agrees."""
    net = model("llama", attention=attention)
    cache = RetentionCache.for_model(net, policy, budget=14, every=4)
    ids, mask = left_padded([tokens(i, n) for i, n in enumerate((32, 25, 18))])
    recorder = Recorder(cache, mask)
    out = net.generate(
        ids,
        attention_mask=mask,
        logits_processor=[recorder],
        num_beams=3,
        max_new_tokens=16,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **{cache_argument(net): cache},
    )
    assert compare(Oracle("llama"), recorder.steps(out.logits), atol=1e-4).evictions >= 2
    cache.check_integrity()


def agrees(policy: str, name: str, situation: str, attention: str | None = None) -> tuple[RetentionCache, list[Step]]:
    """Runs a script of :data:`SCRIPTS`, asserts that the oracle agrees, returns the cache and the record."""
    options, script = SCRIPTS[situation]
    net = model(name, attention=attention or MODELS[name][3][0])
    cache = RetentionCache.for_model(net, policy, **options)
    steps = play(net, cache, script, pass_mask="padded" in situation)
    cache.check_integrity()
    assert compare(oracle(name, torch.float32), steps, atol=1e-4).evictions >= 2
    return cache, steps


def check_tokens(cell: Cell, steps: list[Step], chosen: torch.Tensor, *, sample: bool) -> None:
    """Asserts that ``generate`` chose what the oracle's logits say: the best token, or what the seed draws."""
    torch.manual_seed(SEED)
    for index, logits in enumerate(oracle(cell.model, cell.dtype).logits(steps)):
        last = logits[:, -1].float()
        expected = torch.multinomial(last.softmax(-1), 1)[:, 0] if sample else last.argmax(-1)
        assert torch.equal(chosen[:, index], expected), f"step {index}: generate chose another token"


def check_budget(
    step: Step,
    policy: str,
    *,
    budget: int | None = None,
    ratio: float | None = None,
    every: int,
    trigger: str = "slack",
) -> None:
    """Asserts how many entries every row and head keeps after ``step``, and when it may and must evict."""
    seen = step.mask.sum(-1)
    if policy == "full":
        allowed = seen
    elif ratio is None:
        allowed = torch.full_like(seen, budget)
    else:
        allowed = torch.tensor([max(1, n - math.floor(ratio * n + 1e-9)) for n in seen.tolist()])
    for layer, positions in step.after.items():
        real, before = (positions >= 0).sum(-1), step.real_before(layer)
        evicted = torch.minimum(before, allowed[:, None])
        columns = step.ids.shape[1] + (step.before[layer].shape[-1] if layer in step.before else 0)
        limit = int(allowed.max())
        if policy == "full":
            evicts = False
        elif step.ids.shape[1] > 1 or layer not in step.before:
            evicts = columns > limit
        elif trigger == "periodic":
            evicts = columns > limit and step.mask.shape[1] % every == 0
        else:
            evicts = columns >= limit + every
        if ratio is not None and torch.equal(evicted, before):
            evicts = False  # nothing but padding would go
        expected = evicted if evicts else before
        assert torch.equal(real, expected), f"layer {layer}: keeps {real.tolist()}, expected {expected.tolist()}"
        width = int(real.max()) if evicts else columns
        assert positions.shape[-1] == width, f"layer {layer}: {positions.shape[-1]} columns, expected {width}"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell) -> None:
    steps, reference, atol = run(cell), oracle(cell.model, cell.dtype), tolerance(cell.dtype)
    verdict = compare(reference, steps, atol=atol)
    if cell.policy == "full":
        assert verdict.evictions == 0
        return
    assert verdict.evictions >= 2
    if cell.policy.partition("(")[0] in PER_HEAD:
        assert any(not torch.equal(p[:, 0], p[:, 1]) for step in steps for p in step.after.values()), (
            "heads never differ"
        )
    blind = max(
        (step.logits - logits[:, -step.logits.shape[1] :]).float().abs()[:, -1].max().item()
        for step, logits in zip(steps, reference.logits(steps, hide=False), strict=True)
    )
    assert blind > 2 * atol, "the cell could not tell an evicted entry from a kept one"


@pytest.mark.parametrize("wrong", ["one hidden entry shown", "one shown entry hidden", "heads swapped"])
def test_oracle_notices_a_single_wrong_entry(wrong: str) -> None:
    """The comparison has teeth: a recording that errs by one entry in one head of one layer fails."""
    steps = run(Cell("snapkv", situation="left-padded"))
    compare(oracle("llama", torch.float32), steps, atol=1e-4)
    step = next(step for step in steps if step.before and not torch.equal(*step.before[1][0]))
    kept = step.before[1] = step.before[1].clone()
    if wrong == "one hidden entry shown":
        missing = set(range(int(kept[0].max()))) - set(kept[0, 0].tolist())
        kept[0, 0, 0] = max(missing)
    elif wrong == "one shown entry hidden":
        kept[0, 0, -1] = -1
    else:
        kept[0] = kept[0].flip(0)
    with pytest.raises(AssertionError, match="logits differ"):
        compare(oracle("llama", torch.float32), steps, atol=1e-4)
