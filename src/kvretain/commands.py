"""The commands of ``kvretain``: options, tables and progress bars; the work is in the modules that they import.

Answers and tables go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from . import __version__, models, presets, refiners, scorers, selectors
from .cache.budget import Budget
from .observe import FEWEST, SCORERS
from .policy import SCOPES, Policy

if TYPE_CHECKING:
    from .answer import Reply
    from .demo import Case, Row
    from .evidence.runner import Setting, Unit
    from .evidence.store import Store

out = Console()
err = Console(stderr=True)

app = typer.Typer(
    name="kvretain",
    help="Keep a transformer's KV cache inside a fixed budget. **Lossy**: what is evicted is gone.",
    epilog="Start with `kvretain demo`. Every command explains itself: `kvretain ask --help`.",
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        print(f"kvretain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


# Options that several commands share.

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help=f"{models.EMBEDDED} (no hub needed), a model folder, a .gguf file, or a hub name."
    ),
]
PolicyText = Annotated[
    str,
    typer.Option(
        "--policy", "-p", help="What to keep: a name from `kvretain policies`, or a text such as snapkv+hub@layer."
    ),
]
BudgetSize = Annotated[int | None, typer.Option("--budget", "-b", help="Entries kept per head. This or --ratio.")]
Ratio = Annotated[
    float | None, typer.Option("--ratio", "-r", help="Fraction REMOVED of the tokens seen, from 0 to below 1.")
]
Every = Annotated[int, typer.Option(help="While decoding, compress once this many tokens stand above the budget.")]
Sinks = Annotated[int | None, typer.Option(help="First tokens always kept; by default the policy decides.")]
Recent = Annotated[int | None, typer.Option(help="Last tokens always kept; by default the policy decides.")]
MaxNew = Annotated[int, typer.Option(min=1, help="Most tokens to write.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above it, tokens are drawn at random.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens with this share of the probability.")]
TopK = Annotated[int | None, typer.Option(help="Draw from this many likeliest tokens.")]
Seed = Annotated[int, typer.Option(help="Makes drawing at random reproducible.")]
Chunk = Annotated[
    int | None,
    typer.Option(help="Prefill in passes of this many tokens, each compressed (lower peak memory); default: one pass."),
]
Blind = Annotated[bool, typer.Option("--blind", help="Compress the context before the question is known.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: as stored.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ... or auto (spread the layers); default: CUDA if any.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

DEFAULT_POLICY = "snapkv+hub"


def fail(message: object, code: int = 2) -> NoReturn:
    """Prints one line of error and ends the command: code 2 for bad input, 1 for what went wrong outside."""
    line = " ".join(str(message).split())
    err.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turns errors that a user can mend into one line."""
    try:
        yield
    except (ValueError, FileNotFoundError, IsADirectoryError, PermissionError) as error:
        fail(error)
    except (ImportError, RuntimeError) as error:
        fail(error, code=1)


def check_budget(policy: str, budget: int | None, ratio: float | None, **protected: Any) -> None:
    """Raises ValueError for a bad policy or budget, before a model is loaded."""
    if Policy.parse(policy).scorer is not None:
        Budget(budget, ratio, **protected)


def check_model(model: str, dtype: str | None) -> None:
    """Raises an error for a bad model name or type, or a missing package, before anything is loaded."""
    models.require("torch", "transformers")
    models.check_model_name(model)
    if dtype:
        models.parse_dtype(dtype)


def print_json(value: Any) -> None:
    """Prints ``value`` to standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"kvretain": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def load(model: str, dtype: str | None, device: str | None, threads: int | None) -> tuple[Any, Any]:
    """The model and its tokenizer, quietly."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if threads:
        torch.set_num_threads(threads)
    with err.status(f"loading {escape(model)}"):
        return models.load_model(model, dtype=dtype, device=device, progress=models.say)


