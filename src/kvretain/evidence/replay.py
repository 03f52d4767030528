"""One prefill, many policies: record a context once in a cache that evicts nothing, compress copies of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache import CacheView, RetentionCache
from ..cache.support import keyword
from ..policy import Policy
from ..scores import Scorer


@dataclass(frozen=True)
class _Recorder(Scorer):
    """Collects what several scorers need and scores nothing."""

    needs: frozenset[str] = frozenset()  # type: ignore[misc]
    queries: int = 0

    @property
    def window(self) -> int:
        return self.queries

    def score(self, view: CacheView) -> Tensor:
        raise AssertionError("a recorder keeps everything")


def recording_key(policy: Policy) -> tuple[bool, Scorer | None]:
    """Policies with the same key can be served by one recording.

    Unequal numbers of entries need another storage; a scorer whose own fields say what is collected (``kvzip``,
    ``expected``, ``fastkvzip``) needs a cache of its own.
    """
    return policy.ragged, policy.scorer if policy.needs & {"replay", "moments", "hidden"} else None


def record(model: Any, ids: Sequence[int], policies: Sequence[Policy]) -> RetentionCache:
    """Prefills ``ids`` in a cache that never evicts by itself and collects what all ``policies`` need, for
    :meth:`~kvretain.RetentionCache.compress`.

    Raises:
        ValueError: ``policies`` differ in their :func:`recording_key`.
    """
    policies = [policy for policy in policies if policy.scorer is not None]
    keys = {recording_key(policy) for policy in policies}
    if len(keys) > 1:
        raise ValueError("these policies cannot share a recording, see recording_key")
    _, own_scorer = keys.pop() if keys else (False, None)
    scorers = [policy.scorer for policy in policies if policy.scorer is not None]
    needs = frozenset(need for policy in policies for need in policy.collects)
    collect = own_scorer or _Recorder(needs, max((scorer.window for scorer in scorers), default=0))
    own = dataclasses.replace(policies[0], scorer=collect, refiner=None) if policies else Policy(collect)
    cache = RetentionCache.for_model(model, own, ratio=0)
    prefill(model, ids, cache)
    if "replay" in needs:
        cache.compress(own, ratio=0)  # replays the context once, so that the copies need not; evicts nothing
    return cache


def compressed(
    recorded: RetentionCache, policy: Policy, ratio: float | None, budget: int | None = None
) -> RetentionCache:
    """A copy of ``recorded`` after ``policy`` removed ``ratio`` of it, or all but ``budget`` entries; from then on the
    copy keeps everything."""
    cache = copy.deepcopy(recorded)
    if policy.scorer is not None:
        cache.compress(policy, ratio=ratio, budget=budget)
    return cache


def forward(model: Any, ids: Sequence[int], cache: RetentionCache, *, logits: int = 0) -> Tensor:
    """Feeds ``ids``; returns float32 logits ``(n, V)`` of the last ``logits`` tokens, 0 for all of them."""
    return feed(model, torch.tensor([list(ids)]), cache, logits=logits)[0].float()


def feed(model: Any, tokens: Tensor, cache: RetentionCache, *, logits: int = 0) -> Tensor:
    """Feeds ``tokens (B, n)``; returns logits ``(B, m, V)`` in the model's type, of the last ``logits`` tokens or, for
    0, of all."""
    with torch.inference_mode():
        made = model(input_ids=tokens.to(model.device), logits_to_keep=logits, **keyword(model, cache))
    result: Tensor = made.logits
    return result


def prefill(model: Any, ids: Sequence[int] | Tensor, cache: RetentionCache) -> None:
    """Feeds ``ids``, one row of them or ``(B, n)``, without computing logits."""
    tokens = torch.atleast_2d(torch.as_tensor(ids)).to(model.device)
    decoder = model.get_decoder()
    with torch.inference_mode():
        decoder(input_ids=tokens, **keyword(decoder, cache))
