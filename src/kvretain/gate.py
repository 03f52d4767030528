"""Fast KVzip's gates: a small network per layer that scores a token from its hidden state, and the files that hold
them.

``kvretain train-gate`` makes them (:mod:`kvretain.distil`); the scorer ``fastkvzip`` uses them.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import artefacts

SIZE = 16
"""Dimension of a gate's queries and keys, and number of its learned sinks."""

HUB = "Jang-Hyun/Fast-KVzip"
RELEASED = frozenset(
    {
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "Qwen/Qwen2.5-14B-Instruct-1M",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-14B",
        "Qwen/Qwen3-8B-FP8",
        "Qwen/Qwen3-4B-Instruct-2507",
        "google/gemma-3-12b-it",
    }
)
"""Hub names of the models for which the authors published gates."""


class LayerGate(nn.Module):
    """One layer's gate: low-rank attention of a token to itself against learned sinks.

    From a hidden state ``x`` as it enters the attention module (after the layer's input norm), per KV head:
    ``k = RMSNorm(W_k x)``, one ``q = RMSNorm(W_q x + b_q)`` for each query head of its group,
    ``l = q . k / sqrt(size) + b``, and ``l_m = q . k_base_m / sqrt(size)`` for each sink. The score is the mean over
    the group of ``1 / (1 + sum_m exp(l_m - l))``. Parameters have the names and shapes of the published files.

    Args:
        width: size of a hidden state.
        heads: KV heads.
        group: query heads per KV head.
        size: dimension of queries and keys.
        sinks: learned sinks per KV head.
    """

    def __init__(self, width: int, heads: int, group: int, size: int = SIZE, sinks: int = SIZE) -> None:
        super().__init__()
        self.heads, self.group, self.size = heads, group, size
        self.q_proj = nn.Linear(width, heads * group * size)
        self.k_proj = nn.Linear(width, heads * size, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=1e-6)
        self.k_norm = nn.RMSNorm(size, eps=1e-6)
        self.k_base = nn.Parameter(torch.zeros(heads, 1, sinks, size))
        self.b = nn.Parameter(torch.zeros(heads, 1, group))
        self._elsewhere: dict[torch.device, LayerGate] = {}

    def forward(self, hidden: Tensor, block: int = 4096) -> Tensor:
        """Scores ``(B, heads, n)`` float32 in [0, 1] of hidden states ``(B, n, width)``, ``block`` tokens at a time."""
        return torch.cat([self._score(part.to(torch.float32)) for part in hidden.split(block, 1)], -1)

    def _score(self, hidden: Tensor) -> Tensor:
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (self.heads, self.group, self.size)))
        key = self.k_norm(self.k_proj(hidden).unflatten(-1, (self.heads, 1, self.size)))
        own = (query * key).sum(-1) / self.size**0.5 + self.b[:, 0]  # (B, n, H, G)
        sinks = torch.matmul(query, self.k_base[:, 0].transpose(-1, -2)) / self.size**0.5  # (B, n, H, G, M)
        # 1 / (1 + sum exp(l_m - l)), which would overflow.
        return torch.sigmoid(own - sinks.logsumexp(-1)).mean(-1).transpose(1, 2)

    def on(self, device: torch.device) -> LayerGate:
        """This gate on ``device``; copies are made once."""
        if self.b.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = copy.deepcopy(self).to(device)
        return self._elsewhere[device]


