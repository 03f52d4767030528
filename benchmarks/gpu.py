"""Kernels checked and timed, then decode speed and memory of a 7B-shaped model, on a GPU: one run, under 8 minutes.

    python benchmarks/gpu.py                       # 16k tokens of context; DynamicCache and budgets 128 to 4096
    python benchmarks/gpu.py --layers 2 --context 600 --budgets 128 --block 8 --repeats 2 --backend eager \\
        --device cpu --dtype float32               # a dry run anywhere, minutes

*Kernels.* ``hub_refine`` against itself on the CPU in float64, picks against the CPU's own, ``trig_scores`` against
its formula written out in float64; then each one's time beside the least time that moving its inputs and outputs once
would take at the bandwidth of a large copy.

*Decoding.* Randomly initialised weights; they do not matter for speed. A cache reads the context in chunks, decodes
alone, then the row is repeated to as many as memory holds (fewer, if that many do not run) and they decode together;
8 rows at most where heads differ, since those are attended to one after the other. The last row decodes compiled,
alone. Medians over blocks. What ``--minutes`` leave no time for is named as left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvretain import CompiledDecoding, RetentionCache, hub_refine, select_diverse, select_topk, trig_scores
from kvretain.cache.ragged import RaggedLayer
from kvretain.scores.trig import OFFSETS

MOST_ROWS, MOST_UNEQUAL = 2048, 8
"""Largest batch tried, and where heads differ."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["snapkv+hub", "keydiff@model", "keydiff@shared"])
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--context", type=int, default=16_000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--minutes", type=float, default=6, help="start no new cache after this long")
    parser.add_argument("--compiled", type=int, default=1024, metavar="BUDGET", help="of the compiled row; 0: none")
    parser.add_argument("--backend", default="inductor", help="of the compiled row")
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


def seconds(work: Callable[[], object], device: str) -> float:
    """Median seconds of 9 runs of ``work``, after two that warm up; on a CPU, where it is a dry run, of one."""
    times, warm = [], 2 if device == "cuda" else 0
    for repeat in range(warm + (9 if device == "cuda" else 1)):
        sync(device)
        start = time.perf_counter()
        work()
        sync(device)
        if repeat >= warm:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def bandwidth(device: str) -> float:
    """Bytes a second, read and written together, of a large copy."""
    source = torch.ones(2**28 if device == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), device)


def kernels(device: str) -> list[dict]:
    """Every kernel checked against its reference, then timed. Raises AssertionError where one is wrong."""
    speed, rows = bandwidth(device), []
    print(f"copy bandwidth {speed / 2**30:.0f} GiB/s\n")
    print("| kernel | shape | ms | least ms | share of the bound |\n|---|---|---|---|---|")

    def report(name: str, shape: str, work: Callable[[], object], *moved: Tensor) -> None:
        took, least = seconds(work, device), sum(t.nbytes for t in moved) / speed
        rows.append({"kernel": name, "shape": shape, "ms": 1000 * took, "share": least / took})
        print(f"| {name} | {shape} | {1000 * took:.3f} | {1000 * least:.3f} | {least / took:.0%} |", flush=True)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))

    for size, keep in ((4096, 512), (32_768, 3_277)):
        scores = random(1, 8, size).abs()
        ratio = 1 - keep / size
        own = hub_refine(scores.to(device), ratio)
        torch.testing.assert_close(own.cpu().double(), hub_refine(scores.double(), ratio), atol=1e-5, rtol=1e-5)
        moved = scores.to(device)
        assert torch.equal(select_topk(moved, keep).cpu(), select_topk(scores, keep)), "select_topk"
        report("hub_refine", f"8 x {size:,}", lambda m=moved, r=ratio: hub_refine(m, r), moved, own)
        report("select_topk", f"8 x {size:,}, {keep:,} kept", lambda m=moved, k=keep: select_topk(m, k), moved)
    for count, size, keep in ((1, 256, 128), (64, 256, 128), (512, 256, 128), (8, 2048, 1024)):
        scores, signatures = random(count, size), torch.nn.functional.normalize(random(count, size, 128), dim=-1)
        both = scores.to(device), signatures.to(device)
        with launches() as kernel:
            own = select_diverse(*both, keep, weight=0.5)
        assert device != "cuda" or kernel.called, "select_diverse did not use its kernel: is Triton installed?"
        assert torch.equal(own.cpu(), select_diverse(scores, signatures, keep, weight=0.5)), "select_diverse"
        shape = f"{count} x {size} of 128, {keep} kept"
        report("select_diverse", shape, lambda b=both, k=keep: select_diverse(*b, k, weight=0.5), *both)
    for batch, size in ((1, 4096), (8, 4096), (1, 32_768)):
        keys, real, imaginary = random(batch, 8, size, 128), random(32, 64), random(32, 64)
        mean, frequency = torch.complex(real, imaginary), 10_000.0 ** -(torch.arange(64) / 64)
        given = [t.to(device) for t in (keys, mean, mean.abs() + 1, frequency)]
        own = trig_scores(*given, size)
        for part in (slice(0, 128), slice(size - 128, size)):
            positions, host = torch.arange(size)[part], [t.cpu() for t in given[1:]]
            exact = trig_reference(keys[:, :, part], *host, size, positions)
            torch.testing.assert_close(own[..., part].cpu().double(), exact, atol=1e-3, rtol=1e-5)
        shape = f"{batch} x 8 x {size:,} of 128, 32 query heads"
        report("trig_scores", shape, lambda g=given, n=size: trig_scores(*g, n), given[0], own)
    return rows


def launches():
    """Counts the launches of the kernel that picks, where there is one; a context manager."""
    try:
        from kvretain.select import _picking
    except ImportError:  # no Triton
        return contextlib.nullcontext(mock.Mock(called=False))
    return mock.patch.object(_picking, "picks_from", wraps=_picking.picks_from)


