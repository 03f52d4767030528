"""What HubKV's correction adds to top-k: time of `hub_refine` + `select_topk` over that of `select_topk` alone.

    python benchmarks/refine.py        # 8 heads of 32,768 scores on one CPU thread; seconds

The two are timed in turn, by the thread's CPU time; a ratio is the median over repetitions. Cases: `plain`, neither
positions nor protected entries; `prefill`, 4 sinks, 32 recent entries and the positions of a whole prefill, shared by
the heads as the cache has them; `own`, the same stored for every head; `gaps`, positions after earlier evictions, other
ones in every head.
A large block of memory is taken and given back first, as any model does: from then on the C library keeps what is given
back, where before it returned it to the system, and every pass paid for fresh pages.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvretain import hub_refine, select_topk


def own_ms(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=32_768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--kept", type=int, nargs="+", default=[512, 3_277, 16_384])
    parser.add_argument("--repetitions", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.ones(7 << 20)
    rng = torch.Generator().manual_seed(0)
    shape = (args.batch, args.heads, args.entries)
    scores = torch.rand(shape, generator=rng) ** 8
    slots = torch.arange(args.entries)
    protected = ((slots < 4) | (slots >= args.entries - 32)).expand(shape)
    gaps = torch.randint(1, 4, shape, generator=rng).cumsum(-1)
    cases: dict[str, dict[str, torch.Tensor]] = {
        "plain": {},
        "prefill": {"protected": protected, "positions": slots.expand(shape)},
        "own": {"protected": protected.clone(), "positions": slots.expand(shape).clone()},
        "gaps": {"protected": protected.clone(), "positions": gaps},
    }
    print(f"{args.batch} x {args.heads} heads x {args.entries:,} scores, torch {torch.__version__}\n")
    print("| kept | case | top-k ms | hub_refine ms | ratio (middle half) |\n|---|---|---|---|---|")
    for keep in args.kept:
        for name, given in cases.items():
            chosen = {key: value for key, value in given.items() if key == "protected"}
            pairs = []
            for _ in range(args.repetitions + 1):
                alone = own_ms(lambda chosen=chosen, keep=keep: select_topk(scores, keep, **chosen))
                added = own_ms(lambda given=given, keep=keep: hub_refine(scores, 1 - keep / args.entries, **given))
                pairs.append((alone, added))
            pairs = pairs[1:]  # the first warms up
            low, middle, high = statistics.quantiles([1 + added / alone for alone, added in pairs], n=4)
            alone, added = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(
                f"| {keep:,} | {name} | {alone:.2f} | {added:.2f} | {middle:.2f} ({low:.2f} to {high:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
