"""Offline query statistics, for scorers that must know what queries look like (TriAttention's).

A calibration holds, per full-attention layer and query head, the mean of the queries before RoPE and the mean of their
lengths, pair by pair. :func:`calibrate` measures one on any text, through the cache's own attention tap, so that norms
of the queries (Qwen3, Gemma 3) and rotations of a part of the head come out right; :func:`load` also reads the files
that TriAttention published. ``for_model(model, "trig", ...)`` finds one by itself, see :func:`calibration_for`.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import artefacts, data
from .cache.view import CacheView
from .lab.chains import reading
from .models import say
from .policy import Policy
from .rope import Rope
from .scores import Scorer

TOKENS, CONTEXT, CHUNK = 4096, 4096, 512

KIND = "kvretain calibration 1"

Report = Callable[[int, int], None]
"""Receives tokens read so far, and tokens in all."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Query statistics of one model, by the indices of its full-attention layers.

    ``Hq`` query heads, ``D`` head size; pairs are in the order of :meth:`kvretain.rope.Rope.halves`, rotated ones
    first.

    Attributes:
        mean: ``(Hq, D / 2)`` complex64, mean of the queries before RoPE.
        absolute: ``(Hq, D / 2)`` float32, mean of the lengths of their pairs.
        length: ``(Hq,)`` float32, mean of the queries' own lengths.
        frequencies: ``(R / 2,)`` float32 of the ``R`` rotated dimensions, in radians per position; empty for a file
            of TriAttention's, which does not hold them.
        metadata: what was measured on what, all strings; see :func:`calibrate`.
        source: where it was read or made, for messages.
    """

    mean: Mapping[int, Tensor]
    absolute: Mapping[int, Tensor]
    length: Mapping[int, Tensor]
    frequencies: Mapping[int, Tensor]
    metadata: Mapping[str, str]
    source: str = "this calibration"

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Mean and absolute mean of a layer, as a :class:`~kvretain.cache.view.CacheView` holds them."""
        return self.mean[layer], self.absolute[layer]

    @property
    def layers(self) -> list[int]:
        """The layers' indices, ascending."""
        return sorted(self.mean)

    @property
    def concentration(self) -> Tensor:
        """``R = |mean of q| / mean of |q|``, ``(layers, Hq)`` float32 in [0, 1]: 1 where all queries of a head are one
        direction.

        For a file of TriAttention's the mean of |q| is not known; the least that it can be is taken, so R is the
        largest that it can be.
        """
        return torch.stack([self.mean[i].abs().norm(dim=-1) / self.length[i].clamp_min(1e-30) for i in self.layers])

    def save(self, path: str | Path) -> Path:
        """Writes a safetensors file, complete or not at all.

        Raises:
            ImportError: safetensors is not installed.
        """
        tensors = {}
        for index in self.layers:
            tensors[f"{index}.mean"] = torch.view_as_real(self.mean[index])
            tensors[f"{index}.absolute"], tensors[f"{index}.length"] = self.absolute[index], self.length[index]
            tensors[f"{index}.frequencies"] = self.frequencies[index]
        return artefacts.write(path, tensors, dict(self.metadata))

    def check(self, model: Any, ropes: Mapping[int, Rope]) -> None:
        """Checks that this is a calibration of ``model``, as far as it says what it was measured on.

        Args:
            model: a transformers model or its decoder.
            ropes: the rotation of each full-attention layer.

        Raises:
            ValueError: it is not; the message says what differs.
        """
        if differences := list(_differences(self, model, ropes)):
            raise ValueError(f"{self.source} does not fit this model: {'; '.join(differences)}")


