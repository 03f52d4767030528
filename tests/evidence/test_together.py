"""Rows that are written together say what each says alone, and count what its own cache would have held."""

from __future__ import annotations

import pytest
import torch
from checkpoint import save_tiny_checkpoint

from kvretain import RetentionCache, load_model
from kvretain.answer import Prompt, Sampling, answer
from kvretain.evidence.together import write_together


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return load_model(str(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))), dtype=torch.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("policy", ["snapkv+hub", "keydiff@model", "full"])
def test_rows_are_those_of_answer(parts, policy, temperature):
    model, tokenizer = parts
    prompts = torch.randint(10, 500, (5, 40), generator=torch.Generator().manual_seed(3))

    def cache():
        limit = {} if policy == "full" else {"budget": 16, "every": 8}
        return RetentionCache.for_model(model, policy, **limit)

    drawn = [Sampling(temperature, 0.95 if temperature else None, seed=100 + row) for row in range(5)]
    # An end of text that is drawn often, so that rows end at different times.
    probe = write_together(model, tokenizer, prompts, cache(), room=60, samplings=drawn)
    common = torch.tensor([t for row in probe for t in row.tokens]).mode().values.item()
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, common]
    try:
        rows = write_together(model, tokenizer, prompts, cache(), room=60, samplings=drawn)
        assert temperature == 0 or len({len(row.tokens) for row in rows}) > 1
        for row, prompt, sampling in zip(rows, prompts, drawn, strict=True):
            alone = answer(model, tokenizer, Prompt(prompt[None]), cache(), max_new_tokens=60, sampling=sampling)
            assert tokenizer.decode(row.tokens, skip_special_tokens=True) == alone.text
            assert len(row.tokens) == alone.new_tokens
            assert (row.kept, row.mean, row.peak) == pytest.approx((alone.kept, alone.mean_kept, alone.peak_kept))
    finally:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
