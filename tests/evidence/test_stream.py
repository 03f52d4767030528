"""What flows through a budget is measured as by feeding it by hand."""

import pytest
import torch
from cache.models import distinct, forward, model
from evidence.test_measure import Letters, example

from kvretain import RetentionCache
from kvretain.evidence.measure import FULL, Case, cut
from kvretain.evidence.stream import measure_streamed
from kvretain.tasks.example import Passages

POLICIES = ("streaming", "keydiff@layer", "snapkv+hub", "h2o", "knorm@shared", "keydiff@model", "expected@head")


def recall(llama, cases, **options):
    return list(measure_streamed(llama, Letters(), example(), cases, **options))


@pytest.mark.parametrize("policy", POLICIES)
def test_recall_is_that_of_feeding_chunks_by_hand(llama, policy) -> None:
    (row,) = recall(llama, [Case(policy, budget=24)], chunk=16)
    pieces = cut(Letters(), example())
    assert len(pieces.context) == 104
    cache = RetentionCache.for_model(llama, policy, budget=24)
    lengths = []
    for start, stop in ((0, 8), (8, 24), (24, 40), (40, 56), (56, 72), (72, 88), (88, 104)):
        forward(llama, torch.tensor([pieces.context[start:stop]]), cache)
        lengths.append(min(24, stop))
    first = forward(llama, torch.tensor([pieces.question + pieces.opening]), cache)[0, -1:]
    rest = forward(llama, torch.tensor([pieces.target[:-1]]), cache)[0]
    loss = torch.nn.functional.cross_entropy(torch.cat([first, rest]), torch.tensor(pieces.target))
    assert row.nll == pytest.approx(loss.item(), abs=1e-5)
    assert (row.kept, row.context_tokens, row.budget, row.ratio) == (pytest.approx(24), 104, 24, None)
    assert row.mean_cache == pytest.approx(sum([*lengths, 24, 24]) / 9)
    assert row.peak_cache >= 24
    assert (row.kl, row.token_nll, row.exact) == (None, None, False)


def test_the_reply_is_graded_by_how_it_begins(llama, monkeypatch) -> None:
    target = []
    for _ in range(3):  # the model's own greedy reply becomes the right one
        pieces = cut(Letters(), example())
        ids = pieces.context + pieces.question + pieces.opening + target
        target.append(int(llama(torch.tensor([ids])).logits[0, -1].argmax()))
    reply = Letters().decode(target)
    asked = example(target=reply + "z", answers=("x",))
    monkeypatch.setattr(type(asked), "grade", lambda self, text: text == reply)
    (row,) = measure_streamed(llama, Letters(), asked, [FULL])
    assert row.exact and row.prefix and row.reply == reply


@pytest.mark.parametrize("chunk", [1, 7, 103, 104, 1000])
def test_without_evictions_every_chunking_gives_the_full_cache(llama, chunk) -> None:
    full, roomy = recall(llama, [FULL, Case("snapkv", budget=400)], chunk=chunk)
    pieces = cut(Letters(), example())
    ids = pieces.context + pieces.question + pieces.opening + pieces.target
    logits = llama(torch.tensor([ids])).logits[0, -len(pieces.target) - 1 : -1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(pieces.target))
    assert full.nll == pytest.approx(loss.item(), abs=1e-5)
    assert roomy.nll == full.nll
    assert full.kept == roomy.kept == 104
    assert full.peak_cache == roomy.peak_cache == len(ids) - 1


def test_a_chunk_ends_within_the_budget_whatever_is_left_over(llama) -> None:
    """A context of 104 tokens in chunks of 103: a last pass of one token would not evict."""
    (row,) = recall(llama, [Case("knorm", budget=24)], chunk=103)
    assert row.kept == 24


def passages(prompt=20, following=40) -> Passages:
    """Each without a repeated token: keys of equal norm would be ties up to rounding."""
    return Passages(
        "decode", 4, tuple(tuple(distinct(row, prompt + following + 1).tolist()) for row in range(3)), prompt
    )


