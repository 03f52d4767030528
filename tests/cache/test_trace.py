"""The trace against a naive list of every pass."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvretain.cache.trace import Trace


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 5]), st.booleans(), st.integers(0, 1)),
        min_size=1,
        max_size=40,
    )
)
def test_spans_expand_to_what_was_recorded(passes):
    trace, naive, kept, seen = Trace((0, 2)), [], [0, 0], 0
    for tokens, evict, size in passes:
        seen += tokens
        kept = [k + tokens for k in kept]
        gone = [k // 2 for k in kept] if evict else [0, 0]
        kept = [k - g for k, g in zip(kept, gone, strict=True)]
        row = (tokens, seen, tuple(kept), tuple(gone), (100 + size, 7))
        trace.record(*row)
        naive.append(row)
    assert [(s.tokens, s.seen, s.kept, s.evicted, s.nbytes) for s in trace] == naive
    assert [s.step for s in trace] == list(range(len(naive)))
    assert len(trace) == len(naive)
    assert trace.mean_length == pytest.approx(sum(sum(r[2]) / 2 for r in naive) / len(naive))
    assert trace.peak_length == max(max(r[2]) for r in naive)
    assert trace.peak_attended == max(k + e for r in naive for k, e in zip(r[2], r[3], strict=True))
    assert trace.peak_nbytes == max(sum(r[4]) for r in naive)
    assert trace.evictions == sum(any(r[3]) for r in naive)
    table = trace.to_dict()
    assert set(map(len, table.values())) == {2 * len(naive)}
    assert table["layer"][:2] == [0, 2] and table["kept"][-2:] == list(naive[-1][2])


def test_a_long_decode_costs_a_few_spans():
    trace, kept = Trace((0,)), 100
    trace.record(100, 100, (100,), (0,), (1,))
    for step in range(100_000):
        kept += 1
        gone = 128 if kept == 256 else 0
        kept -= gone
        trace.record(1, 101 + step, (kept,), (gone,), (1,))
    assert len(trace) == 100_001
    assert len(trace._spans) < 2 * 100_000 // 128 + 10


def test_an_empty_trace():
    trace = Trace((0,))
    assert (len(trace), trace.mean_length, trace.peak_length, trace.peak_attended, trace.evicted) == (0, 0.0, 0, 0, 0)


def test_arrow_table():
    pyarrow = pytest.importorskip("pyarrow")
    trace = Trace((0, 1))
    trace.record(3, 3, (3, 3), (0, 0), (8, 8))
    table = trace.to_arrow()
    assert isinstance(table, pyarrow.Table) and table.num_rows == 2