def _differences(calibration: Calibration, model: Any, ropes: Mapping[int, Rope]) -> Iterator[str]:
    """What differs, as "quantity: there, here"."""
    config, metadata = model.config, calibration.metadata
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kind = metadata.get("model_type", config.model_type)
    if kind != config.model_type:
        yield f"model type {kind}, the model's is {config.model_type}"
    published = "fingerprint" not in metadata
    layers = set(range(config.num_hidden_layers)) if published else set(ropes)
    if layers != set(calibration.layers):
        yield f"layers {_ranges(calibration.layers)}, the model's are {_ranges(sorted(layers))}"
    mean = calibration.mean[calibration.layers[0]]
    if len(mean) != config.num_attention_heads:
        yield f"{len(mean)} query heads, the model has {config.num_attention_heads}"
    if 2 * mean.shape[1] != size:
        yield f"head size {2 * mean.shape[1]}, the model's is {size}"
    rope = next(iter(ropes.values()))
    layout = _layout(rope)
    if metadata.get("layout", layout) != layout:
        yield f"rotary layout {metadata['layout']}, the model's is {layout}"
    if int(metadata.get("rotated", rope.size)) != rope.size:
        yield f"{metadata['rotated']} rotated dimensions, the model has {rope.size}"
    for index in sorted(ropes.keys() & calibration.frequencies.keys()):
        here, there = ropes[index].frequencies.float(), calibration.frequencies[index]
        # A model cast to half precision rotates by frequencies rounded to it.
        if here.shape == there.shape and not torch.allclose(here, there, rtol=0.01, atol=0):
            pair = int(((here - there).abs() / here).argmax())
            yield (
                f"rotary frequencies of layer {index}, e.g. {float(there[pair]):.4g} for pair {pair}, the model's is "
                f"{float(here[pair]):.4g}"
            )
            break
    if not published and metadata["fingerprint"] != (found := artefacts.fingerprint(model)):
        yield f"fingerprint of the weights {metadata['fingerprint']}, the model's is {found}"


def _layout(rope: Rope) -> str:
    return "interleaved" if rope.interleaved else "half"


def _ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


# Measuring


@dataclass(frozen=True)
class _Listener(Scorer):
    """Has the sums over pairs collected, of all tokens, and scores nothing."""

    needs = frozenset({"pairs"})
    first = 0

    def score(self, view: CacheView) -> Tensor:
        raise AssertionError("a calibration evicts nothing")


