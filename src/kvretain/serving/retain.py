"""``retain``: the choice that a RetentionCache would make, for tensors that somebody else stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..cache.budget import Budget, protected_entries
from ..cache.view import CacheView
from ..choose import choose, choose_unequal, row_budgets
from ..policy import Policy
from ..rope import Rope
from ..select.scope import check_shared
from .arguments import Rows, entry_positions, floats, listed, row_numbers, said

Pair = tuple[Tensor, Tensor]


class Calibrated(Protocol):
    """Query statistics by layer: a :class:`kvretain.calibrate.Calibration`."""

    def of(self, layer: int) -> Pair:
        """Mean ``(Hq, D / 2)`` complex and absolute mean ``(Hq, D / 2)`` of a layer."""


NEEDS = {
    "queries": "the last {window} queries as they entered attention (rotated), (B, Hq, {window}, D)",
    "attention": "the attention weight that each entry has received so far, (B, H, N)",
    "moments": "mean (B, Hq, D) and covariance (B, Hq, D, D) of the queries before rotation",
    "calibration": "what kvretain.calibrate.load reads from a file of `kvretain calibrate`",
}
"""What a policy can need and :func:`retain` takes, by the argument's name."""

REFUSED = {
    "replay": "it reads the tokens a second time with the model",
    "norms": "it reads the tokens a second time with the model",
    "hidden": "it values hidden states, which a cache does not hold",
}
"""What it cannot take."""