def trig_reference(
    keys: Tensor, mean: Tensor, absolute: Tensor, frequency: Tensor, next_position: int, positions: Tensor
) -> Tensor:
    """The score as TriAttention writes it, ``(B, Hq, n)`` float64: keys turned back by their ``positions (n,)``, an
    angle for each distance, query head, key and pair."""
    mean, absolute, frequency = mean.to(torch.complex128), absolute.double(), frequency.double()
    turns = torch.polar(torch.ones(len(positions), len(frequency)).double(), -positions[:, None] * frequency)
    plain = torch.complex(*keys.double().chunk(2, -1)) * turns  # (B, H, n, F)
    plain = plain.repeat_interleave(len(mean) // keys.shape[1], 1)  # (B, Hq, n, F)
    lengths, phases = plain.abs(), mean.angle()[:, None] - plain.angle()
    scores = (lengths * (absolute - mean.abs())[:, None]).sum(-1)
    for offset in OFFSETS:
        angles = (next_position - positions + offset)[:, None] * frequency + phases
        scores += (mean.abs()[:, None] * lengths * angles.cos()).sum(-1) / len(OFFSETS)
    return scores


def nbytes(cache) -> int:
    if isinstance(cache, RetentionCache):
        return cache.nbytes
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


@torch.no_grad()
def filled(model, cache, args: argparse.Namespace) -> float:
    """Seconds to read the context of one row, in chunks."""
    tokens = torch.randint(10, 30_000, (1, args.context), generator=torch.Generator().manual_seed(0)).to(args.device)
    sync(args.device)
    start = time.perf_counter()
    for part in tokens.split(args.chunk, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
    sync(args.device)
    return time.perf_counter() - start


@torch.no_grad()
def decode(model, cache, args: argparse.Namespace, batch: int, compiled: bool) -> dict:
    """Tokens per second of all rows together, the median over blocks and its range."""
    token, times = torch.full((batch, 1), 7, device=args.device), []
    if compiled:
        step = CompiledDecoding(model, cache, backend=args.backend)
    else:

        def step(token):
            return model(token, past_key_values=cache).logits

    for repeat in range(args.repeats + 1):
        sync(args.device)
        start = time.perf_counter()
        for _ in range(args.block):
            token = step(token)[:, -1:].argmax(-1)
        sync(args.device)
        if repeat:  # the first block warms up, or compiles
            times.append((time.perf_counter() - start) / args.block)
    return {
        "batch": batch,
        "tokens_per_s": batch / statistics.median(times),
        "least": batch / max(times),
        "most": batch / min(times),
        "mib_per_row": nbytes(cache) / batch / 2**20,
    }


def room(device: str, cache) -> int:
    """Rows that fit beside the first; a layer is held twice for a moment, and logits and activations need room."""
    if device != "cuda":
        return 4
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    most = MOST_UNEQUAL if any(isinstance(layer, RaggedLayer) for layer in cache.layers) else MOST_ROWS
    return min(most, int(0.85 * free / (nbytes(cache) * (1 + 2 / len(cache.layers)))))


def rows_of(model, make: Callable, args: argparse.Namespace, compiled: bool) -> list[dict]:
    """One cache: alone, then, if not compiled, with as many rows as fit."""
    cache = make()
    prefill = filled(model, cache, args)
    rows = [{"prefill_s": prefill} | decode(model, cache, args, 1, compiled)]
    batch = 1 if compiled else room(args.device, cache)
    while batch > 1:
        try:
            cache.batch_repeat_interleave(batch)
            return [*rows, {"prefill_s": None} | decode(model, cache, args, batch, False)]
        except torch.cuda.OutOfMemoryError:
            batch = batch * 3 // 4
        cache = None
        torch.cuda.empty_cache()
        cache = make()
        filled(model, cache, args)
    return rows


def main() -> None:
    args = arguments()
    began = time.perf_counter()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.device}\n", flush=True)
    checked = kernels(args.device)
    model = model_of(args)
    makers: dict[str, Callable] = {"DynamicCache": lambda: DynamicCache(config=model.config)}
    for budget in args.budgets:
        for policy in args.policies:
            name = f"{policy}, budget {budget}"
            makers[name] = lambda p=policy, b=budget: RetentionCache.for_model(model, p, budget=b)
    compiled = f"keydiff, budget {args.compiled}, compiled"
    if args.compiled:
        makers[compiled] = lambda: RetentionCache.for_model(model, "keydiff", budget=args.compiled)
    print(
        "\n| cache | batch | prefill s | decode tokens/s (range) | cache MiB a row |\n|---|---|---|---|---|", flush=True
    )
    rows, left = [], []
    for name, make in makers.items():
        if time.perf_counter() - began > 60 * args.minutes:
            left.append(name)
            continue
        for row in rows_of(model, make, args, name == compiled):
            rows.append({"cache": name} | row)
            prefill = "" if row["prefill_s"] is None else f"{row['prefill_s']:.2f}"
            print(
                f"| {name} | {row['batch']} | {prefill} | {row['tokens_per_s']:.1f} "
                f"({row['least']:.1f} to {row['most']:.1f}) | {row['mib_per_row']:.1f} |",
                flush=True,
            )
        if args.json:  # after every cache, so that a run cut short loses nothing
            with open(args.json, "w") as file:
                versions = {"torch": torch.__version__, "transformers": transformers.__version__}
                json.dump({"arguments": vars(args), **versions, "kernels": checked, "rows": rows}, file, indent=1)
    if left:
        print(f"\nno time was left for: {'; '.join(left)}")


if __name__ == "__main__":
    main()
