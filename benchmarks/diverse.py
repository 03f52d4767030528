"""Time of α's selection per sequence, beside the matrix product of its cosines alone.

    python benchmarks/diverse.py        # 256 entries, 128 kept, 128 dimensions, on one CPU thread

Best of a few repetitions, in milliseconds of CPU time per sequence.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from kvretain import select_diverse


def best(repetitions: int, call: Callable[..., object], *args: object, **named: object) -> float:
    """CPU time in milliseconds, which other processes on the machine disturb little."""
    times = []
    for _ in range(repetitions):
        start = time.thread_time()
        call(*args, **named)
        times.append(time.thread_time() - start)
    return min(times) * 1e3


def products(vectors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.mm(row, row.T) for row in vectors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=256)
    parser.add_argument("--keep", type=int, default=128)
    parser.add_argument("--size", type=int, default=128, help="dimensions of a signature")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    print(f"{'rows':>5} {'max':>8} {'mean':>8} {'cosines':>8}")
    for rows in options.batch:
        scores = torch.randn(rows, options.entries, generator=rng)
        vectors = torch.nn.functional.normalize(torch.randn(rows, options.entries, options.size, generator=rng), dim=-1)
        protected = (torch.arange(options.entries) < 4).expand(rows, -1)
        taken = [
            best(options.repetitions, select_diverse, scores, vectors, options.keep, protected=protected, redundancy=r)
            for r in ("max", "mean")
        ]
        taken.append(best(options.repetitions, products, vectors.double()))
        print(f"{rows:>5} " + " ".join(f"{ms / rows:8.2f}" for ms in taken))


if __name__ == "__main__":
    main()
