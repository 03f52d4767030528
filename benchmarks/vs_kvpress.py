"""kvretain beside kvpress: time to compress, decoding speed and memory, method by method.

    python benchmarks/vs_kvpress.py                             # the embedded model, 1,024 tokens, 1 CPU thread
    python benchmarks/vs_kvpress.py --rows snapkv "adakv, snapkv" --context 2048 --repeats 3
    python benchmarks/vs_kvpress.py --json vs_kvpress.json

kvpress and kvretain want different releases of transformers, so each has a worker process with an environment of its
own: kvretain's is the one that runs this script, kvpress' is made once, with the same release of PyTorch, in the user's
cache folder (--env). Both load the same model folder and read the same tokens, with the methods' settings made equal
where both have them. They take turns: for each method and repeat, one compresses and decodes, then the other. Times are
the processes' own (other work on the machine does not count).

- *compress*: seconds from an empty cache to a compressed one, prefill included (the decoder, without logits).
- *decode*: tokens a second over the text that follows, one token a pass, with logits.
- *peak*: growth of the process' resident memory while compressing, over what it held before (Linux).
- *cache*: bytes of the tensors in the cache after compressing, and room that is reserved for what is decoded.
- *NLL*: of the text that follows, nats a token: a check that both sides did the same job, not a ranking.

A ratio is the median over repeats of kvretain / kvpress for each pair of runs. The row `full` compresses nothing on
either side: what differs there is the release of transformers.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Imports of kvretain, kvpress and rich stand where they are needed: each worker has only one of them.


@dataclass(frozen=True)
class Row:
    """A method on both sides: a policy of kvretain and, as Python, a press of kvpress (empty: none)."""

    name: str
    policy: str
    press: str
    sinks: int | None = 0
    why: str = ""
    """What to know where kvretain is behind."""


FLOAT32 = "Scores are float32; kvpress scores in the model's dtype."
REPLAY = f"{FLOAT32} Here that is the softmax of the whole replay."
SNAPKV = "snapkv(window=64, kernel=5, pooling='mean', group='mean')"

ROWS = (
    Row("full", "full", "", None),
    Row("snapkv", SNAPKV, "SnapKVPress(ratio)", why=FLOAT32),
    Row("knorm", "knorm", "KnormPress(ratio)"),
    Row("keydiff", "keydiff", "KeyDiffPress(ratio)", why=FLOAT32),
    Row("kvzip", "kvzip(chunk=2048)@model-heads", "KVzipPress(ratio)", 4, REPLAY),
    Row("kvzip, each layer", "kvzip(chunk=2048)@shared", "KVzipPress(ratio, layerwise=True)", 4, REPLAY),
    Row("adakv, snapkv", f"{SNAPKV}@shared(floor=0.2)", "AdaKVPress(SnapKVPress(ratio))"),
    Row("adakv, keydiff", "keydiff@shared(floor=0.2)", "AdaKVPress(KeyDiffPress(ratio))"),
    Row("adakv, expected", "expected@shared(floor=0.2)", "AdaKVPress(ExpectedAttentionPress(ratio))", 4),
)

METRICS = {
    "compress": ("seconds", "s", False),
    "decode": ("tokens_per_s", "tokens/s", True),
    "peak": ("peak_mib", "MiB", False),
    "cache": ("cache_mib", "MiB", False),
}
"""Column: key in a run's record, unit, whether more is better."""

MARGIN = 1.03
"""Within this factor two medians count as equal."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], metavar="ROW", help="default: all")
    parser.add_argument("--model", default="smollm2-135m", help="embedded model or model folder")
    parser.add_argument("--text", metavar="FILE", help="default: a chapter that comes with kvretain")
    parser.add_argument("--context", type=int, default=1024, help="tokens that are compressed")
    parser.add_argument("--decode", type=int, default=64, help="tokens decoded after that")
    parser.add_argument("--ratio", type=float, default=0.75, help="fraction removed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--env", metavar="DIR", type=Path, help="kvpress' environment; made if it is not there")
    parser.add_argument("--kvpress", default="kvpress", help="what to install, e.g. kvpress==0.5.5")
    parser.add_argument(
        "--torch-index", metavar="URL", help="where pip finds a CPU build of PyTorch, if not by default"
    )
    parser.add_argument("--json", metavar="FILE", help="also write every run here")
    parser.add_argument("--worker", choices=("kvretain", "kvpress"), help=argparse.SUPPRESS)
    return parser.parse_args()


# kvpress' environment


def environment(folder: Path, wanted: str, torch_index: str | None) -> Path:
    """The Python of an environment with kvpress, which is made if it is not complete.

    PyTorch is installed first, in the release that runs here, and then pinned: kvpress' requirements cannot replace it.
    """
    import torch

    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    ready = folder / "kvpress-is-ready.json"
    release = torch.__version__.partition("+")[0]
    state = {"kvpress": wanted, "torch": release}
    if ready.is_file() and json.loads(ready.read_text()) == state:
        return python
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise SystemExit(f"--env: {folder} is not an environment; name a folder that does not exist")
    print(f"making kvpress' environment in {folder}, once (some minutes)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    run([*pip, f"torch=={release}", *(["--index-url", torch_index] if torch_index else [])])
    check = "import torch; print(torch.__version__, torch.version.cuda)"
    installed, cuda = run([str(python), "-c", check]).split()
    if cuda != "None":
        raise SystemExit(
            f"pip installed a CUDA build of PyTorch ({installed}): name an index of CPU builds, --torch-index"
        )
    pins = folder / "constraints.txt"
    pins.write_text(f"torch=={installed}\n")
    run([*pip, "--constraint", str(pins), wanted])
    ready.write_text(json.dumps(state))
    return python


def run(command: list[str]) -> str:
    """What ``command`` prints; its errors end the script."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


