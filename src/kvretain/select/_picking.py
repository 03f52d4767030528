"""Greedy picking on a GPU: one launch for all picks of all rows that are given. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WIDEST = 8192
"""Most entries of a row: one program holds them all in registers. A row's table takes 512 MiB then."""


@triton.jit
def _pick(beside_at, now_at, order_at, size, count: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, block)
    inside = entries < size
    now = tl.load(now_at + row * size + entries, mask=inside, other=-float("inf"))
    pick = tl.load(order_at + row * count)
    for step in range(1, count):
        beside = tl.load(beside_at + (row * size + pick) * size + entries, mask=inside, other=-float("inf"))
        now = tl.minimum(now, beside)
        pick = tl.argmax(now, 0, tie_break_left=True).to(tl.int64)
        tl.store(order_at + row * count + step, pick)


def picks_from(beside: Tensor, now: Tensor, pick: Tensor, count: int) -> Tensor:
    """Picks ``(R, count)`` int64, of which ``pick (R,)`` is the first: after each, ``now (R, N)`` falls to row ``pick``
    of ``beside (R, N, N)`` where that is less, and its largest is next, the first of equal ones.

    Nothing but comparisons, so that the picks are those of any other device.

    Args:
        beside, now: float64, contiguous, without NaN; ``N`` at most :data:`WIDEST`. They are not changed.
    """
    rows, size = now.shape
    # A few picks too many, so that few counts need a kernel of their own.
    order = pick[:, None].repeat(1, -(-count // 32) * 32)
    block, warps = triton.next_power_of_2(size), 4 if size <= 1024 else 8
    _pick[(rows,)](beside, now, order, size, count=order.shape[1], block=block, num_warps=warps)
    return order[:, :count]
