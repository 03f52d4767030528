"""Paged caches: one sequence's entries out of a pool of blocks, and what stays of them back into fewer blocks.

::

    block table     7    2    5    4      blocks of 4 slots; slot s of the sequence is slot s % 4 of block table[s // 4]
    slots          0123 4567 89ab cd..    14 entries
    kept           0  3 4    89   cd      indices of `retain`, ascending
    compacted      0348 9cd.              7 entries in the blocks 7 and 2; 5 and 4 are free

Entries move towards the front and stay in order, so a plan is applied in place. Keys keep their rotation: the engine
must go on counting positions from the tokens *seen*, and attend to the entries *kept*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("NHD", "HND")
"""What a pool's dimensions are after the block: ``NHD`` is ``(blocks, block_size, H, D)`` as in FlashAttention and
vLLM's default, ``HND`` is ``(blocks, H, block_size, D)``."""


def _by_slot(pool: Tensor, layout: str) -> Tensor:
    """``pool`` as a view ``(blocks, block_size, H, D)``."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(map(repr, LAYOUTS))}, not {layout!r}")
    if pool.ndim != 4:
        raise ValueError(
            f"a pool has 4 dimensions ({layout}), not the {pool.ndim} of {tuple(pool.shape)}: take keys and values "
            "apart first, e.g. pool.unbind(0) or pool.unbind(1)"
        )
    return pool if layout == "NHD" else pool.transpose(1, 2)


def gather(pool: Tensor, table: Tensor, lengths: Sequence[int] | Tensor, *, layout: str = "NHD") -> Tensor:
    """The keys (or values) of sequences, out of a pool of blocks.

    Args:
        pool: all blocks, see :data:`LAYOUTS`.
        table: ``(B, M)`` int, the blocks of each sequence in order; what stands behind the last one used is not read.
        lengths: ``B`` numbers: entries of each sequence.
        layout: ``"NHD"`` or ``"HND"``.

    Returns:
        ``(B, H, N, D)`` with ``N`` the largest length, a copy, 0 behind a shorter sequence; :func:`kvretain.retain`
        takes it with the same ``lengths``.

    Raises:
        ValueError: a layout that is unknown, or lengths and a table that do not fit the pool.
    """
    slots = _by_slot(pool, layout)
    counts = torch.as_tensor(lengths, device=pool.device)
    if table.ndim != 2 or counts.shape != table.shape[:1]:
        raise ValueError(
            f"table must be (B, M) with a length for each row, not {tuple(table.shape)} and {tuple(counts.shape)}"
        )
    size, width = slots.shape[1], int(counts.max()) if len(counts) else 0
    if width > table.shape[1] * size:
        raise ValueError(f"{width} entries do not fit the {table.shape[1]} blocks of {size} slots in the table")
    at = torch.arange(width, device=pool.device)
    real = at < counts[:, None]
    blocks = table.to(pool.device, torch.int64)[:, at // size].masked_fill(~real, 0)
    if bool(((blocks < 0) | (blocks >= len(slots)))[real].any()):
        raise ValueError(f"the table names blocks that are none of the pool's {len(slots)}")
    states = slots[blocks, at % size]
    # 8-bit floats cannot be filled, but their zero is the byte 0.
    (states.view(torch.uint8) if states.element_size() == 1 else states)[~real] = 0
    return states.transpose(1, 2)


@dataclass(frozen=True)
class Compaction:
    """How one sequence's kept entries move to the front of its blocks; the same for keys, values and all layers that
    share the indices.

    Attributes:
        length: entries kept.
        blocks: block ids that still hold entries, in order: the new block table.
        free: block ids that hold none any more, in order.
        source: ``(H or 1, n)`` int64, slots that move, as ``block * block_size + offset``.
        target: ``(n,)`` int64, where they go, in the same numbers.
        block_size: slots of a block.
    """

    length: int
    blocks: tuple[int, ...]
    free: tuple[int, ...]
    source: Tensor
    target: Tensor
    block_size: int

    @property
    def moves(self) -> int:
        """Slots that are written."""
        return len(self.target)

    def apply_(self, pool: Tensor, *, layout: str = "NHD", chunk: int = 4096) -> None:
        """Moves the entries within ``pool``, in place; at most ``chunk`` slots are held beside it at a time.

        Raises:
            ValueError: a pool that does not fit.
        """
        slots = _by_slot(pool, layout)
        heads = slots.shape[2]
        if slots.shape[1] != self.block_size or self.source.shape[0] not in (1, heads):
            raise ValueError(
                f"the plan is for blocks of {self.block_size} slots and {self.source.shape[0]} heads; the pool has "
                f"{slots.shape[1]} and {heads}"
            )
        if max(self.blocks + self.free, default=-1) >= len(slots):
            raise ValueError(f"the plan names blocks that are none of the pool's {len(slots)}")
        every = torch.arange(heads, device=pool.device)
        # Each entry moves to a slot that is not behind its own, so no slot is read after it has been written.
        for source, target in zip(self.source.split(chunk, 1), self.target.split(chunk), strict=True):
            source, target = source.to(pool.device).T, target.to(pool.device)[:, None]  # (n, H or 1), (n, 1)
            moved = slots[source // self.block_size, source % self.block_size, every]
            slots[target // self.block_size, target % self.block_size, every] = moved


def plan_compaction(indices: Tensor, blocks: Sequence[int] | Tensor, block_size: int, *, shared: int = 0) -> Compaction:
    """Plans how the entries at ``indices`` of one sequence move to the front of its blocks.

    Args:
        indices: ``(K,)``, one set for all heads, or ``(H, K)``, one a head, int64: a row of what
            :func:`kvretain.retain` returns; leading -1 are dropped. Heads may keep different entries, as each has its
            own part of a slot, but must keep equally many.
        blocks: the sequence's block ids in order.
        block_size: slots of a block.
        shared: so many of the first blocks belong to other sequences, too (a prefix cache), and must not be written.

    Raises:
        ValueError: a mask (heads that keep different numbers free no block that all share), indices that do not rise or
            lie outside the blocks, a block named twice, or a move into a shared block.

    Example:
        >>> plan = plan_compaction(torch.tensor([0, 3, 4, 8, 9, 12, 13]), [7, 2, 5, 4], 4)
        >>> plan.blocks, plan.free, plan.moves
        ((7, 2), (5, 4), 6)
    """
    if indices.dtype == torch.bool:
        raise ValueError(
            "a mask says that heads keep different numbers of entries, but a slot of a block has a part for every "
            "head: choose by a policy with one of the scopes head, layer, model or aligned"
        )
    if indices.ndim not in (1, 2) or indices.is_floating_point():
        raise ValueError(f"indices must be int, (K,) or (H, K), not {tuple(indices.shape)} {indices.dtype}")
    kept = (indices if indices.ndim == 2 else indices[None]).to("cpu", torch.int64)
    padding = int((kept[:1] < 0).cumprod(1).sum())
    if bool((kept[:, :padding] >= 0).any()):
        raise ValueError("heads keep different numbers of entries: indices must have as many leading -1 in each")
    kept = kept[:, padding:]
    ids = tuple(int(block) for block in (blocks.tolist() if isinstance(blocks, Tensor) else blocks))
    if len(set(ids)) != len(ids):
        raise ValueError(f"blocks names a block twice: {list(ids)}")
    if bool((kept < 0).any()) or bool((kept >= len(ids) * block_size).any()) or bool((kept.diff(dim=1) <= 0).any()):
        raise ValueError(f"indices must rise within the {len(ids) * block_size} slots of the blocks")
    length = kept.shape[1]
    used = -(-length // block_size)
    at = torch.arange(length)
    # The first hole: everything behind it moves.
    moved = (kept != at).any(0)
    start = int(moved.to(torch.int8).argmax()) if bool(moved.any()) else length
    if start < length and start // block_size < shared:
        raise ValueError(
            f"entries would move into block {ids[start // block_size]}, one of the {shared} that are shared: keep "
            f"what they hold (retain(..., prompt={shared * block_size})), or copy them first"
        )
    table = torch.tensor(ids, dtype=torch.int64)

    def slot(entries: Tensor) -> Tensor:
        return table[entries // block_size] * block_size + entries % block_size

    return Compaction(length, ids[:used], ids[used:], slot(kept[:, start:]), slot(at[start:]), block_size)