@pytest.mark.parametrize("policy", [*POLICIES, "random"])
def test_decoding_is_that_of_feeding_tokens_by_hand(llama, policy) -> None:
    made = passages()
    ids = torch.tensor(made.rows)
    full, row = measure_streamed(llama, None, made, [FULL, Case(policy, budget=16)], every=8)
    reference = llama(ids[:, :-1]).logits[:, 20:].log_softmax(-1)
    cache = RetentionCache.for_model(llama, f"random(seed={made.index})" if policy == "random" else policy, budget=16,
                                     every=8)  # fmt: skip
    forward(llama, ids[:, :20], cache)
    own = torch.cat([forward(llama, ids[:, at : at + 1], cache) for at in range(20, 60)], 1).log_softmax(-1)
    targets = ids[:, 21:, None]
    for measured, predicted in ((full, reference), (row, own)):
        nll = -predicted.gather(2, targets)[..., 0]
        kl = (reference.exp() * (reference - predicted)).sum(-1)
        torch.testing.assert_close(torch.tensor(measured.token_nll), nll, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(measured.token_kl), kl, atol=1e-4, rtol=0)
        assert measured.nll == pytest.approx(nll.mean().item(), abs=1e-4)
        assert measured.kl == pytest.approx(kl.mean().item(), abs=1e-4)
    assert full.kl == 0 and not any(map(any, full.token_kl)) and row.kl > 1e-3
    assert (full.kept, full.peak_cache, full.context_tokens) == (60, 60, 60)
    assert cache.trace.evictions == 1 + 40 // 8
    assert (row.mean_cache, row.peak_cache) == (cache.trace.mean_length, cache.trace.peak_length)
    assert row.mean_cache == pytest.approx((16 + 5 * sum((17, 18, 19, 20, 21, 22, 23, 16))) / 41)


def test_nothing_differs_before_the_first_eviction(llama) -> None:
    made = passages(prompt=10)
    roomy, tight = measure_streamed(
        llama, None, made, [Case("keydiff", budget=500), Case("keydiff", budget=16)], every=8
    )
    assert roomy.token_kl == [[0.0] * 40] * 3
    for passage in tight.token_kl:  # 24 entries after 14 steps; the 15th sees 16 of them
        assert passage[:14] == [0.0] * 14 and min(passage[14:]) > 0


@pytest.mark.parametrize("policy", ["keydiff", "snapkv@layer", "knorm@shared", "h2o@model"])
def test_a_row_of_a_batch_equals_its_solo_run(llama, policy) -> None:
    made = passages()
    case = Case(policy, budget=16)
    (batch,) = measure_streamed(llama, None, made, [case], every=8)
    for at, row in enumerate(made.rows):
        (solo,) = measure_streamed(llama, None, Passages("decode", 4, (row,), 20), [case], every=8)
        torch.testing.assert_close(torch.tensor(solo.token_kl[0]), torch.tensor(batch.token_kl[at]), atol=1e-4, rtol=0)
        assert solo.mean_cache == pytest.approx(batch.mean_cache)


def test_a_ratio_lets_the_cache_grow(llama) -> None:
    (row,) = measure_streamed(llama, None, passages(), [Case("knorm", 0.5)], every=4)
    assert row.kept in range(30, 34) and row.mean_cache < row.peak_cache <= 34


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_other_models(name) -> None:
    made = passages()
    full, row = measure_streamed(model(name), None, made, [FULL, Case("snapkv@layer", budget=16)], every=8)
    assert full.kl == 0 < row.kl and row.mean_cache < 24 < full.mean_cache
    first, other = measure_streamed(model(name), Letters(), example(), [FULL, Case("keydiff", budget=16)], chunk=16)
    assert first.nll != other.nll and other.kept == 16
