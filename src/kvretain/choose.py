"""scores -> refine -> select, on tensors: from cache views to the indices of the entries that stay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .cache.view import CacheView
from .policy import Policy
from .scores import scorers
from .select.allocate import compete, layer_budgets
from .select.scope import combine_heads, combine_layers
from .zscores import standardised


def choose(
    policy: Policy,
    views: Sequence[CacheView],
    ratio: float | Tensor,
    counts: int | Sequence[int],
    values: Tensor | None = None,
    given: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Which entries of each view stay.

    Args:
        policy: any but ``full``.
        views: the layers that choose together: one for the scopes ``head`` and ``layer``, all for ``model`` and
            ``aligned``.
        ratio: fraction removed of the tokens seen, for refiners; a number or ``(B,)``.
        counts: real entries to keep; one number, or one per row (rows of a padded batch may keep fewer).
        values: for the scope ``model``, what :func:`shared_values` gives, if it is known already.
        given: a ``(B, H, N)`` float32 per view to take in place of the scorer's scores.

    Returns:
        Per view, indices ``(B, H, K)`` int64, or ``(B, 1, K)`` where all heads share a set, with ``K`` the largest
        count; ascending; a row that keeps fewer than ``K`` has leading -1.

    Raises:
        ValueError: scores that are not finite float32 ``(B, H, N)`` (names scorer and layer), more protected entries
            than a count holds, or layers with different numbers of heads under the scope ``aligned``.
    """
    heads = sorted({view.keys.shape[1] for view in views})
    if policy.scope == "aligned" and len(heads) > 1:
        raise ValueError(
            f"the scope 'aligned' needs as many KV heads in every layer, but this model has {heads}: "
            "use @model or @head"
        )
    refined = _refined(policy, views, ratio, given)
    if policy.scope == "head":
        return [_select(policy, scores, [view], counts) for scores, view in zip(refined, views, strict=True)]
    if policy.scope != "aligned":
        refined = [combine_heads(s, v.candidates, policy.combine) for s, v in zip(refined, views, strict=True)]
    elif policy.combine == "zscore":
        refined = [standardised(s, v.candidates) for s, v in zip(refined, views, strict=True)]
    chosen = _select(policy, combine_layers(refined, policy.combine), views, counts, values)
    return [chosen.to(view.keys.device) for view in views]


def shared_values(policy: Policy, views: Sequence[CacheView], heads: int = 1, start: int = 0) -> Tensor:
    """What the selector compares, ``(B, heads, N - start, D)``: the entries' value vectors (or keys), averaged.

    Args:
        policy: one whose selector ``needs_values``.
        views: the layers that share a set.
        heads: sets per layer: 1 (then the mean goes over heads, too) or the number of heads.
        start: entries before it are left out.
    """
    states = [view.keys if policy.selector.space == "keys" else view.values for view in views]
    values = [state[:, :, start:] for state in states]
    if heads == 1:
        return policy.selector.mean_values(values)[:, None]
    # Each head is a row of its own, with one head.
    means = policy.selector.mean_values([v.flatten(0, 1)[:, None] for v in values])
    return means.unflatten(0, (-1, heads))


