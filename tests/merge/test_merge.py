"""Mergers on tensors, against loops; and the selector that makes room for summaries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging import entries, loops

from kvretain import Policy, mergers, select_topk
from kvretain.merge import Nearest, Segment
from kvretain.select import Segments


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    merger=st.sampled_from([Nearest(), Nearest(threshold=-1), Nearest(threshold=0.9), Segment(length=2), Segment(4)]),
)
def test_they_agree_with_loops(seed, merger):
    keys, values, index, positions = entries(seed)
    got = merger.merge(keys, values, index, positions)
    for (row, head, slot), expected in loops(merger, keys, values, index, positions).items():
        for state, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(state[row, head, slot].double(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", list(mergers))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_that_takes_nothing_over_is_untouched_and_rows_are_independent(name, dtype):
    keys, values, index, positions = entries(3)
    keys, values, merger = keys.to(dtype), values.to(dtype), mergers[name]()
    every = torch.arange(keys.shape[2]).expand(positions.shape).masked_fill(positions < 0, -1)
    same = merger.merge(keys, values, every, positions)
    real = positions >= 0
    assert torch.equal(same[0][real], keys[real]) and torch.equal(same[1][real], values[real])
    whole = merger.merge(keys, values, index, positions)
    for row in range(2):
        alone = merger.merge(*(t[row : row + 1] for t in (keys, values, index, positions)))
        slots = index[row] >= 0
        for a, b in zip(whole, alone, strict=True):
            assert a.dtype == dtype and torch.equal(a[row][slots], b[0][slots])


def test_nothing_stays():
    keys, values, index, positions = entries(0)
    for name in mergers:
        assert mergers[name]().merge(keys, values, index[..., :0], positions)[0].shape == (2, 2, 0, 6)


def test_segments_reserves_places_for_the_latest_ends():
    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0, -1, -2]])
    protected = torch.zeros_like(scores, dtype=torch.bool)
    chosen = Segments(length=4, share=0.5).select(scores, 4, protected=protected)
    assert chosen.tolist() == [[0, 1, 7, 11]]  # two by score, and the ends 7 and 11 (3 is the oldest end)
    assert torch.equal(Segments(share=0.0).select(scores, 4, protected=protected), select_topk(scores, 4))
    protected[:, 10:] = True
    assert Segments(length=4, share=0.5).select(scores, 4, protected=protected).tolist() == [[0, 7, 10, 11]]
    # An end that the scores choose anyway takes no reserved place.
    scores[:, 3] = 10.0
    none = torch.zeros_like(protected)
    assert Segments(length=4, share=0.25).select(scores, 4, protected=none).tolist() == [[0, 1, 3, 11]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("knorm~nearest(threshold=2)", "threshold must be a number from -1 to 1"),
        ("knorm~segment(length=1)", "length must be a whole number of at least 2"),
        ("knorm/segments(share=1.5)", "share must be a number from 0 to 1"),
        ("knorm~nearst", "unknown merger 'nearst'"),
        ("knorm~nearest@shared", "mergers need equal numbers of entries"),
        ("snapkv~nearest@head(layers='pyramid')", "mergers need equal numbers of entries"),
        ("full~nearest", "'full' keeps everything"),
        ("routed(share=0)", "share must be a number above 0"),
        ("trig(value_weight=-1)", "value_weight must be a number of at least 0"),
        ("knorm/diverse(space='queries')", "unknown space 'queries'"),
    ],
)
def test_bad_texts(text, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        Policy.parse(text)