def read_text(source: str, option: str) -> str:
    """The text in the file ``source``, or from standard input for ``-``.

    Raises:
        ValueError: it is not UTF-8 text, or empty.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option} {source} is not UTF-8 text") from None
    if not text.strip():
        raise ValueError(f"{option} {source} is empty")
    return text


def note_length(model: Any, tokens: int) -> None:
    """Prints a note if ``tokens`` are more than ``model`` was made for."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest and tokens > longest:
        err.print(f"note: up to {tokens:,} tokens; the model was made for {longest:,}", style="yellow")


# demo


@app.command(
    epilog="""
Examples:

- `kvretain demo` – SmolLM2-135M, about 2,000 tokens, five policies, 80 % and 90 % removed
- `kvretain demo --blind` – the same, compressed before the question is known
- `kvretain demo --policy snapkv@layer --policy "snapkv(window=32)" --ratio 0.9 --seed 7` – your choice
"""
)
def demo(
    model: Model = models.EMBEDDED,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="May be repeated; default: the five of the introduction.")
    ] = None,
    ratio: Annotated[
        list[float] | None, typer.Option("--ratio", "-r", help="Fraction REMOVED; may be repeated; default: 0.8, 0.9.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the chapter with the fact in it.")] = 2000,
    depth: Annotated[float, typer.Option(min=0, max=1, help="Where the fact is hidden: 0 first, 1 last.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Chooses the fact.")] = 0,
    blind: Blind = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that share the work; default: 2 on CPUs, 1 with CUDA.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Hide a fact in a chapter of *Alice*, forget most of the cache, and ask for the fact."""
    started = time.perf_counter()
    with clear_errors():
        check_model(model, dtype)
        # One thread is the fastest for so small a model; BLAS reads this when a worker starts.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        from . import data
        from . import demo as work
        from .tasks.haystack import build_haystack

        policies, ratios = policy or list(work.POLICIES), ratio or list(work.RATIOS)
        for text in policies:
            for value in ratios:
                check_budget(text, None, value)
        todo = work.cases(policies, ratios)
        loaded: tuple[Any, Any] | None = load(model, dtype, device, threads)
        assert loaded is not None
        haystack = build_haystack(loaded[1], data.chapter(), tokens=tokens, depth=depth, seed=seed)
        setting = work.Setting(haystack, blind, model, dtype, device, threads)
        on_cuda = loaded[0].device.type == "cuda"
        jobs = min(jobs or (1 if on_cuda else min(2, os.cpu_count() or 1)), len(todo))
        if jobs > 1:
            loaded = None
            gc.collect()
        if not as_json:
            where = f"{haystack.depth:.0%} into {haystack.tokens:,} tokens of 'A Mad Tea-Party' (Alice, chapter VII)"
            out.print(f"[bold]Hidden[/] {where}:\n  {escape(haystack.fact)}")
            out.print(f"[bold]Asked[/]:\n  {escape(haystack.question)}\n")
        bars = _Bars(todo)
        results = work.run_cases(setting, todo, jobs=jobs, report=bars.report, loaded=loaded)
        rows = _collect(results, bars, show=not as_json)
    seconds = time.perf_counter() - started
    if as_json:
        print_json(
            {
                "model": model,
                "haystack": {k: v for k, v in dataclasses.asdict(haystack).items() if k != "context"},
                "question_seen_at_compression": not blind,
                "rows": [dataclasses.asdict(row) for row in rows],
                "jobs": jobs,
                "threads": threads,
                "seconds": seconds,
                "versions": _versions(),
            }
        )
        return
    where = (
        "The question came after the compression (--blind)."
        if blind
        else "The question was part of the prefill: policies that read the last queries saw it (--blind hides it)."
    )
    out.print(
        f"\n{where}\nEntries are per head and layer, right after the prefill; MiB are measured from their tensors; "
        f"the speed is that of single-token passes, with {jobs} process{'es' * (jobs > 1)} of {threads} "
        f"thread{'s' * (threads > 1)} at work.\nOne question on a small model: an illustration, not a ranking. "
        f"{seconds:.0f} s in all.\nNext: kvretain demo --policy snapkv@layer --policy 'snapkv(window=32)' --ratio 0.9",
        style="dim",
        highlight=False,
    )


def _demo_table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("removed")
    table.add_column("policy", no_wrap=True)
    table.add_column("answer", overflow="fold")
    table.add_column("")
    for heading in ("entries\nkept", "cache\nMiB", "decode\ntokens/s"):
        table.add_column(heading, justify="right")
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        table.add_row(
            f"{row.ratio or 0:.0%}",
            escape(row.policy),
            escape(row.answer if len(row.answer) <= 80 else row.answer[:79] + "…"),
            "[green]right[/]" if row.right else "[red]wrong[/]",
            f"{row.kept:,.0f}",
            f"{row.cache_mib:.1f}",
            f"{row.decode_tokens_per_second:.1f}",
            end_section=after is not None and after.ratio != row.ratio,
        )
    return table


class _Bars:
    """Progress bars: one over all cases, and one for each case at work."""

    def __init__(self, todo: list[Case]) -> None:
        self.todo = todo
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=err)
        self.all = self.progress.add_task("all answers", total=len(todo))
        self.running: dict[int, TaskID] = {}

    def report(self, index: int, done: float) -> None:
        case = self.todo[index]
        name = case.policy if case.ratio is None else f"{case.policy}, {case.ratio:.0%} removed"
        if index not in self.running:
            self.running[index] = self.progress.add_task(name, total=1)
        stage = "prefill" if done < 0.999 else "answer"
        self.progress.update(self.running[index], completed=done, description=escape(f"{name}: {stage}"))

    def finish(self, index: int) -> None:
        if index in self.running:
            self.progress.remove_task(self.running.pop(index))
        self.progress.advance(self.all)


def _collect(results: Iterator[tuple[int, Row]], bars: _Bars, *, show: bool) -> list[Row]:
    """All rows in the order of the cases; on a terminal the table grows above the progress bars."""
    rows: dict[int, Row] = {}
    with Live(bars.progress, console=err, refresh_per_second=5, transient=True) as live:
        for index, row in results:
            rows[index] = row
            bars.finish(index)
            if show:
                live.update(Group(_demo_table([rows[i] for i in sorted(rows)]), bars.progress))
    ordered = [rows[index] for index in sorted(rows)]
    if show:
        out.print(_demo_table(ordered))
    return ordered


# ask and generate


@app.command(
    epilog="""