def retain(
    keys: Tensor | Sequence[Tensor],
    values: Tensor | Sequence[Tensor],
    *,
    policy: str | Policy,
    budget: int | None = None,
    ratio: float | None = None,
    positions: Tensor | Sequence[Tensor] | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    seen: int | Tensor | Sequence[int] | None = None,
    sinks: int | None = None,
    recent: int | None = None,
    prompt: int | Tensor | Sequence[int] = 0,
    queries: Tensor | Sequence[Tensor] | None = None,
    attention: Tensor | Sequence[Tensor] | None = None,
    moments: Pair | Sequence[Pair] | None = None,
    calibration: Calibrated | Pair | Sequence[Pair] | None = None,
    rope: Rope | Sequence[Rope] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    scores: Tensor | Sequence[Tensor] | None = None,
    layer: int | Sequence[int] | None = None,
) -> Tensor | list[Tensor]:
    """Which cached entries to keep: indices into the entries given, in position order.

    The choice is the one that a :class:`~kvretain.RetentionCache` with the same policy and numbers makes of the same
    entries. Nothing is stored or changed; :mod:`kvretain.serving.paged` turns indices into moves between blocks.

    Shapes: ``B`` rows, ``H`` key/value heads, ``Hq`` query heads (a multiple of ``H``), ``N`` entries, ``D`` head size.
    One layer is a tensor; several are a list, and then every argument marked *per layer* is a list of as many, and a
    list comes back. The scopes ``model``, ``aligned`` and ``model-heads``, and pyramids, let layers choose together:
    they take the list of *all* full-attention layers.

    Args:
        keys: ``(B, H, N, D)`` *per layer*, any float dtype, as cached: rotated at their original positions. Entries
            that were quantised with more than a plain cast are to be dequantised first.
        values: ``(B, H, N, Dv)`` *per layer*.
        policy: a preset, a policy text or a :class:`~kvretain.Policy`.
        budget: entries kept per head, protected ones included.
        ratio: fraction *removed* of the tokens seen, in [0, 1): ``n`` tokens keep ``max(1, n - floor(ratio * n))``.
            Give this or ``budget``; ``full`` needs neither.
        positions: original positions of the entries among their row's real tokens, rising; -1 is padding, which may
            stand anywhere. Int, ``(N,)``, ``(B, N)`` or ``(B, H, N)``; one tensor for all layers, or *per layer*.
            Default: 0 to N-1.
        lengths: one number a row: of its entries only the first so many are real.
        seen: real tokens that each row has seen, evicted ones included; a number, or one a row. Default: the last
            position plus one.
        sinks, recent: first and last tokens that are always kept; default: the scorer's, at most a quarter and half of
            the budget.
        prompt: first tokens that are always kept, e.g. those in blocks that a prefix cache shares; a number, or one a
            row. They take the place of default sinks.
        queries: ``(B, Hq, W, D)`` *per layer*: the last queries of each row, oldest first, as they entered attention
            (rotated); at least as many as the policy's window.
        attention: ``(B, H, N)`` *per layer*: the weight that each entry has received so far, summed over queries and
            over the query heads of its group.
        moments: *per layer*, mean ``(B, Hq, D)`` and population covariance ``(B, Hq, D, D)`` of the queries before
            rotation.
        calibration: a :class:`kvretain.calibrate.Calibration`, or *per layer* what its ``of(layer)`` gives.
        rope: the layers' rotation, with moments or a calibration: :meth:`kvretain.rope.Rope.plain`; one for all layers,
            or *per layer*.
        scaling: attention logits are ``scaling * q . k``; default ``D ** -0.5``.
        softcap: logits are squashed by ``softcap * tanh(logits / softcap)``.
        scores: ``(B, H, N)`` *per layer*, your own, higher = keep. The policy's scorer then only gives its defaults:
            how many sinks and recent tokens, and whether scores can be negative. What stands at padding is not read.
        layer: index in the model, *per layer*, for a calibration and the scorer ``random``. Default: 0, 1, ...

    Returns:
        *Per layer* int64 indices ``(B, H, K)``, ascending, or ``(B, 1, K)`` where all heads of a layer share a set. A
        row that keeps fewer than ``K`` has leading -1; padding is never kept.

        Policies under which heads or layers keep different numbers (``@shared``, ``@model-heads``, pyramids) give bool
        masks ``(B, H, N)``: ``mask[b, h].nonzero()`` are a head's indices. Their budget is the mean per head.

    Raises:
        ValueError: an unknown policy; a number out of range, both or neither of ``budget`` and ``ratio``; shapes that
            do not fit; something that the policy needs and was not given (names the argument); a policy that needs the
            model itself, unless ``scores`` are given; a merger, since it changes values; one layer where all choose
            together; heads or layers that hold different entries where they share a set; more protected entries than
            the budget holds; scores that are not finite.

    Example:
        >>> keys, values = torch.randn(2, 1, 4, 64, 16, generator=torch.Generator().manual_seed(0))
        >>> retain(keys, values, policy="streaming", budget=6, sinks=2)[0, 0]
        tensor([ 0,  1, 60, 61, 62, 63])
        >>> retain([keys, keys], [values, values], policy="keydiff@model", ratio=0.75)[1].shape
        torch.Size([1, 1, 16])
    """
    policy = policy if isinstance(policy, Policy) else Policy.parse(policy)
    layers = None if isinstance(keys, Tensor) else len(keys)
    _check_policy(policy, layers is None, scores is not None)
    limit = None if policy.scorer is None else Budget(budget, ratio, sinks=sinks, recent=recent)
    states = _states(keys, values, layers)
    places = _places(positions, lengths, [k for k, _ in states], layers)
    rows = Rows.of(places, seen, prompt, ragged=policy.ragged)
    check_shared(f"the policy {str(policy)!r}", policy.scope, places)
    indices = list(range(len(states))) if layer is None else listed("layer", layer, layers)
    given: list[Tensor] | None = None
    extras: list[dict[str, Any]] = [{} for _ in states]
    if scores is not None:
        given = _own_scores(listed("scores", scores, layers), states, places)
    elif policy.needs:
        present = {"queries": queries, "attention": attention, "moments": moments, "calibration": calibration}
        extras = _extras(policy, present, rope, [k for k, _ in states], layers, indices)
    targets = [] if limit is None else [limit.keep(n) for n in rows.seen]
    if limit is None or all(target >= has for target, has in zip(targets, rows.stored, strict=True)):
        kept = [_all_of(policy, real, k.shape[1]) for real, (k, _) in zip(places, states, strict=True)]
        return kept[0] if layers is None else kept
    assert policy.scorer is not None
    first, last = limit.protections(policy.scorer, targets, rows.prompts, rows.seen, rows.stored, scored=given is None)
    counts = tuple(int(min(target, has)) for target, has in zip(targets, rows.stored, strict=True))
    views = []
    for at, ((k, v), real) in enumerate(zip(states, places, strict=True)):
        tokens, prompts = (torch.tensor(n, device=k.device) for n in (rows.seen, rows.prompts))
        if "queries" in extras[at]:
            window = extras[at]["queries"].shape[2]
            extras[at]["query_valid"] = torch.arange(-window, 0, device=k.device) >= -tokens[:, None]
        views.append(
            CacheView(
                keys=_workable(k),
                values=_workable(v),
                positions=real.expand(k.shape[:3]),
                seen=tokens,
                budget=max(counts),
                budgets=counts,
                protected=protected_entries(real, tokens, first, last, prompts).expand(k.shape[:3]),
                scaling=k.shape[3] ** -0.5 if scaling is None else scaling,
                softcap=softcap,
                layer=indices[at],
                num_layers=len(states),
                **extras[at],
            )
        )
    kept = []
    for group in [range(len(views))] if policy.whole_model else [range(at, at + 1) for at in range(len(views))]:
        kept += _choose(policy, limit, rows, counts, views, given, group)
    return kept[0] if layers is None else kept