# The two sides, each in a process of its own


class Kvretain:
    """Compresses with a RetentionCache."""

    def __init__(self, model: Any) -> None:
        from kvretain.cache.support import cache_argument

        self.model, self.argument = model, cache_argument(model)

    def compress(self, row: dict[str, Any], ids: Any, ratio: float) -> Any:
        from kvretain import RetentionCache

        options = {} if row["policy"] == "full" else {"ratio": ratio, "sinks": row["sinks"]}
        cache = RetentionCache.for_model(self.model, row["policy"], **options)
        self.model.model(input_ids=ids, **{self.argument: cache})
        return cache

    def step(self, cache: Any, token: Any, position: int) -> Any:
        return self.model(token, **{self.argument: cache}).logits

    def nbytes(self, cache: Any) -> int:
        return cache.nbytes

    @staticmethod
    def versions() -> list[str]:
        return ["kvretain", "transformers", "torch"]


class Kvpress:
    """Compresses with a press, as kvpress' own pipeline does."""

    def __init__(self, model: Any) -> None:
        import kvpress  # before the first pass: it wraps the attention functions

        self.model, self.kvpress = model, kvpress

    def compress(self, row: dict[str, Any], ids: Any, ratio: float) -> Any:
        import contextlib

        from transformers import DynamicCache

        cache = DynamicCache()
        press = eval(row["press"], dict(vars(self.kvpress)), {"ratio": ratio}) if row["press"] else None
        with press(self.model) if press else contextlib.nullcontext():
            self.model.model(input_ids=ids, past_key_values=cache)
        return cache

    def step(self, cache: Any, token: Any, position: int) -> Any:
        import torch

        return self.model(token, past_key_values=cache, position_ids=torch.tensor([[position]])).logits

    def nbytes(self, cache: Any) -> int:
        return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))

    @staticmethod
    def versions() -> list[str]:
        return ["kvpress", "transformers", "torch"]


def resident(field: str) -> int | None:
    """``VmRSS`` (held now) or ``VmHWM`` (at most, since it was last reset) of this process in bytes."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def start_peak() -> int | None:
    """Gives free memory back to the system, resets the peak, and returns what the process holds."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return resident("VmRSS")


