"""Where people already generate: transformers' pipelines and chats, with a budget."""

from __future__ import annotations

import pytest
import torch
from checkpoint import save_tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline

from kvretain import RetentionCache

TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 4


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")


def writer(parts):
    model, tokenizer = parts
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize("policy", ["snapkv+hub", "keydiff@model", "knorm@shared"])
def test_a_pipeline_takes_the_cache(parts, policy):
    model, tokenizer = parts
    options = {"max_new_tokens": 40, "do_sample": False, "min_new_tokens": 40}
    cache = RetentionCache.for_model(model, policy, budget=24, every=8)
    (made,) = writer(parts)(TEXT, past_key_values=cache, return_full_text=False, **options)
    inputs = tokenizer(TEXT, return_tensors="pt")
    other = RetentionCache.for_model(model, policy, budget=24, every=8)
    ids = model.generate(**inputs, past_key_values=other, **options)
    assert made["generated_text"] == tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert cache.trace.peak_length <= 24 + 8 and cache.trace.evictions >= 4


def test_a_batch_and_a_chat(parts):
    model, _ = parts
    cache = RetentionCache.for_model(model, "snapkv", budget=24, every=8)
    made = writer(parts)([TEXT, TEXT[:90]], batch_size=2, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert len(made) == 2 and cache.trace.peak_length <= 32
    cache.reset()  # one cache serves one batch at a time
    (reply,) = writer(parts)(
        [[{"role": "user", "content": TEXT}]], past_key_values=cache, max_new_tokens=20, do_sample=False
    )
    assert reply[0]["generated_text"][-1]["role"] == "assistant" and cache.trace.evictions >= 2


@pytest.mark.parametrize("budget", [32, 4000])
def test_a_chat_of_several_turns_reads_every_token_once(parts, budget):
    """As in docs/transformers.md: what was generated stays as it is, and each turn adds its own tokens."""
    model, tokenizer = parts
    cache = RetentionCache.for_model(model, "snapkv+hub", budget=budget, every=8)
    full = DynamicCache(config=model.config)
    ids, other = torch.empty(1, 0, dtype=torch.int64), torch.empty(1, 0, dtype=torch.int64)
    for turn in ("Who sits by her sister?", "Where do they sit, and why is she tired of it?", "What is she tired of?"):
        message = [{"role": "user", "content": turn}]
        new = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = torch.cat([ids, new["input_ids"]], 1)
        ids = model.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False)
        if budget == 4000:  # nothing is evicted: the tokens of transformers' own cache
            other = torch.cat([other, new["input_ids"]], 1)
            other = model.generate(other, past_key_values=full, max_new_tokens=30, do_sample=False)
            assert torch.equal(ids, other)
    assert cache.get_seq_length() == ids.shape[1] - 1  # the last token has not been fed
    assert budget == 4000 or (cache.trace.peak_length <= 40 and cache.trace.evictions >= 5)