@torch.no_grad()
def calibrate(
    model: Any,
    text: str | Sequence[int] | Tensor,
    tokenizer: Any = None,
    *,
    tokens: int = TOKENS,
    context: int = CONTEXT,
    chunk: int = CHUNK,
    report: Report = lambda done, total: None,
) -> Calibration:
    """Measures the queries of ``model`` on a text.

    The text is cut into blocks of ``context`` tokens. Each is read from an empty cache with full attention, in passes
    of ``chunk`` tokens, so that statistics are the model's own and memory does not grow with the text, that of the text
    itself aside. If the tokenizer puts a beginning-of-text token first, every block has one. All tokens count.

    The metadata: ``model``, ``model_type``, ``fingerprint`` of the weights (:func:`kvretain.artefacts.fingerprint`),
    ``rotated`` dimensions, rotary ``layout`` and ``rope_parameters``, ``tokens`` read, ``context``, ``text_sha256`` (of
    the whole text, or of the token ids as int64), ``dtype``, and releases.

    Args:
        model: a decoder-only transformers model whose rotation is tested (``kvretain.cache.support.ROTARY``).
        text: text, or token ids.
        tokenizer: the model's; needed for a text.
        tokens: at most this many tokens are read.
        context: tokens of a block; at most what the model was made for.
        chunk: tokens of a pass.
        report: called after each pass.

    Raises:
        ValueError: a number below 1 (``context`` below 2), no token, a text without a tokenizer, token ids that the
            model does not have, queries that are not finite, or a model that cannot be served.
    """
    from .cache.cache import RetentionCache
    from .cache.layer import RetentionLayer
    from .cache.support import cache_argument, decoder_of

    for name, value, least in (("tokens", tokens, 1), ("context", context, 2), ("chunk", chunk, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"calibrate: {name} is a whole number of at least {least}, not {value!r}")
    decoder = decoder_of(model)
    ids, lead, digest = _tokenize(text, tokenizer, tokens)
    context = min(context, getattr(decoder.config, "max_position_embeddings", None) or context)
    body = context - len(lead)
    blocks = [torch.cat([lead, part]) for part in ids.split(body)] if len(ids) else []
    total = min(sum(map(len, blocks)), tokens)
    if not total:
        raise ValueError("calibrate: the text has no tokens")
    known: Any = decoder.get_input_embeddings().num_embeddings
    if foreign := ids[(ids < 0) | (ids >= known)].tolist():
        raise ValueError(
            f"calibrate: token id {foreign[0]} is none of the model's {known}: is it the model's own tokenizer?"
        )
    training = decoder.training
    decoder.eval()
    try:
        cache = RetentionCache.for_model(decoder, Policy(_Listener()), ratio=0)
        layers = [layer for layer in cache.layers if isinstance(layer, RetentionLayer)]
        sums: dict[int, list[Tensor]] = {}
        done = 0
        for block in blocks:
            if done == total:
                break
            cache.reset()
            for part in block[: total - done].split(chunk):
                decoder(input_ids=part[None].to(decoder.device), **{cache_argument(decoder): cache})
                done += len(part)
                report(done, total)
            for layer in layers:
                assert layer.pair_sums is not None
                new = [part[0].cpu().double() for part in layer.pair_sums]
                old = sums.get(layer.index, [torch.zeros_like(part) for part in new])
                sums[layer.index] = [a + b for a, b in zip(old, new, strict=True)]
        ropes = {layer.index: layer.rope for layer in layers if layer.rope is not None}
    finally:
        decoder.train(training)
    mean, absolute, length = {}, {}, {}
    for index, (plain, lengths, whole) in sums.items():
        if not bool(plain.isfinite().all() and whole.isfinite().all()):
            raise ValueError(f"calibrate: the queries of layer {index} are not finite")
        mean[index] = torch.complex(*(plain / total).float().chunk(2, -1))
        absolute[index], length[index] = (lengths / total).float(), (whole / total).float()[:, 0]
    rope = next(iter(ropes.values()))
    metadata = {
        "kind": KIND,
        "model": _name(decoder),
        "model_type": decoder.config.model_type,
        "fingerprint": artefacts.fingerprint(decoder),
        "rotated": str(rope.size),
        "layout": _layout(rope),
        "rope_parameters": json.dumps(getattr(decoder.config, "rope_parameters", None), default=str),
        "tokens": str(total),
        "context": str(context),
        "text_sha256": digest,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        **_versions(),
    }
    return Calibration(mean, absolute, length, {i: r.frequencies.float() for i, r in ropes.items()}, metadata)


def _tokenize(text: str | Sequence[int] | Tensor, tokenizer: Any, tokens: int) -> tuple[Tensor, Tensor, str]:
    """At most ``tokens`` ids, the ids that must lead each block, and the text's digest; memory of the text itself
    aside, what this holds is bounded by ``tokens`` and the longest line."""
    none = torch.empty(0, dtype=torch.int64)
    if not isinstance(text, str):
        ids = torch.as_tensor(text, dtype=torch.int64).reshape(-1).cpu()
        return ids[:tokens], none, hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    if tokenizer is None:
        raise ValueError("calibrate: a text needs the model's tokenizer; or give token ids")
    read: list[int] = []
    lines, size = [], 0
    # Not the whole of a long text at once: only what is read.
    for line in [*text.splitlines(keepends=True), ""]:
        lines.append(line)
        size += len(line)
        if size >= 1 << 16 or not line:
            read += tokenizer("".join(lines), add_special_tokens=False)["input_ids"]
            lines, size = [], 0
        if len(read) >= tokens:
            break
    start, first = tokenizer.bos_token_id, tokenizer("a")["input_ids"][:1]
    lead = torch.tensor([start]) if start is not None and first == [start] else none
    return torch.tensor(read[:tokens], dtype=torch.int64), lead, hashlib.sha256(text.encode()).hexdigest()


def _name(model: Any) -> str:
    """The model's name on the hub, or the name of its folder."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    return Path(name).name if Path(name).exists() else name


def _versions() -> dict[str, str]:
    import transformers

    from . import __version__

    return {"kvretain": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


# Files


_loaded: dict[Path, tuple[tuple[int, int], Calibration]] = {}


def load(path: str | Path) -> Calibration:
    """A calibration from a file of ours (safetensors), or one that TriAttention published (``.pt``, read as plain
    tensors: no code in it is ever run). A file is read again only when it has changed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is neither, or has numbers that are not finite.
    """
    path = Path(path).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no calibration {str(path)!r}")
    state = path.stat()
    stamp = state.st_mtime_ns, state.st_size
    if path not in _loaded or _loaded[path][0] != stamp:
        read = (_read_own if artefacts.is_safetensors(path) else _read_published)(path)
        for name in ("mean", "absolute", "length", "frequencies"):
            for index, part in sorted(getattr(read, name).items()):
                if not part.isfinite().all():
                    raise ValueError(
                        f"{read.source} has numbers that are not finite ({name} of layer {index}): make it again"
                    )
        _loaded[path] = stamp, read
    return _loaded[path][1]


def _read_own(path: Path) -> Calibration:
    tensors, metadata = artefacts.read(path)
    parts: dict[str, dict[int, Tensor]] = {"mean": {}, "absolute": {}, "length": {}, "frequencies": {}}
    try:
        if metadata["kind"] != KIND:
            raise KeyError("kind")
        for name, tensor in tensors.items():
            index, _, part = name.partition(".")
            parts[part][int(index)] = tensor
        mean = {index: torch.view_as_complex(tensor.contiguous()) for index, tensor in parts.pop("mean").items()}
        whole = mean and "fingerprint" in metadata and all(part.keys() == mean.keys() for part in parts.values())
    except (KeyError, ValueError, RuntimeError):
        whole = False
    if not whole:
        raise ValueError(f"{str(path)!r} is not a calibration: make one with `kvretain calibrate`")
    return Calibration(mean, **parts, metadata=metadata, source=f"the calibration {str(path)!r}")


def _read_published(path: Path) -> Calibration:
    wrong = f"{str(path)!r} is neither a calibration of `kvretain calibrate` nor a file of statistics from TriAttention"
    try:
        with path.open("rb") as file:  # of some names, torch would read safetensors
            found = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"{wrong}: it is no file of plain tensors, and nothing else is read (code could run)"
        ) from None
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{wrong}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    try:
        stats, about = found["stats"], found["metadata"]
        heads: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        for key, values in stats.items():
            place = re.fullmatch(r"layer(\d+)_head(\d+)", key)
            assert place is not None, f"the key {key!r}"
            parts = [values[name].to(torch.float32) for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")]
            heads.setdefault(int(place[1]), {})[int(place[2])] = torch.complex(*parts[:2]), parts[2]
        sizes = {len(pair[0]) for layer in heads.values() for pair in layer.values()}
        assert len(sizes) == 1 and 2 * sizes.pop() == about["head_dim"], "head sizes that differ"
        mean, absolute = (
            {i: torch.stack([layer[h][part] for h in range(len(layer))]) for i, layer in heads.items()}
            for part in (0, 1)
        )
        assert len({len(layer) for layer in mean.values()}) == 1, "layers with other numbers of heads"
        style = about["rope_style"]
        assert style in ("half", "interleaved"), f"the rope_style {style!r}"
    except (KeyError, TypeError, AttributeError, AssertionError, RuntimeError, IndexError) as error:
        raise ValueError(
            f"{wrong}: it has {error if isinstance(error, AssertionError) else 'other contents'}"
        ) from None
    metadata = {
        "model": str(about.get("model_name", "")),
        "layout": style,
        "rotated": str(about["head_dim"]),  # of every head all dimensions
    }
    length = {index: part.norm(dim=-1) for index, part in absolute.items()}
    return Calibration(mean, absolute, length, {}, metadata, f"the calibration {str(path)!r}")


# Which calibration belongs to a model


_lock = threading.RLock()
_unsaved: dict[Path, Calibration] = {}
_said: set[str] = set()


def calibration_for(model: Any, path: str, ropes: Mapping[int, Rope]) -> Calibration:
    """The calibration of ``model`` at ``path``; for ``""`` the one in the user's cache folder, made if it is missing.

    What is made is measured on :func:`default_text`, with a progress bar, kept by the fingerprint of the weights
    (:func:`kvretain.artefacts.own_path`), and said once. Several threads or processes may ask at once.

    Args:
        model: a transformers model or its decoder.
        path: a file for :func:`load`, or ``""``.
        ropes: the rotation of each full-attention layer.

    Raises:
        FileNotFoundError: there is no file at ``path``.
        ValueError: it is no calibration or does not fit the model; or none can be made, because the model's tokenizer
            is not found.
    """
    if path:
        calibration = load(path)
        calibration.check(model, ropes)
        if "fingerprint" not in calibration.metadata and path not in _said:
            _said.add(path)
            say(
                f"{calibration.source} fits in layers, heads, head size and layout; that it was measured on these "
                f"weights and this rotation cannot be checked (it says: {calibration.metadata['model'] or 'no model'})"
            )
        return calibration
    place = artefacts.own_path("calibration", model)
    with _lock:
        if not place.is_file() and place not in _unsaved:
            made = _automatic(model, place)
            try:
                made.save(place)
            except OSError as error:
                say(f"the calibration could not be kept in {place} ({error.strerror}); it serves this process")
                _unsaved[place] = made
        calibration = _unsaved.get(place) or load(place)
    try:
        calibration.check(model, ropes)
    except ValueError as error:
        raise ValueError(f"{error}; run `kvretain calibrate` again, or delete that file") from None
    return calibration


def _automatic(model: Any, place: Path) -> Calibration:
    """A calibration on the bundled text, with the model's own tokenizer."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    call = "kvretain.calibrate.calibrate(model, text, tokenizer)"
    command = f"run `kvretain calibrate --model {name or '...'}`, or call {call}"
    where = f"and save it as {str(place)!r} or name the file: trig(calibration='...')"
    missing = f"this policy needs a calibration of the model, and finds none at {str(place)!r}. To make one"
    if not name:
        raise ValueError(f"{missing} its tokenizer must be known, but the model has no name: {command}, {where}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{missing} its tokenizer is needed, but {name!r} has none that loads ({reason}): {command}, {where}"
        ) from error
    text, title, context = default_text(model)
    say(f"calibrating {_name(model) or model.config.model_type} on {title}, once; kept in {place}")
    with progress_bar("calibrating") as report:
        return calibrate(model, text, tokenizer, context=context, report=report)


def default_text(model: Any) -> tuple[str, str, int]:
    """What to calibrate on where nothing is named: the text, what it is called, and the tokens of a block.

    A bundled chapter of public-domain text; for a laboratory animal (:mod:`kvretain.lab`), which has no words for that,
    solved chains, one a block.
    """
    if getattr(model.config, "kvretain_lab", None):
        text, context = reading()
        return text, "solved chains", context
    return data.chapter(), "a chapter of Alice", CONTEXT


@contextmanager
def progress_bar(label: str) -> Iterator[Report]:
    """A bar on standard error that goes when it is done, where rich is installed; yields what :func:`calibrate`
    reports to."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        print(f"{label} ...", file=sys.stderr, flush=True)
        yield lambda done, total: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
