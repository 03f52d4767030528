import pytest
import torch
from checkpoint import save_tiny_checkpoint

from kvretain import RetentionCache, load_model
from kvretain.answer import Sampling, answer, build_prompt, decode_speed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(str(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))), progress=lambda message: None)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_prompt_is_the_chat_template_cut_before_the_question(tiny):
    _, tokenizer = tiny
    prompt = build_prompt(tokenizer, " Where? ", context=" In Oslo. ", opening="It is")
    assert tokenizer.decode(prompt.ids[0]) == "<|user|>In Oslo.\n\nWhere?\n<|assistant|>It is"
    assert tokenizer.decode(prompt.ids[0, : prompt.context]) == "<|user|>In Oslo.\n\n"


def test_a_raw_prompt_is_the_text(tiny):
    _, tokenizer = tiny
    assert (
        tokenizer.decode(build_prompt(tokenizer, "Where?", context="In Oslo.", raw=True).ids[0]) == "In Oslo.\n\nWhere?"
    )
    assert build_prompt(tokenizer, "Where?", raw=True).ids[0].tolist() == ids(tokenizer, "Where?")


def test_a_context_that_contains_the_question_is_cut_at_the_last_one(tiny):
    _, tokenizer = tiny
    prompt = build_prompt(tokenizer, "Where?", context="Where? In Oslo.")
    assert tokenizer.decode(prompt.ids[0, : prompt.context]) == "<|user|>Where? In Oslo.\n\n"


def test_an_empty_question_is_refused(tiny):
    with pytest.raises(ValueError, match="empty"):
        build_prompt(tiny[1], "  ", context="text")


def test_the_answer_is_that_of_generate_and_arrives_in_pieces(tiny):
    model, tokenizer = tiny
    prompt = build_prompt(tokenizer, "Where?", context="The Walrus keeps the key in Oslo. " * 10)
    pieces, progress = [], []
    reply = answer(
        model,
        tokenizer,
        prompt,
        RetentionCache.for_model(model, "snapkv", ratio=0.5),
        max_new_tokens=40,
        sampling=Sampling(temperature=1.0, seed=1),
        on_prefill=progress.append,
        on_text=pieces.append,
    )
    torch.manual_seed(1)
    cache = RetentionCache.for_model(model, "snapkv", ratio=0.5)
    expected = model.generate(
        prompt.ids, past_key_values=cache, max_new_tokens=40, do_sample=True, temperature=1.0, top_p=1.0, top_k=0
    )[0, len(prompt) :]
    assert reply.new_tokens == len(expected)
    assert reply.text == "".join(pieces) == tokenizer.decode(expected, skip_special_tokens=True)
    assert len(pieces) > 10
    assert progress == sorted(progress) and progress[-1] == pytest.approx(len(prompt))
    assert reply.kept == len(prompt) - len(prompt) // 2
    assert not model.get_decoder().layers[0]._forward_hooks


def test_a_character_of_several_tokens_arrives_whole(tiny):
    model, tokenizer = tiny
    text = "naïve 漢字 🙂\nend"

    class Script:
        """Generates ``text`` whatever the logits say."""

        def __init__(self):
            self.left = [*ids(tokenizer, text), tokenizer.eos_token_id]

        def __call__(self, input_ids, scores):
            wanted = torch.full_like(scores, -torch.inf)
            wanted[:, self.left.pop(0)] = 0
            return wanted

    generate = model.generate
    try:
        model.generate = lambda *a, **k: generate(*a, logits_processor=[Script()], **k)
        pieces = []
        prompt = build_prompt(tokenizer, "Say it.")
        cache = RetentionCache.for_model(model, "full")
        reply = answer(model, tokenizer, prompt, cache, on_text=pieces.append)
    finally:
        del model.generate
    assert reply.text == "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("blind", "chunk", "passes"), [(False, None, 1), (True, None, 2), (False, 30, 4), (True, 60, 3)]
)
def test_the_cache_is_compressed_after_each_pass(tiny, blind, chunk, passes):
    model, tokenizer = tiny
    prompt = build_prompt(tokenizer, "Where is the key?", context="The Walrus keeps the key in Oslo. " * 5)
    assert 90 < prompt.context < len(prompt) <= 120
    cache = RetentionCache.for_model(model, "streaming", ratio=0.5)
    reply = answer(model, tokenizer, prompt, cache, max_new_tokens=1, blind=blind, chunk=chunk)
    steps = list(cache.trace)
    assert len(steps) == passes
    assert all(step.kept[0] == step.seen - step.seen // 2 for step in steps)
    assert steps[-1].seen == len(prompt)
    if blind:
        assert prompt.context in [step.seen for step in steps]
    assert reply.decode_tokens_per_second is None


def test_decode_speed_counts_only_decoding(tiny):
    model, tokenizer = tiny
    cache = RetentionCache.for_model(model, "full")
    answer(model, tokenizer, build_prompt(tokenizer, "Where?"), cache, max_new_tokens=1)
    before = cache.get_seq_length()
    assert decode_speed(model, cache, steps=5, warmup=1) > 0
    assert cache.get_seq_length() == before + 6
