"""What a decoded token and an eviction cost, against the memory traffic they cannot avoid; and where the time goes.

    python benchmarks/cost_model.py                    # the embedded model, 1 CPU thread, about 4 minutes
    python benchmarks/cost_model.py --dtype bfloat16 --policy keydiff

*Bound.* A decoded token reads all weights and every stored entry once; an eviction reads every key once and moves the
entries that stay (read and write). Bytes over the bandwidth of a large ``copy_`` on this machine is the least time;
``share`` is that least time over the time measured. With several rows the weights' products are no longer bound by
memory, so that the share falls: the weights are read once, but multiplied once for each row.

*Where the time goes.* Ordinary steps, by timers around the linear layers, the attention modules without their linear
layers and the cache, and the cache's ``update``. Times are the process's own on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch

from kvretain import RetentionCache, load_model


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="embedded model, path or hub name")
    parser.add_argument("--policy", default="snapkv")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4000, 8000], help="tokens seen before decoding")
    parser.add_argument("--every", type=int, default=32)
    parser.add_argument("--steps", type=int, default=96, help="decoded tokens; every 32nd evicts by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    return parser.parse_args()


def bandwidth(dtype: torch.dtype, *, mib: int = 256, repeats: int = 9) -> float:
    """Bytes a second, read and written together, of copying ``mib`` MiB."""
    source = torch.ones(mib * 2**20 // dtype.itemsize, dtype=dtype)
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        target.copy_(source)
        times.append(time.process_time() - start)
    return 2 * source.nbytes / statistics.median(times)


class Timers:
    """Seconds spent in named parts of a forward pass; the time of inner parts is taken off the outer ones."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[list] = []

    def start(self, part: str) -> None:
        self._open.append([part, time.process_time(), 0.0])

    def stop(self) -> None:
        part, start, inner = self._open.pop()
        spent = time.process_time() - start
        self.seconds[part] = self.seconds.get(part, 0.0) + spent - inner
        if self._open:
            self._open[-1][2] += spent

    @contextmanager
    def around(self, model: torch.nn.Module, cache: RetentionCache):
        handles = []
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                part = "linear layers"
            elif name.endswith("self_attn"):
                part = "attention"
            else:
                continue
            handles.append(module.register_forward_pre_hook(lambda *_, part=part: self.start(part)))
            handles.append(module.register_forward_hook(lambda *_: self.stop()))
        update: Callable = cache.update

        def timed(*args, **kwargs):
            self.start("cache update")
            try:
                return update(*args, **kwargs)
            finally:
                self.stop()

        cache.update = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            del cache.update
            for handle in handles:
                handle.remove()


@torch.no_grad()
def measure(model, args: argparse.Namespace, context: int, budget: int, batch: int, speed: float) -> dict:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(10, vocabulary, (batch, context), generator=generator)
    cache = RetentionCache.for_model(model, args.policy, budget=budget, every=args.every)
    for part in tokens.split(512, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    entry = sum(2 * layer.keys[0, :, :1].nbytes for layer in cache.layers)  # keys and values, all layers
    stored = budget + args.every / 2  # on average, between two evictions
    ordinary, evicting = [], []
    timers, token = Timers(), tokens[:, :1]
    for step in range(args.steps + 2):
        before = cache.trace.evicted
        start = time.process_time()
        model(token, past_key_values=cache)
        spent = time.process_time() - start
        if step < 2:  # warm-up
            continue
        (evicting if cache.trace.evicted > before else ordinary).append(spent)
    with timers.around(model, cache):
        for _ in range(min(8, args.every // 2)):
            timers.start("rest")
            model(token, past_key_values=cache)
            timers.stop()
    middle = statistics.median(ordinary)
    step_bytes = weights + batch * entry * stored
    eviction = statistics.median(evicting) - middle
    eviction_bytes = batch * entry * (0.5 * (budget + args.every) + 2 * budget)
    total = sum(timers.seconds.values())
    return {
        "context": context,
        "budget": budget,
        "batch": batch,
        "step_ms": 1000 * middle,
        "step_share": step_bytes / speed / middle,
        "step_mib": step_bytes / 2**20,
        "eviction_ms": 1000 * eviction,
        "eviction_share": eviction_bytes / speed / eviction if eviction > 0 else float("nan"),
        "eviction_a_token": eviction / args.every / middle,
        "parts": {part: seconds / total for part, seconds in timers.seconds.items()},
    }


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    model, _ = load_model(args.model, dtype=getattr(torch, args.dtype))
    speed = bandwidth(getattr(torch, args.dtype))
    print(f"copy bandwidth {speed / 2**30:.1f} GiB/s, read and written together", flush=True)
    first, *more = args.contexts
    cases = [(first, budget, batch) for batch in args.batches for budget in args.budgets]
    cases += [(context, args.budgets[0], args.batches[0]) for context in more]
    parts = ["linear layers", "attention", "cache update", "rest"]
    print(
        f"| context | budget | batch | step ms | MiB read | share of the bound | eviction ms | share "
        f"| eviction a token, of a step | {' | '.join(parts)} |\n|{'---|' * (9 + len(parts))}"
    )
    rows = []
    for context, budget, batch in cases:
        row = measure(model, args, context, budget, batch, speed)
        rows.append(row)
        print(
            f"| {context} | {budget} | {batch} | {row['step_ms']:.1f} | {row['step_mib']:.0f} "
            f"| {row['step_share']:.0%} | {row['eviction_ms']:.1f} | {row['eviction_share']:.0%} "
            f"| {row['eviction_a_token']:.2%} | "
            + " | ".join(f"{row['parts'].get(part, 0):.0%}" for part in parts)
            + " |",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"arguments": vars(args), "torch": torch.__version__, "bandwidth": speed, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
