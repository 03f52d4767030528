"""Decode speed and memory on a GPU with a randomly initialised model of 7B shape (weights do not matter for speed).

    python benchmarks/gpu.py                       # 16k tokens of context; DynamicCache and budgets side by side
    python benchmarks/gpu.py --layers 4 --context 2000 --device cpu --dtype float32     # a dry run anywhere

The caches are filled by chunked prefill, then decode in turn, block by block; medians over blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvretain import RetentionCache


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["snapkv", "snapkv+hub", "keydiff@model"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--context", type=int, default=16_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> LlamaForCausalLM:
    """Llama-3.1-8B's shape: 32 query heads, 8 KV heads of 128, width 4096."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=args.layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
    )
    torch.set_default_dtype(getattr(torch, args.dtype))
    with torch.device(args.device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def nbytes(cache) -> int:
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


@torch.no_grad()
def measure(model, make, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Prefill seconds, decode tokens/s (all rows together) and cache MiB a row of one cache."""
    tokens = torch.randint(10, 30_000, (batch, args.context), device=args.device)
    cache = make()
    sync(args.device)
    start = time.perf_counter()
    for at in range(0, args.context, args.chunk):
        model(tokens[:, at : at + args.chunk], past_key_values=cache, logits_to_keep=1)
    sync(args.device)
    prefill = time.perf_counter() - start
    token, times = tokens[:, :1], []
    for repeat in range(args.repeats + 1):
        sync(args.device)
        start = time.perf_counter()
        for _ in range(args.block):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
        sync(args.device)
        if repeat:
            times.append((time.perf_counter() - start) / args.block)
    return {
        "prefill_s": prefill,
        "tokens_per_s": batch / statistics.median(times),
        "least": batch / max(times),
        "most": batch / min(times),
        "mib_per_row": nbytes(cache) / batch / 2**20,
    }


def main() -> None:
    args = arguments()
    model = model_of(args)
    rows = []
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.device}", flush=True)
    print(
        "| batch | cache | prefill s | decode tokens/s (range) | cache MiB a row |\n|---|---|---|---|---|", flush=True
    )
    for batch in args.batch:
        makers = {"DynamicCache": lambda: DynamicCache(config=model.config)}
        for policy in args.policies:
            for budget in args.budgets:
                makers[f"{policy}, budget {budget}"] = lambda p=policy, b=budget: RetentionCache.for_model(
                    model, p, budget=b
                )
        for name, make in makers.items():
            row = {"batch": batch, "cache": name} | measure(model, make, args, batch)
            rows.append(row)
            print(
                f"| {batch} | {name} | {row['prefill_s']:.2f} | {row['tokens_per_s']:.1f} "
                f"({row['least']:.1f} to {row['most']:.1f}) | {row['mib_per_row']:.1f} |",
                flush=True,
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
