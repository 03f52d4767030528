"""Files that are measured on one model (query statistics, gates): how they know it, and where they are kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .models import cache_root, require

SAMPLES = 16
"""Values of each parameter that a fingerprint reads."""


def fingerprint(model: Any) -> str:
    """16 hexadecimal digits that tell models apart by their weights, whatever name or folder they were loaded from.

    Reads the names and shapes of all parameters and 16 evenly spaced values of each, rounded to bfloat16, so that a
    float32 model and its bfloat16 copy agree. A transformers model counts by its decoder, so that the model and the
    decoder alone agree. Takes milliseconds; parameters on the ``meta`` device count by name and shape alone,
    quantised ones by the values that they stand for.
    """
    digest = hashlib.sha256()
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name, parameter in sorted(decoder.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)};".encode())
        if parameter.device.type != "meta" and parameter.numel():
            flat = plain(parameter).reshape(-1)
            places = torch.arange(SAMPLES, device=flat.device) * (len(flat) - 1) // (SAMPLES - 1)
            digest.update(flat[places].to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def plain(parameter: Tensor) -> Tensor:
    """The numbers of a parameter. Quantised weights (torchao) are tensors of their own kind, which cannot be indexed or
    reshaped: they come back in floating point."""
    detached = parameter.detach()
    return detached if type(detached) is Tensor else detached.dequantize()


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of shapes, types and numbers, on whatever device the tensors are; files with the same tensors agree,
    whatever else they say."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        found.update(real.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def own_path(kind: str, model: Any) -> Path:
    """Where a file of this ``kind`` (``"calibration"``, ``"gate"``) for ``model`` is kept by default: in the user's
    cache folder (:func:`kvretain.models.cache_root`), by the weights' fingerprint."""
    return cache_root() / kind / f"{model.config.model_type}-{fingerprint(model)}.safetensors"


def write(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """Writes a safetensors file; it appears complete or not at all.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be written; names it.
    """
    require("safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, metadata)
        os.chmod(part, 0o666 & ~_umask())
        os.replace(part, path)
    except SafetensorError as error:  # a full disk, say
        os.unlink(part)
        raise OSError(f"{str(path)!r} could not be written: {error}") from None
    except BaseException:
        os.unlink(part)
        raise
    return path


def read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors (on the CPU) and metadata of a safetensors file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file.
        ImportError: safetensors is not installed.
    """
    require("safetensors")
    from safetensors import SafetensorError, safe_open

    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is not a safetensors file: {error}") from None


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do: 8 bytes that say how long the header is, then the header, JSON.

    No pickle of torch's does: the 9th byte of a zip file is the low byte of its compression method, that of torch's
    older format belongs to a fixed number.
    """
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
