"""TriAttention's scores beside one matrix product of the same size.

    python benchmarks/trig.py        # one CPU thread, float32; half a minute

The product is that of the query vectors `(B, H, G, D)` with the cached keys `(B, H, N, D)`, as attention forms it:
`torch.matmul(q, k.transpose(-1, -2))`. Both are timed in turn by the thread's CPU time; a ratio is the median over
repetitions. For few keys a fixed cost of a few dozen small operations is most of the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvretain import trig_scores

SHAPES = [(1, 8, 4, 384, 128), (8, 8, 4, 384, 128), (1, 8, 4, 4096, 128), (8, 8, 4, 4096, 128), (1, 8, 4, 32_768, 128)]


def own_ms(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    print(f"torch {torch.__version__}\n\n| B, H, G, N, D | product ms | trig_scores ms | ratio (middle half) |")
    print("|---|---|---|---|")
    for batch, heads, groups, size, width in SHAPES:
        keys = torch.randn(batch, heads, size, width, generator=rng)
        queries = torch.randn(batch, heads, groups, width, generator=rng)
        mean = torch.randn(heads * groups, width // 2, dtype=torch.complex64, generator=rng)
        speeds = 10_000 ** (-torch.arange(width // 2) / (width // 2))
        pairs = []
        for _ in range(args.repetitions + 1):
            product = own_ms(lambda q=queries, k=keys: torch.matmul(q, k.transpose(-1, -2)))
            ours = own_ms(lambda k=keys, m=mean, s=speeds, n=size: trig_scores(k, m, m.abs() + 1, s, n))
            pairs.append((product, ours))
        pairs = pairs[1:]  # the first warms up
        low, middle, high = statistics.quantiles([ours / product for product, ours in pairs], n=4)
        product, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
        shape = ", ".join(f"{n:,}" for n in (batch, heads, groups, size, width))
        print(f"| {shape} | {product:.2f} | {ours:.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) |", flush=True)


if __name__ == "__main__":
    main()
