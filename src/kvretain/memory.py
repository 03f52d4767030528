"""How much memory a cache takes, from a model's configuration alone: no weights are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .policy import Policy

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class Layers:
    """What one sequence puts into a model's cache, in bytes.

    Attributes:
        full: for each layer of full attention, bytes of an entry (all KV heads, keys and values).
        sliding: for each sliding layer, its window in entries and the bytes of one.
        constant: state that does not grow (recurrent and convolutional layers).
        weights: parameters of the whole model, shared ones once; for all sequences together.
    """

    full: tuple[int, ...]
    sliding: tuple[tuple[int, int], ...]
    constant: int
    weights: int


@dataclass(frozen=True)
class Need:
    """What one cache takes for one sequence, in bytes of its tensors; a model's activations are not counted.

    Attributes:
        budget: entries per head; None is the full cache.
        decoding: storage while decoding, with the whole context seen.
        peak: the most that exists at once: in the prefill, or for a moment while storage is renewed.
        batch: sequences that fit into the memory beside the weights; None if no memory was given.
    """

    budget: int | None
    decoding: int
    peak: int
    batch: int | None = None


def layers_of(config: Any, dtype: torch.dtype | None = None) -> Layers:
    """Runs the model of ``config`` on tensors without memory, and reads off its cache what each layer stores.

    Args:
        config: of a causal language model, e.g. of ``AutoConfig.from_pretrained``.
        dtype: of weights and cache; default: the configuration's, or float32.

    Raises:
        ValueError: a model that kvretain does not serve, by name.
    """
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    from .cache import support

    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    # Shapes are read in bfloat16, the one type in which mixtures of experts run without memory.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def nbytes(tensor: Tensor) -> int:
        return tensor.numel() * (dtype if tensor.dtype == torch.bfloat16 else tensor.dtype).itemsize

    decoder = support.decoder_of(model)
    kinds = support.layers_of(decoder)
    cache, tokens = DynamicCache(config=decoder.config), 4
    with torch.no_grad():
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        decoder(ids, **{support.cache_argument(decoder): cache})
    full, sliding, constant = [], [], 0
    filled: list[Any] = cache.layers
    for kind, layer in zip(kinds, filled, strict=True):
        if type(kind) is DynamicLayer or isinstance(layer, DynamicSlidingWindowLayer):
            entry = sum(nbytes(t[:, :, :1]) for t in (layer.keys, layer.values))
            if type(kind) is DynamicLayer:
                full.append(entry)
            else:
                sliding.append((layer.sliding_window, entry))
        else:
            constant += sum(map(nbytes, _tensors(vars(layer))))
    return Layers(tuple(full), tuple(sliding), constant, sum(map(nbytes, model.parameters())))


def needs(
    layers: Layers,
    context: int,
    budgets: Sequence[int],
    *,
    policy: str | Policy = "snapkv",
    every: int = 128,
    chunk: int | None = None,
    memory: int | None = None,
) -> list[Need]:
    """The full cache's need and that of each budget, for a sequence of ``context`` tokens.

    Args:
        layers: see :func:`layers_of`.
        context: tokens seen, prompt and answer together; for the peak, all of them are the prompt.
        budgets: entries kept per head; ``full`` keeps everything, so of it there is the full cache's need alone.
        policy: one that chooses for all layers together (``@model``, ``/diverse@model``, ...) evicts after the last
            layer, and so holds all of the prompt at the peak; others hold one layer of it. One that repeats what it has
            read (``kvzip``) holds the repetition, too. Where heads or layers keep unequal numbers of entries, one layer
            at a time is padded to its longest head, which is taken to be twice the average; it may be longer.
        every: the cache's decode cadence.
        chunk: tokens per pass of the prefill; default: one pass.
        memory: bytes for weights and caches, to say how many sequences fit.

    Raises:
        ValueError: a number out of range, or an unknown policy.
    """
    for name, value in (("context", context), ("every", every), *(("budget", budget) for budget in budgets)):
        if value < 1:
            raise ValueError(f"{name} is a whole number of at least 1, not {value!r}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is a whole number of at least 1, not {chunk!r}")
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    total, largest = sum(layers.full), max(layers.full, default=0)
    bounded = layers.constant + sum(entry * min(window, context) for window, entry in layers.sliding)
    step = min(chunk or context, context)

    scorer: Any = policy.scorer

    def repeated(tokens: int) -> int:
        """Entries that a repetition of ``tokens`` appends for a while."""
        return len(scorer.prompt) + min(tokens, scorer.chunk + scorer.lead) if "replay" in policy.needs else 0

    def fits(peak: int) -> int | None:
        return None if memory is None else max(0, (memory - layers.weights) // peak)

    # Appending to one layer of a full cache holds that layer twice.
    full = bounded + context * (total + largest)
    found = [Need(None, bounded + context * total, full, fits(full))]
    for budget in budgets if policy.scorer is not None else ():
        stays, slots = min(budget, context), budget + every
        passing = min(stays + step, context) if step < context else context
        again = repeated(passing)
        if policy.deferred and context > budget:
            stored = (passing + again) * total
            prefill = stored + (passing * largest if again or step < context else 0)
        else:
            stored = stays * total + step * largest
            prefill = stays * total + passing * largest
        # An eviction in place holds what stays of one layer twice.
        decoding = slots * total
        evicting = decoding + repeated(every) * total + (slots if again else budget) * largest
        if policy.ragged:
            # Of one layer: its heads padded to the longest, then with the new entries, then what stays.
            if step < context:
                prefill = max(prefill, stored + (5 * stays + step) * largest)
            evicting = max(evicting, decoding + repeated(every) * total + (5 * stays + every) * largest)
        peak = bounded + max(prefill, evicting)
        found.append(Need(budget, bounded + decoding, peak, fits(peak)))
    return found


def parse_size(text: str) -> int:
    """Bytes of a size such as ``24GiB``, ``80 GB`` or ``512MiB``.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if not match or not (size := int(float(match[1]) * _UNITS[match[2] or ""])):
        raise ValueError(f"a memory size is a number and a unit, such as 24GiB or 80GB, not {text!r}")
    return size


def show_size(size: int) -> str:
    """``size`` bytes for reading, with three significant digits."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    digits = 0 if value >= 100 or units[0] == "B" else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {units[0]}"


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in dictionaries and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
