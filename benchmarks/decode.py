"""Decode speed against context length: RetentionCache beside DynamicCache, in one run.

    python benchmarks/decode.py          # the embedded model, 1k, 4k and 8k tokens of context, 1 CPU thread
    python benchmarks/decode.py --device cuda --dtype bfloat16 --model PATH

Both caches read the same context (in chunks). At each length both then decode the same tokens in turn, block by block,
and with them a DynamicCache that has read only as many tokens as the budget: what a step would cost if the context
were that short. Each figure is the median over blocks; ratios are taken block by block, so that a drift of the
machine's speed cancels. Step times are the process's own on a CPU (other work on the machine does not count).
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time

import torch
from transformers import DynamicCache

from kvretain import RetentionCache, load_model

SHORT = "short DynamicCache"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="embedded model, path or hub name")
    parser.add_argument("--policy", default="snapkv")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--context", type=int, nargs="+", default=[1000, 4000, 8000], help="tokens of context, rising")
    parser.add_argument("--block", type=int, default=16, help="tokens decoded per timing; evictions come every 128")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chunk", type=int, default=512, help="tokens per prefill chunk")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    return parser.parse_args()


@torch.no_grad()
def decode(model, cache, token: torch.Tensor, count: int) -> float:
    """Seconds for ``count`` single-token passes."""
    gpu = token.device.type == "cuda"
    clock = time.perf_counter if gpu else time.process_time
    if gpu:
        torch.cuda.synchronize()
    start = clock()
    for _ in range(count):
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    if gpu:
        torch.cuda.synchronize()
    return clock() - start


def nbytes(cache) -> int:
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    model, _ = load_model(args.model, dtype=getattr(torch, args.dtype), device=args.device)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(10, vocabulary, (1, max(args.context)), generator=generator).to(args.device)
    caches = {
        "DynamicCache": DynamicCache(config=model.config),
        f"{args.policy}, budget {args.budget}": RetentionCache.for_model(model, args.policy, budget=args.budget),
    }
    short = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[:, : args.budget], past_key_values=short, logits_to_keep=1)
    full, retained = caches
    rows, done = [], 0
    for context in args.context:
        for cache in caches.values():
            for start in range(done, context, args.chunk):
                with torch.no_grad():
                    chunk = tokens[:, start : min(start + args.chunk, context)]
                    model(chunk, past_key_values=cache, logits_to_keep=1)
        done = context
        copies = {name: copy.deepcopy(cache) for name, cache in (caches | {SHORT: short}).items()}
        times: dict[str, list[float]] = {name: [] for name in copies}
        for repeat in range(args.repeats + 1):
            for name, cache in copies.items():
                seconds = decode(model, cache, tokens[:, :1], args.block)
                if repeat:  # the first block warms up
                    times[name].append(seconds / args.block)
        row: dict = {"context": context}
        for key, top, bottom in (("speedup", full, retained), ("against_short", retained, SHORT)):
            ratios = sorted(a / b for a, b in zip(times[top], times[bottom], strict=True))
            row[key] = [statistics.median(ratios), ratios[0], ratios[-1]]
        for name, values in times.items():
            row[name] = {"tokens_per_s": 1 / statistics.median(values), "mib": nbytes(copies[name]) / 2**20}
        rows.append(row)
        print(f"context {context} is done", flush=True)
    print(
        f"\n| context | {full} tokens/s | {retained} tokens/s | speed-up (range over {args.repeats} blocks) "
        f"| step / step of {SHORT} at {args.budget} tokens | {full} MiB | {retained} MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        ratios = ["{:.2f} ({:.2f} to {:.2f})".format(*row[key]) for key in ("speedup", "against_short")]
        print(
            f"| {row['context']} | {row[full]['tokens_per_s']:.2f} | {row[retained]['tokens_per_s']:.2f} | "
            f"{' | '.join(ratios)} | {row[full]['mib']:.1f} | {row[retained]['mib']:.1f} |"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