def _choose(
    policy: Policy,
    limit: Budget,
    rows: Rows,
    counts: tuple[int, ...],
    views: list[CacheView],
    scores: list[Tensor] | None,
    group: range,
) -> list[Tensor]:
    """What stays in the layers of ``group``, which choose together."""
    together = [views[at] for at in group]
    given = None if scores is None else [scores[at] for at in group]
    ratio: float | Tensor
    if limit.ratio is not None:
        ratio = float(limit.ratio)
    elif rows.uneven:
        ratio = (1 - torch.tensor(counts) / torch.tensor(rows.seen).clamp_min(1)).to(torch.float32)
    else:
        ratio = 1 - counts[0] / rows.seen[0]
    if not policy.ragged:
        # Rows that are alike are chosen for at once.
        return choose(policy, together, ratio, counts if rows.uneven else counts[0], given=given)
    if not policy.whole_model:
        evicted = any(n > has for n, has in zip(rows.seen, rows.stored, strict=True))
        counts = row_budgets(policy, together[0], counts, group.start, len(views), evicted)
    return choose_unequal(policy, together, ratio, counts, given)


def _check_policy(policy: Policy, one: bool, scored: bool) -> None:
    """Raises ValueError where indices cannot say what ``policy`` does, or tensors do not hold what it needs."""
    name = f"the policy {str(policy)!r}"
    if policy.merger is not None:
        raise ValueError(
            f"{name} also changes the entries that stay, which indices cannot say: leave its '~' part out here, and "
            "call policy.merger.merge(keys, values, indices, positions) on what comes back"
        )
    if one and (policy.whole_model or policy.layers != "equal"):
        raise ValueError(f"{name} lets all layers of a model choose together: give lists, with keys and values of each")
    for need in sorted(policy.needs - NEEDS.keys()) if not scored else ():
        reason = REFUSED.get(need, f"it needs {need!r}, which a cache does not hold")
        raise ValueError(
            f"{name} cannot be served from cached tensors: {reason}. Give scores= (your own; this policy refines and "
            "selects them), or use RetentionCache"
        )


def _states(keys: Any, values: Any, layers: int | None) -> list[Pair]:
    """Keys and values of each layer."""
    if layers == 0:
        raise ValueError("keys is an empty list: give at least one layer")
    found: list[Pair] = []
    for at, (k, v) in enumerate(zip(listed("keys", keys, layers), listed("values", values, layers), strict=True)):
        k = floats(f"keys of layer {at}", k, (found[0][0].shape[0] if found else "B", "H", k.shape[2], "D"))
        found.append((k, floats(f"values of layer {at}", v, (*k.shape[:3], "Dv"))))
    return found


def _places(positions: Any, lengths: Any, keys: list[Tensor], layers: int | None) -> list[Tensor]:
    """Positions ``(B, H or 1, N)`` of each layer, -1 at padding."""
    shared = positions is None or isinstance(positions, Tensor)
    given = [positions] * len(keys) if shared else listed("positions", positions, layers)
    real = None if lengths is None else row_numbers("lengths", lengths, keys[0].shape[0])
    pairs = enumerate(zip(given, keys, strict=True))
    return [entry_positions(f"positions of layer {at}", own, k, real) for at, (own, k) in pairs]