Examples:

- `kvretain ask --context report.txt --question "Who signed it?" --ratio 0.8`
- `cat log.txt | kvretain ask --context - --question "What failed?" --policy snapkv --budget 512`
- `kvretain ask --context book.txt --question "..." --model Qwen/Qwen3-0.6B --policy snapkv@layer --ratio 0.9`
"""
)
def ask(
    context: Annotated[str, typer.Option(help="The text: a file, or - for standard input.")],
    question: Annotated[str, typer.Option(help="What to ask about it.")],
    model: Model = models.EMBEDDED,
    policy: PolicyText = DEFAULT_POLICY,
    ratio: Ratio = None,
    budget: BudgetSize = None,
    every: Every = 128,
    sinks: Sinks = None,
    recent: Recent = None,
    blind: Blind = False,
    max_new_tokens: MaxNew = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    chunk: Chunk = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the question just follows the text.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Ask one question about your own text."""
    with clear_errors():
        if not question.strip():
            raise ValueError("--question is empty")
        text = read_text(context, "--context")
    _answer(
        question,
        text,
        model=model,
        place={"dtype": dtype, "device": device, "threads": threads},
        policy=policy,
        limits={"budget": budget, "ratio": ratio, "every": every, "sinks": sinks, "recent": recent},
        sampling={"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed},
        passes={"max_new_tokens": max_new_tokens, "chunk": chunk, "blind": blind},
        raw=raw,
        as_json=as_json,
    )


@app.command(
    epilog="""
Examples:

- `kvretain generate --prompt "Write a long story about a rabbit." --budget 256 --max-new-tokens 1000`
- `kvretain generate --prompt "Once upon a time" --raw --policy streaming --budget 128 --temperature 0.8 --seed 1`
- `kvretain generate --prompt - --policy full --json < prompt.txt`
"""
)
def generate(
    prompt: Annotated[str, typer.Option(help="What to say to the model; - reads standard input.")],
    model: Model = models.EMBEDDED,
    policy: PolicyText = DEFAULT_POLICY,
    budget: BudgetSize = None,
    ratio: Ratio = None,
    every: Every = 128,
    sinks: Sinks = None,
    recent: Recent = None,
    max_new_tokens: MaxNew = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = 0,
    chunk: Chunk = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it is.")] = False,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Generate text inside a fixed budget, however long it gets."""
    with clear_errors():
        text = read_text(prompt, "--prompt") if prompt == "-" else prompt
        if not text.strip():
            raise ValueError("--prompt is empty")
    _answer(
        text,
        "",
        model=model,
        place={"dtype": dtype, "device": device, "threads": threads},
        policy=policy,
        limits={"budget": budget, "ratio": ratio, "every": every, "sinks": sinks, "recent": recent},
        sampling={"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed},
        passes={"max_new_tokens": max_new_tokens, "chunk": chunk},
        raw=raw,
        as_json=as_json,
    )


def _answer(
    question: str,
    context: str,
    *,
    model: str,
    place: dict[str, Any],
    policy: str,
    limits: dict[str, Any],
    sampling: dict[str, Any],
    passes: dict[str, Any],
    raw: bool,
    as_json: bool,
) -> None:
    """What ``ask`` and ``generate`` share: check, load, answer while printing, sum up."""
    with clear_errors():
        check_budget(policy, **limits)
        check_model(model, place["dtype"])
        if passes["chunk"] is not None and passes["chunk"] < 1:
            raise ValueError(f"chunk is at least 1 token, not {passes['chunk']}")
        from . import RetentionCache
        from .answer import Sampling, answer, build_prompt

        drawn = Sampling(**sampling)
        llm, tokenizer = load(model, **place)
        prompt = build_prompt(tokenizer, question, context=context, raw=raw)
        note_length(llm, len(prompt) + passes["max_new_tokens"])
        cache = RetentionCache.for_model(llm, policy, **limits)
        columns = (TextColumn("prefill"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total} tokens"))
        with Progress(SpinnerColumn(), *columns, TimeElapsedColumn(), console=err, transient=True) as progress:
            bar = progress.add_task("prefill", total=len(prompt))

            def write(piece: str) -> None:
                if progress.live.is_started:
                    progress.stop()
                if not as_json:
                    print(piece, end="", flush=True)

            def advance(done: float) -> None:
                progress.update(bar, completed=done)

            reply = answer(llm, tokenizer, prompt, cache, sampling=drawn, on_prefill=advance, on_text=write, **passes)
    if as_json:
        parsed = Policy.parse(policy).to_dict()
        rate = reply.decode_tokens_per_second
        print_json(
            {"model": model, "policy": policy, "policy_arguments": parsed, **limits, **passes, **sampling}
            | dataclasses.asdict(reply)
            | {"decode_tokens_per_second": rate}
        )
    else:
        print()
        err.print(_summary(policy, reply), style="dim", highlight=False)


def _summary(policy: str, reply: Reply) -> str:
    rate = reply.decode_tokens_per_second
    return (
        f"{policy}: {reply.prompt_tokens:,} tokens read, {reply.kept:,.0f} entries kept per head and layer "
        f"({reply.cache_bytes / 2**20:.1f} MiB); {reply.new_tokens:,} written, then {reply.kept_at_end:,.0f} entries; "
        f"prefill {reply.prefill_seconds:.1f} s, decode {f'{rate:.1f} tokens/s' if rate else 'too short to measure'}"
    )


# observe


@app.command(
    epilog="""
Examples:

- `kvretain observe --out figures` – SmolLM2-135M on a chapter of *Alice*, three scorers
- `kvretain observe --out figures --text report.txt --tokens 4000 --model Qwen/Qwen3-0.6B`
- `kvretain observe --out figures --policy "snapkv(window=32)" --policy knorm --policy h2o`
"""
)
def observe(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Folder for the figures (PNG) and their numbers (CSV).")],
    model: Model = models.EMBEDDED,
    text: Annotated[
        str | None, typer.Option(help="The text: a file, or - for standard input; default: a chapter of Alice.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help=f"A scorer, alone; may be repeated; default: {', '.join(SCORERS)}."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=FEWEST, help="At most this many tokens of the text.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of permutations, random choices and intervals.")] = 0,
    dtype: Dtype = None,
    device: Device = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Draw how a model's scores cluster, what top-k covers, and how sharp heads are."""
    started = time.perf_counter()
    with clear_errors():
        check_model(model, dtype)
        from . import data
        from .observe import plots, write_figures
        from .observe.collect import collect, parse_scorer, protection

        plots.check_matplotlib()
        named = {name: parse_scorer(name) for name in policy or SCORERS}
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {folder} is not a folder")
        words = data.chapter() if text is None else read_text(text, "--text")
        title = "'A Mad Tea-Party' (Alice, chapter VII)" if text is None else Path(text).name
        llm, tokenizer = load(model, dtype, device, threads)
        ids = tokenizer(words, return_tensors="pt")["input_ids"][:, :tokens]
        protection(ids.shape[1], named.values())
        note_length(llm, ids.shape[1])
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True) as progress:
            bar = progress.add_task(f"one prefill of {ids.shape[1]:,} tokens", total=None)

            def layer(done: int, total: int) -> None:
                progress.update(bar, completed=done, total=total)

            def stage(done: int, total: int, name: str) -> None:
                progress.update(bar, completed=done, total=total, description=name.replace("_", " "))

            seen = collect(llm, ids, named, report=layer)
            source = f"{Path(model).name if Path(model).exists() else model} on {title}"
            made = write_figures(seen, folder, source=source, seed=seed, report=stage)
    record = {
        "model": model,
        "text": title,
        "tokens": seen.tokens,
        "heads": seen.heads,
        "scorers": list(named),
        "seed": seed,
        "captions": {name: table.caption for name, table in made.items()},
        "summary": made["summary"].rows,
        "versions": _versions(),
    }
    (folder / "run.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(record | {"folder": str(folder), "seconds": time.perf_counter() - started})
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("mean over heads", overflow="fold")
    lines: dict[str, list[str]] = {}
    for row in made["summary"].rows:
        cell = f"{row['mean']:.3f}\n[dim]{row['low']:.3f} to {row['high']:.3f}[/]"
        lines.setdefault(str(row["quantity"]), []).append(cell)
    for name in named:
        table.add_column(escape(name), justify="right", overflow="fold")
    for quantity, cells in lines.items():
        table.add_row(quantity, *cells)
    out.print(table)
    out.print(
        f"{made['summary'].caption}\n{len(made) - 1} figures (PNG, CSV), summary.csv and run.json are in {folder}. "
        f"One text: an observation, not a ranking. {time.perf_counter() - started:.0f} s in all.",
        style="dim",
        highlight=False,
        markup=False,
    )


# eval


def _split(values: list[str], option: str) -> list[str]:
    """Comma-separated items of a repeatable option; commas inside parentheses belong to an item."""
    items = [item.strip() for value in values for item in re.split(r",(?![^()]*\))", value)]
    if not items or "" in items:
        raise ValueError(f"{option} has an empty item")
    return items


def _scoped(policies: list[str], scopes: list[str] | None) -> list[str]:
    """Each policy at each scope; those that name a scope, and ``full``, stay as they are."""
    if scopes is None:
        return policies
    names = _split(scopes, "--scopes")
    return [
        text if "@" in text or text == "full" else f"{text}@{scope}"
        for scope in names
        for text in policies
    ]  # fmt: skip


@app.command(
    "eval",
    epilog="""
Examples:

- `kvretain eval --out results` – 20 five-digit needles in 1,024 tokens, four policies, half and 90 % removed
- `kvretain eval --tasks single,continuation --policies snapkv,snapkv+hub --scopes head,layer --ratios 0.5,0.75,0.9 \
--n 100 --text book.txt --workers 2 --out results` – a table that can be read for differences
- `kvretain eval --tasks svamp --data svamp/test.jsonl --policies knorm,knorm+hub --out svamp-results`

Killed or stopped, the same command goes on where it was. Policies, ratios, tasks and examples may be added to a folder.
""",
)
def evaluate(
    out_folder: Annotated[str, typer.Option("--out", help="Folder for the results; one that is there is continued.")],
    model: Model = models.EMBEDDED,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Comma-separated: single, single7, multikey, multivalue, multiquery, tracking, words (needles), "
            "continuation, svamp. Default: single."
        ),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(help="Comma-separated policies; full, random and streaming always come along."),
    ] = None,
    ratios: Annotated[list[str] | None, typer.Option(help="Comma-separated fractions REMOVED.")] = None,
    scopes: Annotated[
        list[str] | None, typer.Option(help="Comma-separated: run the policies that name no scope at each of these.")
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="Examples of each task.")] = 20,
    skip: Annotated[int, typer.Option(min=0, help="Start at this example: another part of the same series.")] = 0,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a context.")] = 1024,
    following: Annotated[int, typer.Option(min=1, help="Tokens compared after a context, for continuation.")] = 256,
    aware: Annotated[
        bool,
        typer.Option("--aware/--blind", help="Compress the question with the context, or the context before it."),
    ] = False,
    generate: Annotated[
        bool,
        typer.Option(
            "--generate/--no-generate",
            help="Write greedy replies, or only tell (faster) whether they would begin with the right answer.",
        ),
    ] = True,
    text: Annotated[
        str | None, typer.Option(help="Text file to take contexts from; default: a chapter of Alice (3,000 tokens).")
    ] = None,
    data: Annotated[str | None, typer.Option(help="SVAMP's test.jsonl, for the task svamp.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the examples.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with its own model.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each process.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many examples; go on another time.")] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure what policies lose: needles, continuations and word problems, with intervals."""
    started = time.perf_counter()
    with clear_errors():
        check_model(model, dtype)
        # One thread is the fastest for so small a model; BLAS reads this when a worker starts.
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        from .evidence import report, runner
        from .evidence.store import Store

        chosen = _split(tasks or ["single"], "--tasks")
        if unknown := [task for task in chosen if task not in runner.TASKS]:
            raise ValueError(f"unknown task {unknown[0]!r}; valid: {', '.join(runner.TASKS)}")
        values = [_ratio(item) for item in _split(ratios or ["0.5,0.9"], "--ratios")]
        names = _scoped(_split(policies or ["snapkv,snapkv+hub,keydiff,keydiff+hub"], "--policies"), scopes)
        for name in names:
            for value in values:
                check_budget(name, None, value)
        cases = runner.cases_of(names, values)
        if "svamp" in chosen:
            if data is None:
                raise ValueError("the task 'svamp' needs --data with SVAMP's test.jsonl")
            from .tasks.svamp import load_svamp

            load_svamp(data)
        setting = runner.Setting(model, dtype, device, length, following, seed, aware, generate, text, data, threads)
        store = Store(out_folder, setting.identity())
        units = runner.plan(store, chosen, range(skip, skip + n), cases)
        total = len(units)
        units = units[:limit]
        about = {**store.identity, "command": "kvretain " + shlex.join(sys.argv[1:])}
        store.begin({"command": about["command"], "policies": names, "ratios": values, "n": n, "skip": skip})
        done = _work_off(setting, store, units, workers)
        rows = store.rows()
        summary = report.summarise(rows, seed=seed)
        page = report.markdown(summary, about)
        files = store.finish(about, {**about, **summary}, page)
    if as_json:
        print_json({**about, **summary, "rows": len(rows), "examples_left": total - done})
        return
    out.print(page, markup=False, highlight=False, soft_wrap=True)
    seconds = time.perf_counter() - started
    left = f"; {total - done} examples are left: the same command goes on" if total > done else ""
    per = f", {seconds / done:.1f} s each" if done else ""
    out.print(
        f"{len(rows):,} rows in {', '.join(map(str, files))}; {done} examples measured now{per}{left}.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--ratios: {text!r} is not a number") from None


def _work_off(setting: Setting, store: Store, units: list[Unit], workers: int) -> int:
    """Runs the units under a progress bar with the time left; returns how many were done."""
    from .evidence import runner

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} measurements,"),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    total, measured, done = sum(len(unit.cases) for unit in units), 0, 0
    began = time.perf_counter()
    # Examples take minutes: the speed is that of the last hour. A log gets a line an example instead of a bar.
    with Progress(
        *columns, console=err, speed_estimate_period=3600, transient=True, disable=not err.is_terminal
    ) as progress:
        bar = progress.add_task("loading the model", total=total)

        def tick() -> None:
            progress.update(bar, advance=1, description="measuring")

        workers = min(workers, max(1, len(units)))
        for unit in runner.run(setting, store, units, workers=workers, report=tick):
            done, measured = done + 1, measured + len(unit.cases)
            if not err.is_terminal:
                elapsed = time.perf_counter() - began
                left = elapsed / measured * (total - measured)
                where = f"{unit.task} {unit.index} is done, {done} of {len(units)} examples"
                err.print(f"{where}, {elapsed:.0f} s so far, about {left:.0f} s left", highlight=False, soft_wrap=True)
    return done


# policies


def _components(registry: Any) -> list[dict[str, Any]]:
    """What a registry holds; ``summary`` is the first line of a component's file."""
    described = []
    for name in registry:
        cls = registry[name]
        entry = {
            "name": name,
            "arguments": {field.name: field.default for field in dataclasses.fields(cls)},
            "summary": (inspect.getdoc(inspect.getmodule(cls)) or "").partition("\n")[0],
            "doc": inspect.getdoc(cls) or "",
        }
        described.append(entry | ({"needs": sorted(cls.needs), "paper": cls.paper} if hasattr(cls, "needs") else {}))
    return described


@app.command(
    epilog="""
A policy is `scorer[+refiner][/selector][@scope]`, and each part takes arguments:

- `snapkv+hub`
- `keydiff@layer`
- `snapkv(window=16)+hub(discount=0.25)@model`
"""
)
def policies(as_json: AsJson = False) -> None:
    """List the policies, and the scorers, refiners, selectors and scopes that they are made of."""
    named = [{**dataclasses.asdict(p), "needs": sorted(Policy.parse(p.text).needs)} for p in presets.values()]
    parts = {"scorers": _components(scorers), "refiners": _components(refiners), "selectors": _components(selectors)}
    if as_json:
        print_json({"presets": named, **parts, "scopes": list(SCOPES)})
        return
    table = Table(title="Policies", title_justify="left")
    for heading in ("name", "needs", "paper", "what it keeps"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    for preset in named:
        table.add_row(preset["name"], ", ".join(preset["needs"]) or "–", escape(preset["paper"]), escape(preset["doc"]))
    out.print(table)
    for kind, entries in parts.items():
        table = Table(title=kind.capitalize(), title_justify="left")
        headings = ["name", "needs", "arguments and defaults", "what it does"]
        if kind != "scorers":
            headings.remove("needs")
        for heading in headings:
            table.add_column(heading, overflow="fold", no_wrap=heading == "name")
        for entry in entries:
            arguments = ", ".join(f"{name}={value!r}" for name, value in entry["arguments"].items()) or "–"
            needs = [", ".join(entry["needs"]) or "–"] if kind == "scorers" else []
            table.add_row(entry["name"], *needs, escape(arguments), escape(entry["summary"]))
        out.print(table)
    out.print(
        f"Scopes: {', '.join(SCOPES)} (who shares one set of entries).\n"
        "Needs: what a policy collects while the model runs, through one registered attention function.",
        style="dim",
        highlight=False,
    )
