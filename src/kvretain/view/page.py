"""The page: all that runs recorded, packed into one HTML file whose script draws it."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from ..templates import render
from .collect import PROTECTED, Eviction, Run

MOST = 65_535
"""Tokens that a page can show: places are stored in 16 bits."""


def html_page(runs: Sequence[Run], *, title: str, note: str = "", command: str = "") -> str:
    """One self-contained HTML page about ``runs``: it loads nothing, and shows the same on any computer.

    Scores are stored by their exact place in their head, and to 0.4 %; cosines to 0.004.

    Args:
        runs: one or more of the same prompt and model, from :func:`kvretain.view.record`.
        title: of the page, e.g. model and text.
        note: a sentence under the title, e.g. the budget.
        command: for the page's foot: how to make it again.

    Raises:
        ValueError: no run, runs of different prompts or models, or more than :data:`MOST` tokens.
        ImportError: jinja2 is not installed.
    """
    data = packed(runs)
    script, style = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    content = {"title": title, "note": note, "command": command, "data": data, "script": script, "style": style}
    return render(__package__, "page.html.j2", content, extra="cli")


def packed(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page's script reads: plain values, and arrays as base64 of their zlib-compressed bytes.

    Errors are those of :func:`html_page`.
    """
    if not runs:
        raise ValueError("the page needs at least one run")
    first = runs[0]
    if (most := max(len(run.ids) for run in runs)) > MOST:
        raise ValueError(f"the page shows at most {MOST:,} tokens, not {most:,}")
    for run in runs[1:]:
        if run.ids[: run.prompt] != first.ids[: first.prompt]:
            raise ValueError(f"the runs of {first.policy!r} and {run.policy!r} read different prompts")
        if (run.layers, run.left.shape[1]) != (first.layers, first.left.shape[1]):
            raise ValueError(f"the runs of {first.policy!r} and {run.policy!r} are of different models")
    return {
        "layers": list(first.layers),
        "heads": first.left.shape[1],
        "prompt": {"ids": list(first.ids[: first.prompt]), "pieces": list(first.pieces[: first.prompt])},
        "runs": [_run(run) for run in runs],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "ids": list(run.ids[run.prompt :]),
        "pieces": list(run.pieces[run.prompt :]),
        "left": _bytes(_planes(run.left)),
        "nbytes": list(run.nbytes),
        "evictions": [_eviction(eviction, run.present(index)) for index, eviction in enumerate(run.evictions)],
    }


def _eviction(eviction: Eviction, present: Tensor) -> dict[str, Any]:
    candidates = (eviction.flags & PROTECTED) == 0
    rows = torch.zeros(present.shape, dtype=torch.bool)
    rows[present] = candidates
    counts = rows.flatten(0, 1).sum(-1).tolist()
    refined = eviction.refined
    return {
        "step": eviction.step,
        "scores": _ranked(eviction.scores[candidates], counts),
        "refined": None if refined is None else _ranked(refined[candidates], counts),
        "cosines": _bytes((eviction.cosines.clamp(-1, 1) * 127 + 127).round().to(torch.uint8)),
        "flags": _bytes(eviction.flags),
    }


def _ranked(scores: Tensor, counts: Sequence[int]) -> dict[str, str]:
    """``scores (M,)`` of heads that have ``counts`` of them: how many of its head's are larger than each, and each
    head's in falling order, as bfloat16, which compress to little."""
    places, ordered = [], []
    for part in scores.split(list(counts)):
        falling = part.sort(descending=True).values
        places.append(torch.searchsorted(-falling, -part))
        ordered.append(falling.to(torch.bfloat16).view(torch.int16).int() & 0xFFFF)
    return {"places": _bytes(_planes(torch.cat(places))), "ordered": _bytes(_planes(torch.cat(ordered)))}


def _planes(numbers: Tensor) -> Tensor:
    """Whole numbers below 65536 as all their high bytes, then all their low bytes: neighbours are alike, so that this
    compresses better."""
    flat = numbers.flatten()
    return torch.cat([flat // 256, flat % 256]).to(torch.uint8)


def _bytes(array: Tensor) -> str:
    """Base64 of the zlib-compressed little-endian bytes of ``array``."""
    numbers = array.contiguous().numpy()
    little = numbers.astype(numbers.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes(), 4)).decode()
