"""Columns and positions against a table that is written out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvretain.cache.columns import Columns

CPU = torch.device("cpu")


def naive(valid: torch.Tensor) -> torch.Tensor:
    """Positions (B, n) of a whole validity table."""
    table = torch.full(valid.shape, -1)
    for row in range(valid.shape[0]):
        position = 0
        for column in range(valid.shape[1]):
            if valid[row, column]:
                table[row, column] = position
                position += 1
    return table


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_positions_counts_crop_and_rows_equal_the_written_out_table(data):
    batch = data.draw(st.integers(1, 3))
    columns, table = Columns(), torch.zeros(batch, 0, dtype=torch.bool)
    for _ in range(data.draw(st.integers(1, 6))):
        action = data.draw(st.sampled_from(["append", "append", "append", "crop", "rows"]))
        if action == "append":
            new = data.draw(st.integers(1, 4))
            if data.draw(st.booleans()):
                valid = torch.ones(batch, new, dtype=torch.bool)
                columns.append(new, None, batch)
            else:
                bits = data.draw(st.lists(st.booleans(), min_size=batch * new, max_size=batch * new))
                valid = torch.tensor(bits).reshape(batch, new)
                columns.append(new, valid, batch)
            table = torch.cat([table, valid], 1)
        elif action == "crop" and table.shape[1]:
            gone = data.draw(st.integers(0, table.shape[1]))
            columns.crop(gone)
            table = table[:, : table.shape[1] - gone]
        elif action == "rows":
            rows = torch.tensor(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3)))
            columns.select(rows)
            table, batch = table[rows], len(rows)
        assert columns.seen == table.shape[1]
        expected = naive(table)
        start = data.draw(st.integers(0, columns.seen))
        stop = data.draw(st.integers(start, columns.seen))
        got = columns.positions(start, stop, CPU).expand(batch, -1)
        assert torch.equal(got, expected[:, start:stop])
        assert torch.equal(columns.counts(batch, CPU), table.sum(-1))


def test_the_prompt_ends_with_the_first_single_column_pass():
    columns = Columns()
    columns.append(1, None, 1)  # a prompt may be a single token
    columns.append(5, None, 1)
    assert columns.prompt == 6
    columns.append(1, None, 1)
    columns.append(4, None, 1)
    assert columns.prompt == 6 and columns.prompt_counts(1, CPU).tolist() == [6]


def test_without_padding_nothing_is_stored_per_step():
    columns = Columns()
    for _ in range(1000):
        columns.append(1, None, 2)
    assert columns.real is None and columns._runs == []


def test_after_padding_decoding_extends_one_run():
    columns = Columns()
    columns.append(3, torch.tensor([[False, True, True], [True, True, True]]), 2)
    for _ in range(100):
        columns.append(1, None, 2)
    assert len(columns._runs) == 2
    assert columns.positions(101, 103, CPU).tolist() == [[100, 101], [101, 102]]
    columns.forget(103)
    assert columns._runs == [] and columns.counts(2, CPU).tolist() == [102, 103]
