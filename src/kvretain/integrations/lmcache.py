"""LMCache's token-dropping SDK: a function that edits a request's cached keys and values, for ``modify_kv``.

The SDK (``lmcache.sdk``, LMCache 0.5) hands over what an engine has cached of a request, takes an edited version back,
and lets the engine decode from that. Nothing of LMCache is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..policy import Policy
from ..rope import Rope
from ..serving.retain import retain

Edit = Callable[[Mapping[Any, Tensor], Sequence[int]], tuple[Tensor, list[int]]]


def dropper(
    policy: str | Policy,
    *,
    head_size: int,
    rope: Rope,
    budget: int | None = None,
    ratio: float | None = None,
    chunk: int = 256,
    **options: Any,
) -> Edit:
    """What ``LMCacheRequestStream.modify_kv`` and ``LMCacheBatchedStream.modify`` take: an edit that keeps what
    ``policy`` keeps.

    A request's entries are named by one list of token ids, so all layers and heads must keep the same tokens: the
    policy's scope is ``@model``. The engine counts positions by the entries that are stored, so kept keys are rotated
    to the positions 0 to K-1; distances between tokens shrink, other than in a
    :class:`~kvretain.RetentionCache`. Only whole chunks are stored, so ``K`` is a multiple of ``chunk``; a ratio is
    rounded to the next larger one.

    The edited entries are stored under the ids of the kept tokens: a request with just those tokens as its prompt would
    be served them. Give requests of your own a ``cache_salt``.

    Args:
        policy: with the scope ``@model``. If it needs queries (``snapkv@model``), the SDK must have a query context,
            and the engine LMCache's patch for it.
        head_size: dimensions of a head.
        rope: the model's rotation.
        budget: entries kept, a multiple of ``chunk``.
        ratio: fraction removed; give this or ``budget``.
        chunk: the server's chunk size.
        options: further arguments of :func:`kvretain.retain`: ``sinks``, ``recent``, ``calibration``, ``scaling``, ...

    Returns:
        A function of the SDK's tensors (``[2, L, T, H * D]`` of the kind ``kv``, ``[1, L, T, Hq * D]`` of the kind
        ``query``) and the ``T`` token ids, which gives ``[2, L, K, H * D]`` and ``K`` token ids. What fits the budget
        comes back as it is.

    Raises:
        ValueError: another scope, a budget that is no multiple of ``chunk``; later, in the edit: tensors of another
            shape, queries that are needed and not there, and what :func:`kvretain.retain` refuses.

    Example:
        >>> rope = Rope.plain(1e4 ** (-torch.arange(0, 64, 2) / 64))
        >>> edit = dropper("keydiff@model", head_size=64, rope=rope, ratio=0.5)
        >>> kv, tokens = edit({"kv": torch.randn(2, 3, 1024, 128)}, list(range(1024)))
        >>> kv.shape, len(tokens), tokens[:4]
        (torch.Size([2, 3, 512, 128]), 512, [0, 1, 2, 3])
    """
    policy = policy if isinstance(policy, Policy) else Policy.parse(policy)
    if policy.scope != "model":
        raise ValueError(
            f"the policy {str(policy)!r} lets heads or layers keep different tokens, but LMCache names a request's "
            "entries by one list of tokens: use the scope @model"
        )
    if (budget is None) == (ratio is None):
        raise ValueError("give either budget (entries kept) or ratio (fraction removed)")
    if budget is not None and (budget < chunk or budget % chunk):
        lower = max(chunk, budget // chunk * chunk)
        raise ValueError(
            f"LMCache stores whole chunks of {chunk} tokens, so a budget of {budget} cannot be kept: {lower} can"
        )

    window = policy.scorer.window if policy.scorer else 0

    def edit(tensors: Mapping[Any, Tensor], tokens: Sequence[int]) -> tuple[Tensor, list[int]]:
        # The SDK's kinds are an enum; their values are these words.
        found = {str(getattr(kind, "value", kind)): tensor for kind, tensor in tensors.items()}
        kv = _checked("kv", found.get("kv"), 2, len(tokens), head_size)
        total = kv.shape[2]
        keep = budget
        if ratio is not None:
            # The first multiple of the chunk that removes no more than the fraction.
            keep = -(-max(1, total - int(ratio * total + 1e-9)) // chunk) * chunk
        assert keep is not None
        if keep >= total:
            return kv, list(tokens)
        given = dict(options)
        if "queries" in policy.needs:
            queries = found.get("query")
            if queries is None:
                raise ValueError(
                    f"the policy {str(policy)!r} needs queries: make the request with a query context, too "
                    "(lmcache.sdk.qcache.connect)"
                )
            queries = _checked("query", queries, 1, total, head_size)
            last = queries[0, :, -window:]
            given["queries"] = [layer[None] for layer in _by_head(last, head_size)]
        keys, values = (_by_head(part, head_size) for part in kv)
        if policy.needs & {"moments", "calibration"}:
            given["rope"] = rope
        layers = [[layer[None] for layer in part] for part in (keys, values)]
        kept = retain(*layers, policy=policy, budget=keep, **given)[0][0, 0]  # all layers and heads keep the same
        new = torch.arange(len(kept), device=kept.device)
        moved = rope.move(keys[:, :, kept], kept[None], new[None])
        edited = torch.stack([moved, values[:, :, kept]]).transpose(2, 3).flatten(3)
        return edited, [tokens[at] for at in kept.tolist()]

    return edit


def _checked(kind: str, tensor: Tensor | None, first: int, total: int, head_size: int) -> Tensor:
    fits = tensor is not None and tensor.ndim == 4 and tensor.shape[0] == first and tensor.shape[2] == total
    if tensor is None or not fits or tensor.shape[3] % head_size:
        found = "nothing" if tensor is None else tuple(tensor.shape)
        raise ValueError(
            f"the {kind} tensor must be [{first}, layers, {total} tokens, heads * {head_size}], but it is {found}"
        )
    return tensor


def _by_head(states: Tensor, head_size: int) -> Tensor:
    """``(L, T, H * D)`` as ``(L, H, T, D)``."""
    return states.unflatten(-1, (-1, head_size)).transpose(1, 2)