def _own_scores(scores: list[Any], states: list[Pair], places: list[Tensor]) -> list[Tensor]:
    """The user's scores, ``(B, H, N)`` float32 of each layer."""
    found = []
    for at, (own, (k, _), real) in enumerate(zip(scores, states, places, strict=True)):
        found.append(floats(f"scores of layer {at}", own, k.shape[:3], k.device))
        if not torch.where(real >= 0, found[-1], 0).isfinite().all():
            raise ValueError(f"scores of layer {at} are NaN or infinite")
    return found


def _workable(states: Tensor) -> Tensor:
    """8-bit floats as bfloat16, which holds them exactly, and float64 as float32, in which scores are."""
    return states.to({1: torch.bfloat16, 8: torch.float32}.get(states.element_size(), states.dtype))


def _all_of(policy: Policy, positions: Tensor, heads: int) -> Tensor:
    """All real entries at ``positions (B, H or 1, N)``, in the form in which ``policy`` chooses."""
    shared = policy.scope in ("layer", "model") and not policy.ragged
    real = (positions[:, :1] if shared else positions.expand(-1, heads, -1)) >= 0
    if policy.ragged:
        return real
    width, size = int(real.sum(-1).max()) if real.numel() else 0, real.shape[2]
    slots = torch.arange(size, device=real.device).expand(real.shape).masked_fill(~real, -1)
    return slots.sort(-1).values[..., size - width :]


def _extras(
    policy: Policy,
    present: dict[str, Any],
    rope: Any,
    keys: list[Tensor],
    layers: int | None,
    indices: list[int],
) -> list[dict[str, Any]]:
    """What the scorer needs beside keys and values: a layer's arguments of :class:`CacheView`.

    Raises:
        ValueError: it was not given, or has the wrong shape; names the argument.
    """
    extras: list[dict[str, Any]] = [{} for _ in keys]
    for need in sorted(policy.needs):
        assert policy.scorer is not None
        window, given = policy.scorer.window, present[need]
        if given is None:
            raise ValueError(
                f"the policy {str(policy)!r} needs {need}=: {NEEDS[need].format(window=window)}. Or give scores= (your "
                "own)"
            )
        if need in ("moments", "calibration") and rope is None:
            raise ValueError(
                f"the policy {str(policy)!r} needs rope= beside {need}=: the model's rotation, e.g. "
                "kvretain.rope.Rope.plain(inverse_frequencies)"
            )
        if need == "calibration" and hasattr(given, "of"):
            given = [given.of(index) for index in indices]
        else:
            given = listed(need, given, layers)
        for at, (item, k) in enumerate(zip(given, keys, strict=True)):
            extras[at] |= _read(need, f"{need} of layer {at}", item, k, window)
    if policy.needs & {"moments", "calibration"}:
        ropes = [rope] * len(keys) if isinstance(rope, Rope) else listed("rope", rope, layers)
        for extra, own in zip(extras, ropes, strict=True):
            if not isinstance(own, Rope):
                raise ValueError(f"rope must be a kvretain.rope.Rope, not {said(own)}")
            extra["rope"] = own
    return extras


def _read(need: str, name: str, item: Any, keys: Tensor, window: int) -> dict[str, Any]:
    """One layer's ``item`` as arguments of :class:`CacheView`."""
    batch, heads, _, size = keys.shape
    if need == "attention":
        return {need: floats(name, item, keys.shape[:3], keys.device)}
    if need == "queries":
        item = floats(name, item, (batch, "Hq", "W", size), keys.device)
        if item.shape[2] < window:
            raise ValueError(f"{name} must hold the last {window} queries, the policy's window, not {item.shape[2]}")
        read = {need: item[:, :, -window:]}
        count = item.shape[1]
    else:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise ValueError(f"{name} must be a pair of tensors, not {said(item)}")
        if need == "moments":
            mean = floats(f"{name}, the mean,", item[0], (batch, "Hq", size), keys.device)
            count = mean.shape[1]
            covariance = floats(f"{name}, the covariance,", item[1], (batch, count, size, size), keys.device)
            read = {"query_mean": mean, "query_covariance": covariance}
        else:
            read, count = {need: tuple(part.to(keys.device) for part in item)}, len(item[0])
    if count % heads:
        raise ValueError(f"{name} has {count} query heads, which is no multiple of the {heads} key/value heads")
    return read
