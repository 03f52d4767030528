"""One prefill for many policies measures what a prefill for each would."""

import copy
import math

import pytest
import torch
from cache.models import VOCAB, model, tokens

from kvretain import Policy, RetentionCache
from kvretain.evidence.measure import FULL, Case, cut, measure
from kvretain.evidence.replay import compressed, forward, prefill, record
from kvretain.tasks.example import Continuation, Example

POLICIES = (
    "random", "streaming", "knorm", "keydiff+hub@layer", "tova", "snapkv+hub", "snapkv(window=16)@model",
    "knorm@shared", "snapkv@model-heads", "pyramidkv", "kvzip+hub@layer", "hubkv", "expected", "expected+hub@head",
)  # fmt: skip
SHARED = tuple(p for p in POLICIES if not Policy.parse(p).ragged and not Policy.parse(p).needs & {"replay", "moments"})


class Letters:
    """A tokenizer without merges: a token is a character."""

    eos_token_id = 0
    chat_template = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) % VOCAB for c in text]}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i + VOCAB if i < 32 else i) for i in ids)


def example(**changes) -> Example:
    given = {
        "task": "single", "index": 3, "context": "the rabbit keeps the key in oslo; " * 3, "question": "where is it?",
        "opening": "it is in", "answers": ("oslo",), "target": " oslo",
    }  # fmt: skip
    return Example(**(given | changes))


