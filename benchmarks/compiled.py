"""Decoding with a compiled model beside the same model without: milliseconds a token, evictions between steps.

    python benchmarks/compiled.py                        # a small random model, inductor, 1 CPU thread; a minute
    python benchmarks/compiled.py --model smollm2-135m
    python benchmarks/compiled.py --device cuda --dtype bfloat16 --mode reduce-overhead      # CUDA graphs

Both decode in turn, block by block, the same tokens from the same prompt; the ratio is the median over blocks. On a CPU
the time is the process's own. The number of graphs that were compiled is printed: one, whatever the length.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from long_run import small_model
from torch._dynamo.utils import counters

from kvretain import CompiledDecoding, RetentionCache, load_model


def timed(step, token: torch.Tensor, count: int) -> float:
    """Milliseconds a token."""
    gpu = token.device.type == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    if gpu:
        torch.cuda.synchronize()
    start = clock()
    for _ in range(count):
        step(token)
    if gpu:
        torch.cuda.synchronize()
    return (clock() - start) / count * 1e3


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random", help="'random', an embedded model, path or hub name")
    parser.add_argument("--policy", default="keydiff")
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--block", type=int, default=64, help="tokens per timing, two evictions by default")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--mode", default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.model == "random":
        model = small_model().to(args.device, getattr(torch, args.dtype))
    else:
        model, _ = load_model(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    prompt = torch.randint(10, 500, (1, args.prompt), generator=torch.Generator().manual_seed(0)).to(args.device)
    plain = RetentionCache.for_model(model, args.policy, budget=args.budget, every=args.every)
    model(prompt, past_key_values=plain)
    fixed = copy.deepcopy(plain)
    token = prompt[:, :1]
    mode = {"mode": args.mode} if args.mode else {}
    steps = {
        "plain": lambda token: model(token, past_key_values=plain).logits,
        "compiled": CompiledDecoding(model, fixed, backend=args.backend, **mode),
    }
    start = time.perf_counter()
    difference = max((steps["plain"](token) - steps["compiled"](token)).abs().max().item() for _ in range(args.block))
    print(f"first block {time.perf_counter() - start:.1f} s, logits differ by at most {difference:.1e}", flush=True)
    rows = [[timed(step, token, args.block) for step in steps.values()] for _ in range(args.repeats)]
    ours, theirs = (statistics.median(times) for times in zip(*rows, strict=True))
    low, middle, high = statistics.quantiles([a / b for a, b in rows], n=4)
    print(
        f"{args.model}, {args.policy}, budget {args.budget}, every {args.every}, {args.backend}: plain {ours:.3f} ms, "
        f"compiled {theirs:.3f} ms a token, x{middle:.2f} ({low:.2f} to {high:.2f})\n"
        f"{plain.trace.evictions} evictions, {counters['stats']['unique_graphs']} graph, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