def work(kind: str) -> None:
    """Serves requests, JSON a line, until the input ends."""
    # Whatever libraries print goes to standard error; answers have the output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import importlib.metadata

    import torch
    from transformers import AutoModelForCausalLM

    request = json.loads(sys.stdin.readline())
    torch.set_num_threads(request["threads"])
    model = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=getattr(torch, request["dtype"])).eval()
    side = {"kvretain": Kvretain, "kvpress": Kvpress}[kind](model)
    ids = torch.tensor([request["ids"]])
    context, ratio = request["context"], request["ratio"]

    def once(row: dict[str, Any], length: int, decode: int) -> dict[str, Any]:
        # Code and weights that the system has dropped while the other side ran come back first.
        side.compress({"policy": "full", "press": ""}, ids[:, :64], ratio)
        before = start_peak()
        start = time.process_time()
        cache = side.compress(row, ids[:, :length], ratio)
        seconds = time.process_time() - start
        peak = None if before is None else (resident("VmHWM") - before) / 2**20  # type: ignore[operator]
        nbytes = side.nbytes(cache)
        logits = []
        start = time.process_time()
        for at in range(length, length + decode):
            logits.append(side.step(cache, ids[:, at : at + 1], at))
        rate = decode / (time.process_time() - start)
        guesses = torch.cat(logits, 1)[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(guesses, ids[0, length + 1 : length + decode])
        return {
            "seconds": seconds,
            "tokens_per_s": rate,
            "peak_mib": peak,
            "cache_mib": nbytes / 2**20,
            "nll": loss.item(),
        }

    with torch.no_grad():
        once({"policy": "full", "press": ""}, min(context, 256), 4)
        versions = {name: importlib.metadata.version(name) for name in side.versions() if name != "kvretain"}
        print(json.dumps({"versions": versions}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(once(json.loads(line), context, request["decode"])), file=answers, flush=True)


class Worker:
    """The process of one side."""

    def __init__(self, kind: str, python: Path | str, request: dict[str, Any]) -> None:
        self.kind, self.log = kind, tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the process fails
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [str(python), __file__, "--worker", kind]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.versions = self.ask(request)["versions"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()
            self.log.seek(0)
            raise SystemExit(
                f"the {self.kind} side ended with code {self.process.returncode}:\n{self.log.read()[-3000:]}"
            )
        return json.loads(answer)

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()


# The comparison


def tokens(folder: str, text: str, count: int) -> list[int]:
    """The first ``count`` tokens of ``text`` as a user's message, where the model has a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lead = ""
    if tokenizer.chat_template:
        message = tokenizer.apply_chat_template([{"role": "user", "content": "\u241f"}], tokenize=False)
        lead = message.partition("\u241f")[0]
    ids = tokenizer.encode(lead + text, add_special_tokens=False)
    if len(ids) < count:
        raise SystemExit(f"the text has {len(ids)} tokens, fewer than --context and --decode together ({count})")
    return ids[:count]


def median(runs: list[dict[str, Any]], key: str) -> float | None:
    """Over ``runs``; None where the system does not say."""
    values = [run[key] for run in runs if run[key] is not None]
    return statistics.median(values) if values else None


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of both sides, and median and range of their ratio over pairs of runs, metric by metric."""
    found: dict[str, Any] = {}
    for metric, (key, _, _) in METRICS.items():
        pairs = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) if a[key] is not None and b[key]]
        ratios = sorted(a / b for a, b in pairs)
        found[metric] = {
            "kvretain": median(ours, key),
            "kvpress": median(theirs, key),
            "ratio": statistics.median(ratios) if ratios else None,
            "range": [ratios[0], ratios[-1]] if ratios else None,
        }
    found["nll"] = {"kvretain": median(ours, "nll"), "kvpress": median(theirs, "nll")}
    return found


def behind(result: dict[str, Any]) -> list[str]:
    """The metrics in which kvretain's median ratio is worse than a tie."""
    return [
        f"{metric} x{ratio:.2f}"
        for metric, (_, _, more) in METRICS.items()
        if (ratio := result[metric]["ratio"]) is not None and (1 / ratio if more else ratio) > MARGIN
    ]


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="kvretain / kvpress (median ratio, range)", title_justify="left")
    table.add_column("method")
    for metric, (_, unit, more) in METRICS.items():
        table.add_column(f"{metric}, {unit} ({'more' if more else 'less'} is better)", justify="right")
    table.add_column("NLL", justify="right")
    for row in rows:
        cells = []
        for metric, (_, _, more) in METRICS.items():
            cell = row[metric]
            if cell["ratio"] is None:
                cells.append("not known here")
                continue
            better = cell["ratio"] > 1 if more else cell["ratio"] < 1
            style, (low, high) = "bold" if better else "default", cell["range"]
            cells.append(
                f"{cell['kvretain']:.3g} / {cell['kvpress']:.3g}\n"
                f"[{style}]x{cell['ratio']:.2f}[/] ({low:.2f} to {high:.2f})"
            )
        table.add_row(
            row["name"], *cells, f"{row['nll']['kvretain']:.3f} / {row['nll']['kvpress']:.3f}", end_section=True
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for row in rows:
        if row["behind"]:
            console.print(f"{row['name']}: behind in {', '.join(row['behind'])}. {row['why']}", highlight=False)


def main() -> None:
    args = arguments()
    if args.worker:
        work(args.worker)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kvretain import __version__
    from kvretain.data import chapter
    from kvretain.models import PACKAGED, cache_root, packaged_folder

    folder = str(packaged_folder(args.model) if args.model in PACKAGED else Path(args.model).expanduser())
    python = environment(args.env or cache_root() / "kvpress-environment", args.kvpress, args.torch_index)
    text = Path(args.text).read_text(encoding="utf-8") if args.text else chapter()
    chosen = [row for row in ROWS if not args.rows or row.name in args.rows]
    request = {name: getattr(args, name) for name in ("context", "decode", "ratio", "threads", "dtype")}
    request |= {"folder": folder, "ids": tokens(folder, text, args.context + args.decode)}
    sides = {"kvretain": Worker("kvretain", sys.executable, request), "kvpress": Worker("kvpress", python, request)}
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("comparing", total=len(chosen) * args.repeats)
        for row in chosen:
            progress.update(task, description=row.name)
            runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in sides}
            for repeat in range(args.repeats):
                # Who goes first changes, so that neither always runs on what the other left.
                for kind in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
                    runs[kind].append(sides[kind].ask(asdict(row)))
                progress.advance(task)
            result = compared(runs["kvretain"], runs["kvpress"])
            rows.append(asdict(row) | result | {"behind": behind(result), "runs": runs})
            ratios = (f"{m} x{result[m]['ratio']:.2f}" for m in METRICS if result[m]["ratio"] is not None)
            progress.console.print(f"{row.name}: {', '.join(ratios)}", highlight=False)
    for side in sides.values():
        side.close()
    show(rows)
    versions = {kind: side.versions for kind, side in sides.items()}
    versions["kvretain"] |= {"kvretain": __version__}
    print("; ".join(f"{kind}: " + ", ".join(f"{n} {v}" for n, v in found.items()) for kind, found in versions.items()))
    if args.json:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        with open(args.json, "w") as file:
            json.dump({"arguments": options, "versions": versions, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