@pytest.mark.parametrize("policy", SHARED)
def test_a_shared_recording_compresses_bitwise_as_the_pass_does(llama, policy) -> None:
    ids = tokens(0, 60).tolist()
    recorded = record(llama, ids, [Policy.parse(p) for p in SHARED])
    short = compressed(recorded, Policy.parse(policy), 0.7)
    inpass = RetentionCache.for_model(llama, policy, ratio=0.7)
    prefill(llama, ids, inpass)
    short.check_integrity()
    for a, b in zip(short.layers, inpass.layers, strict=True):
        for name in ("positions", "keys", "values"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert all(layer.kept == 60 for layer in recorded.layers)


@pytest.mark.parametrize("policy", POLICIES)
def test_continuations_are_those_of_one_cache_a_policy(llama, policy) -> None:
    ids = tokens(1, 60 + 13).tolist()
    made = Continuation("continuation", 0, tuple(ids[:60]), tuple(ids[60:]))
    cases = [FULL, *(Case(p, ratio) for p in POLICIES for ratio in (0.5, 0.8))]
    rows = {Case(row.policy, row.ratio): row for row in measure(llama, None, made, cases)}
    assert list(rows) == cases
    full = llama(torch.tensor([ids[:-1]])).logits[0, 60:].float().log_softmax(-1)
    for ratio in (0.5, 0.8):
        cache = RetentionCache.for_model(llama, policy, ratio=ratio)
        prefill(llama, ids[:60], cache)
        cache = _open(cache)
        own = forward(llama, ids[60:-1], cache).log_softmax(-1)
        row = rows[Case(policy, ratio)]
        targets = torch.tensor(ids[61:])
        assert row.nll == pytest.approx(torch.nn.functional.nll_loss(own, targets).item(), abs=1e-5)
        assert row.kl == pytest.approx((full.exp() * (full - own)).sum(-1).mean().item(), abs=1e-5)
        assert row.kl > 0
        assert row.kept == pytest.approx(60 - math.floor(60 * ratio), abs=1)
        assert (row.exact, row.reply, row.context_tokens) == (None, None, 60)
    assert rows[FULL].kl == 0


def _open(cache: RetentionCache) -> RetentionCache:
    """A copy of ``cache`` that evicts nothing more."""
    other = copy.deepcopy(cache)
    object.__setattr__(other._session.budget, "ratio", 0.0)
    return other


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("policy", ["snapkv+hub", "keydiff@layer", "full"])
def test_answers_are_those_of_one_cache_a_policy(llama, policy, aware) -> None:
    tokenizer, asked = Letters(), example()
    case = FULL if policy == "full" else Case(policy, 0.6)
    (row,) = measure(llama, tokenizer, asked, [case], aware=aware)
    pieces = cut(tokenizer, asked)
    first = pieces.context + (pieces.question if aware else [])
    rest = pieces.opening if aware else pieces.question + pieces.opening
    cache = RetentionCache.for_model(llama, policy, ratio=case.ratio)
    prefill(llama, first, cache)
    if case != FULL:
        cache = _open(cache)
    spare = copy.deepcopy(cache)
    logits = forward(llama, rest + pieces.target, cache)[len(rest) - 1 : -1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(pieces.target))
    assert row.nll == pytest.approx(loss.item(), abs=1e-5)
    assert row.context_tokens == len(first)
    reply, new = [], rest
    for _ in range(len(pieces.target) + 8):
        new = [int(forward(llama, new, spare, logits=1).argmax())]
        reply += new
        if new[0] == tokenizer.eos_token_id or "\n" in tokenizer.decode(reply).lstrip():
            break
    assert row.reply == tokenizer.decode(reply)
    assert row.exact == asked.grade(row.reply) and row.prefix is False


def test_a_reply_that_teacher_forcing_proves_right_is_not_generated(llama, monkeypatch) -> None:
    tokenizer = Letters()
    (row,) = measure(llama, tokenizer, example(), [FULL])
    likely = row.reply[:4]
    sure = example(target=likely, answers=("x",))
    monkeypatch.setattr(Example, "grade", lambda self, reply: reply == likely)
    monkeypatch.setattr("kvretain.evidence.measure._greedy", lambda *_, **__: pytest.fail("generated"))
    (again,) = measure(llama, tokenizer, sure, [FULL])
    assert again.exact and again.prefix and again.reply == likely


def test_without_generation_the_likelihood_is_the_same(llama) -> None:
    cases = [FULL, Case("snapkv@layer", 0.5)]
    written = measure(llama, Letters(), example(), cases)
    for row, other in zip(measure(llama, Letters(), example(), cases, generate=False), written, strict=True):
        assert row.nll == pytest.approx(other.nll, abs=1e-5)
        assert row.exact is False and other.reply.startswith(row.reply)


def test_random_draws_anew_for_each_example(llama) -> None:
    ids = tuple(tokens(1, 70).tolist())
    case = Case("random", 0.8)
    rows = [measure(llama, None, Continuation("continuation", i, ids[:60], ids[60:]), [case])[0] for i in (0, 0, 1)]
    assert rows[0].nll == rows[1].nll != rows[2].nll


def test_the_prompt_is_cut_at_the_question() -> None:
    from checkpoint import tiny_tokenizer

    for chat in (True, False):
        for raw in (True, False):
            tokenizer = tiny_tokenizer(chat=chat)
            pieces = cut(tokenizer, example(raw=raw))
            parts = [tokenizer.decode(ids) for ids in (pieces.context, pieces.question, pieces.opening, pieces.target)]
            assert parts[0].startswith("<|user|>" if chat and not raw else "the rabbit")
            assert parts[1] == "where is it?"
            assert parts[2].endswith("it is in") and ("<|assistant|>" in parts[2]) == (chat and not raw)
            assert parts[3] == " oslo"


def test_recordings_that_cannot_be_shared_are_refused(llama) -> None:
    with pytest.raises(ValueError, match="cannot share a recording"):
        record(llama, [1, 2, 3], [Policy.parse("knorm"), Policy.parse("knorm@shared")])


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_other_models(name) -> None:
    ids = tuple(tokens(1, 70).tolist())
    made = Continuation("continuation", 0, ids[:60], ids[60:])
    rows = measure(model(name), None, made, [FULL, Case("snapkv+hub", 0.7), Case("keydiff@model", 0.7)])
    assert [row.kept for row in rows] == [60, 18, 18]
    assert all(row.kl > 0 for row in rows[1:])
