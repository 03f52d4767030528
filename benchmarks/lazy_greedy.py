"""Evaluations of the coverage objective by exact, lazy and stochastic greedy, and what each set covers.

    python benchmarks/lazy_greedy.py        # 500 to 2000 entries, a tenth of them kept; seconds on one CPU thread

Scores are heavy-tailed and clustered, as attention has them; the weights are HubKV's local coverage (a triangle of
width 5).
"""

from __future__ import annotations

import argparse
import time

import torch

from kvretain import coverage, select_topk
from kvretain.select import greedy_path
from kvretain.theory import local_weights


def clustered(size: int, seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    smeared = torch.nn.functional.avg_pool1d(torch.rand(1, size, generator=rng) ** 8, 5, 1, 2)[0]
    return smeared + 0.1 * torch.rand(size, generator=rng) ** 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--kept", type=float, default=0.1, help="fraction of the entries")
    parser.add_argument("--epsilon", type=float, default=0.1, help="of stochastic greedy")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| entries | kept | method | evaluations | exact / this | seconds | F / F(exact) |")
    print("|---|---|---|---|---|---|---|")
    for size in args.entries:
        scores = clustered(size, args.seed)
        weights, keep = local_weights(scores), max(1, round(args.kept * size))
        exact = None
        for method in ("greedy", "lazy", "stochastic"):
            start = time.perf_counter()
            path = greedy_path(weights, keep, method=method, epsilon=args.epsilon)
            seconds = time.perf_counter() - start
            exact = exact or path
            assert method != "lazy" or torch.equal(path.order, exact.order)
            saved, covered = exact.evaluations / path.evaluations, path.gains.sum() / exact.gains.sum()
            row = f"| {size} | {keep} | {method} | {path.evaluations:,} | {saved:.1f} | {seconds:.2f} | {covered:.4f} |"
            print(row, flush=True)
        covered = coverage(weights, select_topk(scores, keep)) / exact.gains.sum()
        print(f"| {size} | {keep} | top-k | 0 | | | {covered:.4f} |", flush=True)


if __name__ == "__main__":
    main()
