"""``kvretain ask`` and ``kvretain generate``: answers on the user's own text and model, streamed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .. import models
from ..policy import Policy
from .shared import (
    DEFAULT_POLICY,
    AsJson,
    Blind,
    BudgetSize,
    Chunk,
    Device,
    Dtype,
    Every,
    MaxNew,
    Model,
    PolicyText,
    ProtectPrompt,
    Ratio,
    Recent,
    Seed,
    Sinks,
    Temperature,
    Threads,
    TopK,
    TopP,
    Trigger,
    app,
    check_budget,
    check_model,
    check_protected,
    clear_errors,
    err,
    load,
    note_length,
    print_json,
    read_text,
)

if TYPE_CHECKING:
    from ..answer import Prompt, Reply


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
    trigger: Trigger = "slack",
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
        limits={
            "budget": budget,
            "ratio": ratio,
            "every": every,
            "trigger": trigger,
            "sinks": sinks,
            "recent": recent,
        },
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
- `kvretain generate --prompt "Prove it step by step." --policy rkv --budget 128 --protect-prompt --max-new-tokens 4000`
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
    trigger: Trigger = "slack",
    sinks: Sinks = None,
    recent: Recent = None,
    protect_prompt: ProtectPrompt = False,
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
        limits={
            "budget": budget,
            "ratio": ratio,
            "every": every,
            "trigger": trigger,
            "sinks": sinks,
            "recent": recent,
            "protect_prompt": protect_prompt,
        },
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
        from ..answer import Sampling, answer, build_prompt
        from ..cache import RetentionCache

        drawn = Sampling(**sampling)

        def made(tokenizer: Any) -> Prompt:
            return build_prompt(tokenizer, question, context=context, raw=raw)

        check_protected([policy], model, lambda own: len(made(own)), passes["max_new_tokens"], **limits)
        llm, tokenizer = load(model, **place)
        prompt = made(tokenizer)
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
