"""Reading with summaries: never more than the budget is stored, and what follows is read after the last summary."""

from __future__ import annotations

import pytest
import torch
from cache.models import forward
from evidence.test_measure import Letters, example

from kvretain import RetentionCache
from kvretain.evidence import summaries
from kvretain.evidence.measure import Case, cut
from kvretain.evidence.stream import measure_streamed
from kvretain.evidence.summaries import LEAD, read_summarising


@pytest.fixture(autouse=True)
def _short_cue(monkeypatch):
    monkeypatch.setattr(summaries, "CUE", "so:")


def test_the_last_cache_is_that_of_lead_cue_summary_and_rest(llama):
    ids = cut(Letters(), example()).context
    reading = read_summarising(llama, Letters(), ids, budget=40, summary=6, chunk=16)
    assert max(reading.stored) <= 40 and len(reading.summaries) >= 3
    cue = Letters()("so:")["input_ids"]
    # By hand: read until cue and summary just fit, write greedily, start anew.
    held, rest, written = list(ids[:31]), list(ids[31:]), []
    while True:
        cache, new = RetentionCache.for_model(llama, "full"), [*held, *cue]
        own: list[int] = []
        while len(own) < 6:
            new = [int(forward(llama, torch.tensor([new]), cache)[0, -1].argmax())]
            if new[0] == Letters.eos_token_id:
                break
            own += new
        written.append(Letters().decode(own))
        held = [*ids[:LEAD], *cue, *own]
        room = 40 - len(cue) - 6 - len(held)
        held, rest = held + rest[:room], rest[room:]
        if not rest:
            break
    assert list(reading.summaries) == written
    alone = RetentionCache.for_model(llama, "full")
    forward(llama, torch.tensor([held]), alone)
    for a, b in zip(reading.cache.layers, alone.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, atol=1e-4, rtol=1e-4)


def test_the_tensors_never_hold_more_than_the_budget(llama, monkeypatch):
    """Measured after every pass, of whatever cache is in use, from the tensors of its layers."""
    sizes, config = [], llama.config
    entry = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads * 4  # float32, bytes

    def measuring(run):
        def measured(model, ids, cache, **options):
            found = run(model, ids, cache, **options)
            sizes.append([layer.keys.nbytes + layer.values.nbytes for layer in cache.layers])
            return found

        return measured

    for name in ("prefill", "forward"):
        monkeypatch.setattr(summaries, name, measuring(getattr(summaries, name)))
    ids = cut(Letters(), example()).context
    reading = read_summarising(llama, Letters(), ids, budget=40, summary=6, chunk=16)
    assert len(reading.summaries) >= 3 and {len(layers) for layers in sizes} == {config.num_hidden_layers}
    assert max(max(layers) for layers in sizes) <= 40 * entry
    assert [layers[0] // entry for layers in sizes] == list(reading.stored)  # and the count that reports give is theirs


def test_a_text_that_fits_is_read_as_it_is(llama):
    ids = cut(Letters(), example()).context
    reading = read_summarising(llama, Letters(), ids, budget=200, summary=6, chunk=16)
    assert reading.summaries == () and reading.stored[-1] == len(ids) == reading.cache.get_seq_length()


def test_recall_through_it_counts_all_passes(llama):
    (row,) = measure_streamed(llama, Letters(), example(), [Case("full", budget=40)], chunk=16, summary=6)
    pieces = cut(Letters(), example())
    reading = read_summarising(llama, Letters(), pieces.context, budget=40, summary=6, chunk=16)
    asked = reading.stored[-1] + len(pieces.question + pieces.opening)
    stored = [*reading.stored, asked, asked + len(pieces.target) - 1]
    assert row.mean_cache == pytest.approx(sum(stored) / len(stored)) and row.peak_cache == max(stored)
    assert row.kept == reading.stored[-1]


def test_a_budget_without_room(llama):
    with pytest.raises(ValueError, match="a summary of 20 tokens needs a budget of at least 51"):
        read_summarising(llama, Letters(), [5] * 99, budget=50, summary=20)
