"""Paged helpers against a dense reference: whatever blocks a sequence lies in, and whatever stays of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvretain import retain
from kvretain.serving import gather, plan_compaction

HEADS, SIZE = 2, 4


def pool_of(generator: torch.Generator, blocks: int, block_size: int, layout: str, dtype=torch.float32) -> torch.Tensor:
    shape = (blocks, block_size, HEADS, SIZE) if layout == "NHD" else (blocks, HEADS, block_size, SIZE)
    return torch.randn(shape, generator=generator).to(dtype)


def entry(pool: torch.Tensor, layout: str, block: int, offset: int) -> torch.Tensor:
    """``(H, D)`` of a slot, by the plainest indexing."""
    return pool[block, offset] if layout == "NHD" else pool[block, :, offset]


@st.composite
def paged(draw):
    """A pool with a sequence of some length in it, and what stays of it: one set for all heads, or one a head."""
    block_size, used = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    length = draw(st.integers((used - 1) * block_size + 1, used * block_size))
    blocks = draw(st.integers(used, used + 3))
    table = draw(st.permutations(range(blocks)))[:used]
    keep = draw(st.integers(0, length))
    sets = st.lists(st.permutations(range(length)), min_size=1, max_size=1)
    if draw(st.booleans()):
        sets = st.lists(st.permutations(range(length)), min_size=HEADS, max_size=HEADS)
    indices = torch.tensor([sorted(order[:keep]) for order in draw(sets)], dtype=torch.int64)
    layout = draw(st.sampled_from(["NHD", "HND"]))
    pool = pool_of(torch.Generator().manual_seed(draw(st.integers(0, 99))), blocks, block_size, layout)
    return pool, layout, block_size, table, length, indices


@settings(max_examples=200, deadline=None)
@given(paged(), st.integers(1, 4))
def test_what_stays_is_what_a_dense_cache_would_hold(case, chunk) -> None:
    pool, layout, block_size, table, length, indices = case
    before, dense = pool.clone(), gather(pool, torch.tensor([table]), [length], layout=layout)
    for slot in range(length):
        assert torch.equal(dense[0, :, slot], entry(pool, layout, table[slot // block_size], slot % block_size))
    plan = plan_compaction(indices, table, block_size)
    plan.apply_(pool, layout=layout, chunk=chunk)
    kept = indices.shape[1]
    expected = dense.gather(2, indices.expand(HEADS, -1)[None, :, :, None].expand(-1, -1, -1, SIZE))
    blocks = torch.tensor([plan.blocks], dtype=torch.int64).reshape(1, -1)
    assert torch.equal(gather(pool, blocks, [kept], layout=layout), expected)
    # As few blocks as can be; every block of the sequence is either used or free; no other block is touched.
    assert plan.length == kept and len(plan.blocks) == -(-kept // block_size)
    assert [*plan.blocks, *plan.free] == list(table)
    for block in set(range(len(pool))) - set(plan.blocks):
        assert torch.equal(pool[block], before[block])
    # No entry in front of the first hole moves.
    start = next((at for at in range(kept) if not (indices[:, at] == at).all()), kept)
    assert plan.moves == kept - start


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.sampled_from(["NHD", "HND"]), st.integers(0, 99))
def test_gather_pads_shorter_sequences_with_zeros(lengths, layout, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    pool = pool_of(generator, 16, 4, layout)
    pool[15] = torch.nan  # a block that no sequence has filled
    table = torch.full((len(lengths), 4), 15)
    order = torch.randperm(15, generator=generator).tolist()
    for row, length in enumerate(lengths):
        for at in range(-(-length // 4)):
            table[row, at] = order.pop()
    states = gather(pool, table, torch.tensor(lengths), layout=layout)
    assert states.shape == (len(lengths), HEADS, max(lengths), SIZE)
    for row, length in enumerate(lengths):
        assert (states[row, :, length:] == 0).all()
        for slot in range(length):
            assert torch.equal(states[row, :, slot], entry(pool, layout, int(table[row, slot // 4]), slot % 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("policy", ["keydiff", "keydiff@layer"])
def test_from_pool_to_pool(policy, dtype) -> None:
    """Gather, choose, plan, apply, for two sequences of different lengths in one pool with keys and values."""
    generator = torch.Generator().manual_seed(4)
    pool = torch.stack([pool_of(generator, 12, 4, "NHD", dtype) for _ in range(2)])
    keys, values = pool.unbind(0)
    table, lengths = torch.tensor([[7, 2, 5, 4, 9], [0, 1, 11, 0, 0]]), [18, 11]
    dense = [gather(part, table, lengths) for part in (keys, values)]
    indices = retain(*dense, policy=policy, budget=9, lengths=lengths)
    freed = []
    for row, own in enumerate(indices):
        plan = plan_compaction(own, table[row, : -(-lengths[row] // 4)], 4)
        for part in (keys, values):
            plan.apply_(part)
        freed += plan.free
        at = own[:, own[0] >= 0].expand(HEADS, -1)
        for part, states in zip((keys, values), dense, strict=True):
            expected = states[row].float().gather(1, at[..., None].expand(-1, -1, SIZE))
            found = gather(part, torch.tensor([plan.blocks]), [plan.length])[0].float()
            assert torch.equal(found, expected)
    assert freed == [4, 9]


def test_a_row_that_keeps_less_drops_its_padding() -> None:
    plan = plan_compaction(torch.tensor([[-1, -1, 0, 5], [-1, -1, 1, 2]]), [3, 8], 4)
    assert (plan.length, plan.blocks, plan.free) == (2, (3,), (8,))
    assert plan.source.tolist() == [[12, 33], [13, 14]] and plan.target.tolist() == [12, 13]
    assert plan_compaction(torch.empty(2, 0, dtype=torch.int64), [3, 8], 4).free == (3, 8)


def test_shared_blocks_are_not_written() -> None:
    kept = torch.tensor([*range(8), 9, 13])
    assert plan_compaction(kept, [3, 8, 1, 2], 4, shared=2).moves == 2
    with pytest.raises(ValueError, match=r"block 1, one of the 3 that are shared.*prompt=12"):
        plan_compaction(kept, [3, 8, 1, 2], 4, shared=3)
    keys, values = torch.randn(2, 1, HEADS, 16, SIZE, generator=torch.Generator().manual_seed(0))
    chosen = retain(keys, values, policy="knorm@layer", budget=10, prompt=8)[0]
    assert plan_compaction(chosen, [3, 8, 1, 2], 4, shared=2).free == (2,)


@pytest.mark.parametrize(
    ("indices", "blocks", "words"),
    [
        (torch.ones(2, 8, dtype=torch.bool), [0, 1], "a mask"),
        (torch.tensor([0.0, 1.0]), [0, 1], "must be int"),
        (torch.tensor([[[0]]]), [0, 1], "must be int"),
        (torch.tensor([1, 0]), [0, 1], "must rise"),
        (torch.tensor([1, 1]), [0, 1], "must rise"),
        (torch.tensor([0, 8]), [0, 1], "within the 8 slots"),
        (torch.tensor([0, -1]), [0, 1], "must rise"),
        (torch.tensor([[-1, 0], [0, 1]]), [0, 1], "different numbers"),
        (torch.tensor([[0, 1], [-1, 0]]), [0, 1], "must rise"),
        (torch.tensor([0, 1]), [4, 4], "names a block twice"),
    ],
)
def test_bad_plans(indices, blocks, words) -> None:
    with pytest.raises(ValueError, match=words):
        plan_compaction(indices, blocks, 4)


def test_bad_pools() -> None:
    pool, plan = torch.zeros(4, 4, HEADS, SIZE), plan_compaction(torch.tensor([[0, 2], [1, 2]]), [1, 3], 4)
    with pytest.raises(ValueError, match="NHD"):
        gather(pool, torch.tensor([[0]]), [1], layout="DHN")
    with pytest.raises(ValueError, match=r"pool.unbind\(0\)"):
        gather(torch.zeros(2, 4, 4, HEADS, SIZE), torch.tensor([[0]]), [1])
    with pytest.raises(ValueError, match="9 entries do not fit the 2 blocks"):
        gather(pool, torch.tensor([[0, 1]]), [9])
    with pytest.raises(ValueError, match="none of the pool's 4"):
        gather(pool, torch.tensor([[0, 4]]), [5])
    with pytest.raises(ValueError, match="a length for each row"):
        gather(pool, torch.tensor([[0, 1]]), [5, 5])
    with pytest.raises(ValueError, match="blocks of 4 slots and 2 heads; the pool has 8 and 2"):
        plan.apply_(torch.zeros(4, 8, HEADS, SIZE))
    with pytest.raises(ValueError, match="the pool has 4 and 3"):
        plan.apply_(torch.zeros(4, 4, 3, SIZE))
    with pytest.raises(ValueError, match="none of the pool's 3"):
        plan.apply_(pool[:3])