@dataclass(frozen=True)
class Gate:
    """A model's gates.

    Attributes:
        layers: one for each full-attention layer, in the model's order.
        metadata: what a file of our own says of its training, all strings; empty for a published one.
        source: where it was read, for messages.

    Raises:
        ValueError: there is no layer, or layers differ in what must agree with a model.
    """

    layers: Sequence[LayerGate]
    metadata: Mapping[str, str] = field(default_factory=dict)
    source: str = "the gate"

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"{self.source} holds no layer")
        first = _shape(self.layers[0])
        for at, layer in enumerate(self.layers):
            found = _shape(layer)
            if differs := [f"{what} {n} (layer 0: {first[what]})" for what, n in found.items() if n != first[what]]:
                raise ValueError(f"{self.source} is of no model: its layer {at} has {', '.join(differs)}")

    @property
    def shape(self) -> dict[str, int]:
        """What must agree with a model."""
        return {"full-attention layers": len(self.layers), **_shape(self.layers[0])}

    def save(self, path: str | Path) -> Path:
        """Writes a safetensors file with the metadata.

        Raises:
            ImportError: safetensors is not installed.
        """
        tensors = {f"{at}.{name}": t for at, layer in enumerate(self.layers) for name, t in layer.state_dict().items()}
        return artefacts.write(path, tensors, {"kind": "gate", **self.metadata})


def _shape(layer: LayerGate) -> dict[str, int]:
    """What one layer must have in common with the model, and so with the others."""
    return {
        "hidden size": layer.q_proj.in_features,
        "KV heads": layer.heads,
        "query heads per KV head": layer.group,
    }


# Which gate belongs to a model