def choose_unequal(
    policy: Policy,
    views: Iterable[CacheView],
    ratio: float | Tensor,
    counts: Sequence[int],
    given: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """As :func:`choose`, for policies under which heads or layers keep different numbers of entries.

    Args:
        policy: a ``ragged`` one.
        views: the layers that choose together: one, or all for ``model-heads``; one at a time is held.
        ratio: fraction removed of the tokens seen, for refiners; a number or ``(B,)``.
        counts: ``B`` numbers: real entries that each row keeps per head, averaged over the heads of the views.
        given: as in :func:`choose`.

    Returns:
        Per view, which entries stay, ``(B, H, N)`` bool.

    Raises:
        ValueError: as :func:`choose`.
    """
    masks: list[Tensor] = []
    protected: list[Tensor] = []
    for view in views:
        [scores] = _refined(policy, [view], ratio, None if given is None else [given[len(masks)]])
        if policy.competes:
            masks.append(scores.masked_fill(~view.valid, -torch.inf))
            protected.append(view.protected)
            del view  # the view of unequal heads is a padded copy of its layer: it goes before the next one comes
            continue
        shared = combine_heads(scores, view.candidates, policy.combine) if policy.scope == "layer" else scores
        available = view.valid[:, 0].sum(-1).tolist()
        index = _select(policy, shared, [view], [min(c, n) for c, n in zip(counts, available, strict=True)])
        mask = torch.zeros(*index.shape[:2], view.positions.shape[2] + 1, dtype=torch.bool, device=index.device)
        # A leading -1 of a row that keeps less lands in the extra column.
        masks.append(mask.scatter_(2, index.remainder(mask.shape[2]), True)[..., :-1].expand_as(view.positions))
    return compete(masks, protected, counts, policy.floor) if policy.competes else masks


def row_budgets(
    policy: Policy, view: CacheView, means: Sequence[int], rank: int, layers: int, evicted: bool
) -> tuple[int, ...]:
    """Entries per head that each row keeps in the ``rank``-th of ``layers`` layers.

    Args:
        policy: says how layers share.
        view: the layer's entries.
        means: ``B`` numbers: entries per head, averaged over layers.
        rank: index among the layers that share.
        layers: how many they are.
        evicted: whether entries were evicted before, so that layers hold different numbers of them.
    """
    protected, stored = (mask.sum(-1).amax(-1).tolist() for mask in (view.protected, view.valid))
    budgets = []
    for mean, guarded, has in zip(means, protected, stored, strict=True):
        # At the first eviction all layers have equally many entries, and none can keep more than it has.
        lowest, highest = min(guarded, mean), 2 * mean if evicted else max(mean, has)
        shares = layer_budgets(policy.layers, mean, layers, lowest=lowest, highest=highest, beta=policy.beta)
        budgets.append(shares[rank])
    return tuple(budgets)


def _refined(
    policy: Policy, views: Sequence[CacheView], ratio: float | Tensor, given: Sequence[Tensor] | None
) -> list[Tensor]:
    """Scores of the views after refinement, ``(B, H, N)`` float32 each."""
    if given is None:
        given = [_scores(policy, view) for view in views]
    return [_refine(policy, view, scores, ratio) for view, scores in zip(views, given, strict=True)]


def _scores(policy: Policy, view: CacheView) -> Tensor:
    """What the scorer says of one view, checked, ``(B, H, N)`` float32."""
    assert policy.scorer is not None
    # Under autocast products would come out in half precision, and scores are float32.
    with torch.autocast(view.keys.device.type, enabled=False):
        scores = policy.scorer.score(view)
    name = scorers.name_of(policy.scorer)
    is_tensor = isinstance(scores, Tensor)
    if not is_tensor or scores.shape != view.positions.shape or scores.dtype != torch.float32:
        given = f"{tuple(scores.shape)} {scores.dtype}" if is_tensor else type(scores).__name__
        raise ValueError(
            f"scorer {name!r} returned {given} at layer {view.layer}; "
            f"expected {tuple(view.positions.shape)} torch.float32"
        )
    if not torch.where(view.valid, scores, 0).isfinite().all():
        raise ValueError(
            f"scorer {name!r} gave NaN or infinite scores at layer {view.layer}; "
            "check the scorer, or the model's keys, for NaN"
        )
    return scores


def _refine(policy: Policy, view: CacheView, scores: Tensor, ratio: float | Tensor) -> Tensor:
    assert policy.scorer is not None
    if policy.refiner is None:
        return scores
    scores = policy.scorer.nonnegative(scores, view.candidates)
    if isinstance(ratio, Tensor):
        ratio = ratio.to(scores.device)
    return policy.refiner.refine(scores, ratio, positions=view.positions, protected=view.closed)


def _select(
    policy: Policy,
    scores: Tensor,
    views: Sequence[CacheView],
    counts: int | Sequence[int],
    values: Tensor | None = None,
) -> Tensor:
    """Indices ``(B, Hp, K)`` from scores ``(B, Hp, N)`` for the ``views`` that share them, rows with smaller counts
    padded in front with -1."""
    heads, view = scores.shape[1], views[0]
    valid, protected, positions = view.valid[:, :heads], view.protected[:, :heads], view.positions[:, :heads]
    scores = scores.masked_fill(~valid, -torch.inf)
    if policy.selector.needs_values and values is None:
        values = shared_values(policy, views, heads)
    if isinstance(counts, int):
        return policy.selector.select(scores, counts, protected=protected, positions=positions, values=values)
    largest = max(counts)
    chosen = scores.new_full((*scores.shape[:-1], largest), -1, dtype=torch.int64)
    for count in set(counts) - {0}:  # a row of padding alone keeps nothing
        rows = torch.tensor([row for row, c in enumerate(counts) if c == count], device=scores.device)
        picked = policy.selector.select(
            scores[rows],
            count,
            protected=protected[rows],
            positions=positions[rows],
            values=None if values is None else values[rows],
        )
        chosen[rows, :, largest - count :] = picked
    return chosen
