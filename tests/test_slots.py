"""Packing is a stable partition, and gathering undoes it."""

from __future__ import annotations

import torch

from kvretain.slots import pack, pack_index


def test_chosen_entries_come_first_in_order():
    entries = torch.arange(10, 17)
    chosen = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0] * 7, [1] * 7]).bool()
    slots = pack_index(chosen)
    packed = pack(entries, slots)
    assert packed.tolist() == [[11, 12, 15, 10, 13, 14, 16], list(range(10, 17)), list(range(10, 17))]
    assert torch.equal(packed.gather(-1, slots), entries.expand(3, -1))
    assert pack(entries[:0], pack_index(chosen[:, :0])).shape == (3, 0)