def shape_of(config: Any, layers: int) -> dict[str, int]:
    """What a gate for a model with this decoder ``config`` and so many full-attention layers must have, see
    :attr:`Gate.shape`."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return {
        "full-attention layers": layers,
        "hidden size": config.hidden_size,
        "KV heads": heads,
        "query heads per KV head": config.num_attention_heads // heads,
    }


def gate_for(model: Any, path: str, layers: int) -> Gate:
    """The gate of ``model``, which has ``layers`` full-attention layers.

    Args:
        model: a transformers model.
        path: a gate file. ``""``: the user's own in the cache folder, else the published one if the model's name has
            one.
        layers: full-attention layers of the model.

    Raises:
        FileNotFoundError: there is no file at ``path``.
        ValueError: there is no gate, the file is not one, or it was made for another model; the message says what
            differs.
        RuntimeError: the published gate cannot be fetched.
    """
    name = str(getattr(model.config, "_name_or_path", "") or "")
    train = f"kvretain train-gate --model {name or '...'}"
    shape = shape_of(model.config, layers)
    if path:
        gate = load(path)
    elif (own := artefacts.own_path("gate", model)).is_file():
        gate = load(own)
    elif name in RELEASED:
        gate = load(_fetch(name, shape["query heads per KV head"]))
    else:
        raise ValueError(
            f"the scorer 'fastkvzip' needs a gate for this model ({name or model.config.model_type}) and finds none at "
            f"{str(own)!r}: run `{train}`, which takes minutes, or name a file: fastkvzip(gate='...')"
        )
    if differs := [f"{what} {gate.shape[what]} (the model: {n})" for what, n in shape.items() if gate.shape[what] != n]:
        raise ValueError(f"{gate.source} was made for another model, with {', '.join(differs)}: run `{train}`")
    trained = gate.metadata.get("fingerprint")
    if trained and trained != (found := artefacts.fingerprint(model)):
        raise ValueError(
            f"{gate.source} was trained on other weights (fingerprint {trained}, this model's is {found}): "
            f"run `{train}`"
        )
    return gate


def _fetch(name: str, group: int) -> str:
    """The published gate of the model ``name``, from the Hugging Face hub or its local cache."""
    from huggingface_hub import hf_hub_download

    file = f"{name.rpartition('/')[2].lower()}/q{group}_dim{SIZE}_sink{SIZE}.pt"
    try:
        return hf_hub_download(HUB, file)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RuntimeError(
            f"cannot fetch the published gate of {name} ({file} of {HUB}): {reason}; download it elsewhere and name "
            f"it: fastkvzip(gate='...'), or run `kvretain train-gate --model {name}`"
        ) from error


# Files


def load(path: str | Path) -> Gate:
    """A gate from a file of our own (safetensors) or a published one (a pickle, read as plain weights: no code in it is
    ever run). The content decides which of them it is, whatever the file's name. Files that were read last are
    remembered until they change.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a gate; the message names the file.
        ImportError: safetensors is not installed.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no gate {str(path)!r}")
    state = path.stat()
    return _load(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _load(path: Path, changed: int, size: int) -> Gate:
    source = f"the gate {str(path)!r}"
    if not artefacts.is_safetensors(path):
        return Gate(_layers(_published(path), source), {}, source)
    tensors, metadata = artefacts.read(path)
    if metadata.get("kind") != "gate":
        raise ValueError(f"{str(path)!r} is not a gate: its metadata says {metadata.get('kind', 'nothing')!r}")
    return Gate(_layers(_by_layer(tensors, source), source), metadata, source)


def _by_layer(tensors: Mapping[str, Tensor], source: str) -> list[dict[str, Tensor]]:
    """The parameters of each layer, from tensors named ``<layer>.<parameter>``."""
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not (found := re.fullmatch(r"(0|[1-9][0-9]{0,8})\.(.+)", name)):
            raise ValueError(
                f"{source} does not hold a gate's parameters: its tensor {name!r} is not named <layer>.<parameter>"
            )
        states.setdefault(int(found[1]), {})[found[2]] = tensor
    for at, layer in enumerate(sorted(states)):
        if at != layer:
            raise ValueError(f"{source} is not whole: it holds parameters of layer {layer}, but none of layer {at}")
    return [states[at] for at in range(len(states))]


def _layers(states: Sequence[Mapping[str, Tensor]], source: str) -> tuple[LayerGate, ...]:
    """Gates from their parameters, in float32, without a draw from torch's random numbers."""
    made = []
    try:
        for state in states:
            rows, width = state["q_proj.weight"].shape
            size, sinks = state["q_norm.weight"].shape[0], state["k_base"].shape[2]
            heads = state["k_proj.weight"].shape[0] // size
            with torch.device("meta"):
                layer = LayerGate(width, heads, rows // (heads * size), size, sinks)
            layer.load_state_dict({name: tensor.to(torch.float32) for name, tensor in state.items()}, assign=True)
            made.append(layer.requires_grad_(False))
    except (KeyError, RuntimeError, ValueError, IndexError, ZeroDivisionError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ValueError(f"{source} does not hold a gate's parameters: {reason}") from None
    if not all(parameter.isfinite().all() for layer in made for parameter in layer.parameters()):
        raise ValueError(f"{source} holds NaN or infinite numbers")
    return tuple(made)


class _Skipped:
    """Stands for what a published file holds beside weights (NumPy arrays of its training curves): takes anything, does
    nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


_SKIPPED = tuple(
    (_Skipped, name)
    for name in (
        "numpy.ndarray",
        "numpy.dtype",
        *(f"numpy.{core}.multiarray.{kind}" for core in ("core", "_core") for kind in ("_reconstruct", "scalar")),
    )
)


def _published(path: Path) -> list[Mapping[str, Tensor]]:
    """The layers' parameters in a published file, ``{"module": [state_dict, ...], ...}``.

    It is a pickle. Torch's reader of plain weights runs no code of it; NumPy's names are met by :class:`_Skipped`, so
    NumPy's are not run either; any other name is an error.
    """
    try:
        # An open file: of some names, torch would read safetensors.
        with torch.serialization.safe_globals(list(_SKIPPED)), path.open("rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        held = f"it asks for {found[1]}" if found else "it is neither safetensors nor a pickle of weights"
        raise ValueError(
            f"the gate {str(path)!r} is refused, nothing in it was run: {held}, where only weights should be"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"{str(path)!r} is not a gate: {' '.join(str(error).split())[:200]}") from None
    layers = content.get("module") if isinstance(content, dict) else None
    if not isinstance(layers, list) or not all(
        isinstance(layer, dict) and all(isinstance(tensor, Tensor) for tensor in layer.values()) for layer in layers
    ):
        raise ValueError(f"{str(path)!r} is not a gate: it has no list 'module' of the layers' weights")
    return layers
