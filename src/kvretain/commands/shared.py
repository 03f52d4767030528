"""What the commands share: the application, options, checks and messages.

Answers and tables go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from .. import __version__, models
from ..cache.budget import Budget
from ..policy import Policy

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
        "--model",
        "-m",
        help=f"{models.EMBEDDED} (no hub needed), a model folder, a .gguf file, a hub name; or, for evaluations, "
        "gemma3-270m (no hub needed; the Gemma Terms of Use apply).",
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
Trigger = Annotated[
    str,
    typer.Option(
        help="What decoding waits for before it compresses: slack (--every tokens stand above the budget) or periodic "
        "(the tokens read and written are a multiple of --every)."
    ),
]
ProtectPrompt = Annotated[
    bool, typer.Option("--protect-prompt", help="Always keep the whole prompt; it must be shorter than the budget.")
]
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

MENDABLE = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors of the system that another path mends."""


def fail(message: object, code: int = 2) -> NoReturn:
    """Prints one line of error and ends the command: code 2 for bad input, 1 for what went wrong outside."""
    line = " ".join(str(message).split())
    err.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turns errors that a user can mend into one line, and those of the system, such as a full disk."""
    try:
        yield
    except BrokenPipeError:  # who reads has seen enough; typer ends quietly
        raise
    except (ValueError, *MENDABLE) as error:
        fail(_told(error))
    except (ImportError, RuntimeError, OSError) as error:
        fail(_told(error), code=1)


def _told(error: Exception) -> str:
    """What an error says; of one of the system, what went wrong and with which path."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error)


def check_place(path: Path, what: str = "--out", *, folder: bool = False, streamed: bool = False) -> None:
    """Makes sure, before work that takes long, that what comes of it can be written. Leaves nothing behind.

    Args:
        path: the file to write, or the folder to write files into; folders that are not there are made then.
        what: the option, for the message.
        folder: whether ``path`` is a folder.
        streamed: whether the file is opened and written, as a device or a pipe can be; else it is replaced as a whole.

    Raises:
        ValueError: it cannot; the message says why, with the path.
    """
    place = at = path if folder else path.parent
    try:
        there = next((part for part in (path, *path.parents) if part.exists()), Path())
        if (folder or there != path) and not there.is_dir():
            where = "" if there == path else f" cannot be written: {there}"
            raise ValueError(f"{what} {path}{where} is not a folder")
        if streamed and there == path and not path.is_dir():
            if path.is_file():
                at = path
                path.open("ab").close()
            return
        if not folder and there == path and not path.is_file():
            raise ValueError(f"{what} {path} is {'a folder' if path.is_dir() else 'a device'}; it must be a file")
        missing = [part for part in (place, *place.parents) if not part.exists()]
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        finally:
            for part in missing:
                with contextlib.suppress(OSError):
                    part.rmdir()
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be written: {error.strerror or error} ({at})") from None


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


def check_device(device: str | None) -> None:
    """Raises ValueError for a device that torch does not know, or that this machine does not have."""
    import torch

    if device in (None, "auto"):
        return
    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    found += ["mps"] if torch.backends.mps.is_available() else []
    try:
        wanted = torch.device(device)
        if {wanted.type, f"{wanted.type}:{wanted.index or 0}"} & set(found):
            return  # nothing is allocated there: evaluations leave a GPU to their workers
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, ImportError):  # an unknown name or number; a torch without that backend
        raise ValueError(f"--device {device}: torch finds no such device here, only {', '.join(found)}") from None


def check_protected(
    policies: Iterable[str], model: str, count: Callable[[Any], int], new_tokens: int, **limits: Any
) -> None:
    """Raises ValueError if a protected prompt does not fit into the budget, before weights are loaded.

    Args:
        policies: all that will be used.
        model: whose tokenizer is loaded, if the prompt is protected.
        count: says how many tokens the prompt has, given the tokenizer.
        new_tokens: most tokens to write after it.
        limits: of :meth:`RetentionCache.for_model <kvretain.cache.cache.RetentionCache.for_model>`.
    """
    budget = limits["budget"]
    scorers = [scorer for policy in policies if (scorer := Policy.parse(policy).scorer) is not None]
    if not scorers or budget is None or not limits.get("protect_prompt"):
        return
    quiet()
    tokens, limit = count(models.load_tokenizer(model)), Budget(limits.pop("budget"), **limits)
    if tokens > budget:
        limit.protection(budget, tokens, scorers[0])  # says so
    if new_tokens > 1:
        limit.check_prompt(tokens, budget)


def print_json(value: Any) -> None:
    """Prints ``value`` to standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def versions() -> dict[str, str]:
    """The releases that a result depends on."""
    import torch
    import transformers

    return {"kvretain": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def quiet() -> None:
    """Has transformers print no progress and no warnings."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def load(model: str, dtype: str | None, device: str | None, threads: int | None) -> tuple[Any, Any]:
    """The model and its tokenizer, quietly."""
    import torch

    check_device(device)
    quiet()
    if threads:
        torch.set_num_threads(threads)
    with err.status(f"loading {escape(model)}"):
        return models.load_model(model, dtype=dtype, device=device, progress=models.say)


def read_text(source: str, option: str) -> str:
    """The text in the file ``source``, or from standard input for ``-``, all of it in memory.

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


def split_items(values: list[str], option: str) -> list[str]:
    """Comma-separated items of a repeatable option; commas inside parentheses belong to an item."""
    items = [item.strip() for value in values for item in re.split(r",(?![^()]*\))", value)]
    if not items or "" in items:
        raise ValueError(f"{option} has an empty item")
    return items


def note_length(model: Any, tokens: int) -> None:
    """Prints a note if ``tokens`` are more than ``model`` was made for."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest and tokens > longest:
        err.print(f"note: up to {tokens:,} tokens; the model was made for {longest:,}", style="yellow")
