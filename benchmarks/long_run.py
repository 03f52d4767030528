"""Long generation under a small budget: time per token, bytes, and resident memory, thousand by thousand.

    python benchmarks/long_run.py                                   # small random model, 32k tokens, 1 CPU thread
    python benchmarks/long_run.py --model smollm2-135m --tokens 4000 --full 0

Every thousand tokens: milliseconds per token, bytes of the cache, and what the process holds. On a CPU the time is the
process's own (other work on the machine does not count); the clock's is printed beside it. The slope of time over
tokens comes with its 95 % interval (residuals drawn anew in runs of neighbours, since a machine's speed drifts). In
turn with it and on the same tokens, ``DynamicCache`` up to ``--full`` tokens, where time must grow.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvretain import RetentionCache, load_model

RANDOM = "random"
FEWEST = 7
"""Blocks below which no slope is reported."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=RANDOM, help="'random' (a small Llama), an embedded model, path or hub name")
    parser.add_argument("--policy", default="snapkv")
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--every", type=int, default=128)
    parser.add_argument("--trigger", default="slack")
    parser.add_argument("--tokens", type=int, default=32_000, help="tokens to decode")
    parser.add_argument("--marks", type=int, nargs="+", default=[20_000], help="report slopes up to these, too")
    parser.add_argument("--full", type=int, default=8_000, help="tokens that DynamicCache decodes")
    parser.add_argument("--block", type=int, default=1_000, help="tokens per line")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    return parser.parse_args()


def small_model() -> LlamaForCausalLM:
    """4 layers, 8 query heads that share 2 key/value heads of 32 dimensions; random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=131_072,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def resident() -> int:
    """Resident memory of this process in bytes; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


@torch.no_grad()
def decode(model, cache, tokens: torch.Tensor) -> tuple[float, float]:
    """Milliseconds a token for single-token passes over ``tokens (1, n)``: the process's own on a CPU; the clock's."""
    gpu = tokens.device.type == "cuda"
    start, own = time.perf_counter(), time.process_time()
    for token in tokens.split(1, 1):
        model(token, past_key_values=cache)
    if gpu:
        torch.cuda.synchronize()
    clock, own = time.perf_counter() - start, time.process_time() - own
    return 1000 * (clock if gpu else own) / tokens.shape[1], 1000 * clock / tokens.shape[1]


def slope(times: torch.Tensor, *, resamples: int = 5_000) -> tuple[float, float, float]:
    """Least-squares slope of ``times (n,)`` over their index, and a 95 % interval.

    The interval is a bootstrap of the residuals, drawn in runs of up to 4 neighbours. It is too narrow for few times.
    """
    steps = torch.arange(len(times), dtype=torch.float64)
    centred = steps - steps.mean()
    norm = centred.square().sum()
    fit = (centred * times).sum() / norm
    residuals = times - times.mean() - fit * centred
    run = max(1, min(4, len(times) // 5))
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(times) - run + 1, (resamples, -(-len(times) // run)), generator=generator)
    drawn = residuals[(starts[..., None] + torch.arange(run)).flatten(1)[:, : len(times)]]
    slopes = fit + (centred * drawn).sum(-1) / norm
    low, high = slopes.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return fit.item(), low, high


def nbytes(cache) -> int:
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


def report(name: str, rows: list[dict], key: str, block: int) -> dict:
    """Prints the slope of ``key`` over ``rows``, the first block (warm-up) left out."""
    times = torch.tensor([row[key] for row in rows[1:]], dtype=torch.float64)
    fit, low, high = (1000 * value * 1000 / block for value in slope(times))
    mean = times.mean().item()
    print(
        f"{name}, {block:,} to {len(rows) * block:,} tokens: {mean:.3f} ms a token on average; slope {fit:+.2f} us a "
        f"token per 1,000 tokens [{low:+.2f}, {high:+.2f}], {fit / mean / 10:+.3f} % per 1,000",
        flush=True,
    )
    return {"name": name, "tokens": len(rows) * block, "mean_ms": mean, "slope_us": fit, "low": low, "high": high}


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    # Renamed in transformers 5.18; the old name serves the whole supported range.
    warnings.filterwarnings("ignore", message=".*past_key_values.*deprecated")
    if args.model == RANDOM:
        model = small_model().to(args.device, getattr(torch, args.dtype))
    else:
        model, _ = load_model(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(10, vocabulary, (1, args.tokens), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(args.device)
    cache = RetentionCache.for_model(model, args.policy, budget=args.budget, every=args.every, trigger=args.trigger)
    full = DynamicCache(config=model.config)
    rows = []
    for number, part in enumerate(tokens.split(args.block, 1), 1):
        if part.shape[1] < args.block:
            break
        done = number * args.block
        spent, clock = decode(model, cache, part)
        row = {"tokens": done, "ms": spent, "clock ms": clock, "bytes": cache.nbytes}
        line = f"{done:>7,} tokens  {spent:.3f} ms ({clock:.1f} by the clock)  cache {row['bytes'] / 2**20:.2f} MiB"
        if done <= args.full:
            row["full ms"], row["full clock ms"] = decode(model, full, part)
            row["full bytes"] = nbytes(full)
            line += f"   DynamicCache {row['full ms']:.3f} ms, {row['full bytes'] / 2**20:.2f} MiB"
        if done >= args.full:
            full = None
        row["resident"] = resident()
        rows.append(row)
        print(f"{line}   process {row['resident'] / 2**20:.1f} MiB", flush=True)
    trace = cache.trace
    print(
        f"\n{len(trace):,} passes in the trace, {trace.evictions} evictions; after a pass the cache holds "
        f"{trace.mean_length:.2f} entries on average, {trace.peak_length:.0f} at most"
    )
    name = f"{args.policy}, budget {args.budget}, every {args.every} ({args.trigger})"
    slopes = [
        report(name, rows[: mark // args.block], "ms", args.block)
        for mark in sorted({*args.marks, len(rows) * args.block})
        if FEWEST * args.block <= mark <= len(rows) * args.block
    ]
    if (compared := [row for row in rows if "full ms" in row]) and len(compared) >= FEWEST:
        if len(compared) < len(rows):
            slopes.append(report("the same, only so far", compared, "ms", args.block))
        slopes.append(report("DynamicCache", compared, "full ms", args.block))
    if args.json:
        result = {"arguments": vars(args), "torch": torch.__version__, "rows": rows, "slopes": slopes}
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
