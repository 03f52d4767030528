"""Examples whose replies are written to their end: what is fed, where a reply ends, how it is judged."""

import dataclasses

import pytest
import torch
from checkpoint import save_tiny_checkpoint

from kvretain import load_model
from kvretain.evidence.grading import Verdict
from kvretain.evidence.measure import FULL, Case, cut, measure
from kvretain.tasks.example import Written
from kvretain.tasks.metrics import Metric

CASES = [FULL, Case("streaming", 0.5), Case("knorm", budget=30)]
MOST = 20


@pytest.fixture(scope="module", params=[True, False], ids=["chat", "plain"])
def tiny(request, tmp_path_factory):
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), chat=request.param)
    return load_model(str(folder), progress=lambda message: None)


def example(**changes):
    made = Written(
        "longbench:hotpotqa", 3, "Passages.\nThe Hatter poured some hot tea upon its nose. " * 12,
        "\n\nQuestion: Who poured the tea?\nAnswer:", "", ("the Hatter",), " the Hatter", most=MOST,
        metric=Metric("f1"),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def greedy(tiny, made, most=MOST):
    """What the model writes after the example's prompt under transformers' own cache."""
    model, tokenizer = tiny
    pieces = cut(tokenizer, made)
    ids = torch.tensor([pieces.context + pieces.question + pieces.opening])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_nothing_is_put_between_the_pieces(tiny):
    _, tokenizer = tiny
    chat = tokenizer.chat_template is not None
    made = example()
    pieces = cut(tokenizer, made)
    whole = tokenizer.decode(pieces.context + pieces.question + pieces.opening)
    prompt = made.context + made.question
    assert whole == (f"<|user|>{prompt}\n<|assistant|>" if chat else prompt)
    assert tokenizer.decode(pieces.question) == made.question
    # After a template's end nothing parts the reply from it; after plain text a blank does.
    assert tokenizer.decode(pieces.target) == ("the Hatter" if chat else " the Hatter")
    raw = cut(tokenizer, example(raw=True, opening=" It was"))
    assert tokenizer.decode(raw.context + raw.question + raw.opening) == prompt + " It was"
    assert tokenizer.decode(raw.target) == " the Hatter"


def test_a_template_that_strips_messages_keeps_the_question(tiny):
    _, tokenizer = tiny
    if tokenizer.chat_template is None:
        pytest.skip("no template")
    kept = tokenizer.chat_template
    try:
        tokenizer.chat_template = kept.replace("message['content']", "message['content'] | trim")
        pieces = cut(tokenizer, example(question="\nWhich one? The answer is: \n"))
        assert tokenizer.decode(pieces.question) == "\nWhich one? The answer is:"
        tokenizer.chat_template = kept.replace("message['content']", "message['content'] | upper")
        with pytest.raises(ValueError, match="chat template changes the question of example 3"):
            cut(tokenizer, example())
    finally:
        tokenizer.chat_template = kept


@pytest.mark.parametrize("aware", [False, True])
def test_the_whole_reply_is_scored(tiny, aware):
    reply = greedy(tiny, example())
    full, *others = measure(*tiny, example(answers=("no", reply)), CASES, aware=aware)
    assert full.reply == reply and full.score == pytest.approx(1) and full.exact is full.prefix is None
    assert all(0 <= row.score <= 1 for row in others)
    assert any(row.reply != reply for row in others) or aware
    assert [row.kept for row in others][1] == 30


def test_a_reply_ends_before_a_stop(tiny):
    reply = greedy(tiny, example())
    stop = reply[len(reply) // 2 : len(reply) // 2 + 2]
    (row,) = measure(*tiny, example(stops=("never", stop), answers=(reply,)), [FULL])
    assert row.reply == reply[: reply.index(stop)]
    assert row.score == example().metric(row.reply, (reply,))
    (short,) = measure(*tiny, example(most=3), [FULL])
    assert short.reply == greedy(tiny, example(), most=3)


def test_without_replies_only_the_likelihood_is_measured(tiny):
    written = measure(*tiny, example(), CASES)
    silent = measure(*tiny, example(), CASES, generate=False)
    assert [row.nll for row in silent] == pytest.approx([row.nll for row in written], abs=1e-5)
    assert {(row.score, row.exact, row.reply) for row in silent} == {(None, None, None)}


def test_without_a_metric_the_boxed_answer_decides(tiny, monkeypatch):
    asked = []

    def grade(reply, truth, *, cut_off):
        asked.append((reply, truth, cut_off))
        return Verdict.RIGHT if len(asked) == 1 else Verdict.WRONG

    monkeypatch.setattr("kvretain.evidence.measure.grade", grade)
    rows = measure(*tiny, example(metric=None, answers=("7",)), CASES)
    assert [row.exact for row in rows] == [True, False, False] and {row.score for row in rows} == {None}
    assert asked[0] == (greedy(tiny, example()), "7", True)
