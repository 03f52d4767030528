"""One generated run under a policy, with every eviction recorded. The only file here that touches a model."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..answer import Sampling, watch
from ..cache import CacheView, RetentionCache
from ..cache.support import keyword
from ..policy import Policy
from ..refine import HardNMS, Hub, Refiner, hub_refine
from ..scores import Scorer
from ..select.signatures import unit_signatures

P = TypeVar("P", Scorer, Refiner)

PROTECTED, HUB, DISCOUNTED = 1, 2, 4
"""Bits of :attr:`Eviction.flags`."""


@dataclass(frozen=True)
class Eviction:
    """One eviction: what stood in the cache before it, and how it was valued.

    The ``M`` entries of all heads stand one after the other, in the order layer, head, position;
    :meth:`Run.present` says which they are.

    Attributes:
        step: the pass that it ended: 0 is the prompt's, ``i`` that of the ``i``-th token written.
        scores: ``(M,)`` float32, as the scorer gave them to each head.
        refined: ``(M,)`` float32, as the refiner corrected them; None for a policy without one.
        cosines: ``(M,)`` float32, the largest cosine of an entry's value signature to that of any *other* entry that
            this eviction kept; 0 if there is none. Signatures are made as the policy's selector makes them, over the
            heads and layers that share a set under its scope: a head's own values for ``head``, the mean over all
            layers and heads, as in α, for ``model``.
        flags: ``(M,)`` uint8: :data:`PROTECTED`; :data:`HUB`, a local peak of its head's scores
            (:func:`kvretain.hub_refine`, with its window, or 5); :data:`DISCOUNTED`, what the refiner discounts as a
            neighbour (the refiners ``hub`` and ``nms``).
    """

    step: int
    scores: Tensor
    refined: Tensor | None
    cosines: Tensor
    flags: Tensor


@dataclass(frozen=True)
class Run:
    """A text and its continuation under one policy. ``L`` layers with full attention, ``H`` KV heads, ``N`` tokens.

    Attributes:
        policy: its text.
        ids: ``N`` token ids, the prompt's and the written ones; the last one written was never fed to the model.
        pieces: what each token adds to the text; ``""`` for one that ends inside a character, which the next completes.
        prompt: how many of them are the prompt's.
        layers: the ``L`` layers' indices in the model.
        left: ``(L, H, N)`` int64, the index in ``evictions`` of the one that took the entry, or their number if none
            did. Entries never come back, so this is the whole history.
        evictions: in order.
        nbytes: bytes of key and value storage after each pass, all layers together.
    """

    policy: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    prompt: int
    layers: tuple[int, ...]
    left: Tensor
    evictions: tuple[Eviction, ...]
    nbytes: tuple[int, ...]

    @property
    def passes(self) -> int:
        """Passes through the model: one for the prompt, and one for each token written but the last."""
        return len(self.nbytes)

    @property
    def entered(self) -> Tensor:
        """``(N,)`` int64, the pass in which each token entered the cache (``passes`` for the last one, which never
        did)."""
        return (torch.arange(len(self.ids)) - self.prompt + 1).clamp_min(0)

    def kept(self, step: int) -> Tensor:
        """``(L, H, N)`` bool: what the cache holds after pass ``step`` and its evictions."""
        done = sum(eviction.step <= step for eviction in self.evictions)
        return (self.left >= done) & (self.entered <= step)

    def present(self, index: int) -> Tensor:
        """``(L, H, N)`` bool: the entries before eviction ``index``; its tensors list them in this order."""
        return (self.left >= index) & (self.entered <= self.evictions[index].step)


def record(
    model: Any,
    tokenizer: Any,
    ids: Tensor,
    policy: str,
    *,
    new_tokens: int = 128,
    report: Callable[[float], None] = lambda done: None,
    **limits: Any,
) -> Run:
    """Reads ``ids``, continues them greedily under ``policy``, and records what each eviction saw and took.

    The cache is that of :class:`~kvretain.RetentionCache`, so the text is what the policy really leads to; the record
    costs memory for the values of all entries at an eviction, and no arithmetic of the model changes.

    Args:
        model, tokenizer: from :func:`kvretain.load_model`, or your own.
        ids: ``(1, n)`` token ids.
        policy: a policy text; ``full`` evicts nothing.
        new_tokens: most tokens to write.
        report: receives the tokens done, read and written, several times a pass.
        limits: ``budget`` or ``ratio``, and whatever else :meth:`RetentionCache.for_model` takes.

    Raises:
        ValueError: what :meth:`RetentionCache.for_model` refuses, or a model whose layers differ in KV heads.
    """
    parsed = Policy.parse(policy)
    recorder = None if parsed.scorer is None else _Recorder(parsed)
    cache = RetentionCache.for_model(model, parsed if recorder is None else recorder.policy, **limits)
    if recorder is not None:
        recorder.forget()  # a model that is new to kvretain has been put through a self-test
    follower = _Follower(cache, recorder, ids.shape[1], report)
    ids = ids.to(model.device)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    with torch.inference_mode(), watch(model, follower.on_layer):
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            pad_token_id=padding,
            streamer=follower,
            **keyword(model, cache),
            **Sampling().options(),
        )
    everything = written[0].tolist()
    left = follower.history(len(everything))
    return Run(
        policy=policy,
        ids=tuple(everything),
        pieces=tuple(pieces(tokenizer, everything)),
        prompt=ids.shape[1],
        layers=cache.trace.layers,
        left=left.masked_fill(left < 0, len(follower.evictions)),
        evictions=tuple(follower.evictions),
        nbytes=tuple(sum(step.nbytes) for step in cache.trace),
    )


def pieces(tokenizer: Any, ids: Sequence[int], *, context: int = 8) -> list[str]:
    """What each token adds to the decoded text; a token that ends inside a character adds ``""`` and the next one that
    completes it adds it whole. Each is decoded after the ``context`` tokens before it."""
    found, done = [], 0
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    for end in range(1, len(ids) + 1):
        start = max(0, done - context)
        before, after = (tokenizer.decode(ids[start:stop], **options) for stop in (done, end))
        if after.endswith("\N{REPLACEMENT CHARACTER}") and end - done < 4 and end < len(ids):
            found.append("")
            continue
        # A context that begins inside a character may decode to other text before it than with it.
        found.append(after[len(before) :] if after.startswith(before) else tokenizer.decode(ids[done:end], **options))
        done = end
    return found


class _Follower:
    """What ``generate`` calls after each pass: it looks at what the pass has evicted."""

    def __init__(
        self, cache: RetentionCache, recorder: _Recorder | None, prompt: int, report: Callable[[float], None]
    ) -> None:
        self.cache, self.recorder, self.prompt, self.report = cache, recorder, prompt, report
        self.left = torch.empty(0)  # what `history` said at the last eviction
        self.evictions: list[Eviction] = []
        self.passes = 0
        self.asked = False

    def on_layer(self, done: float) -> None:
        """Called after each layer, with the tokens that have gone through all of them; replayed ones count, too."""
        if not self.passes:
            self.report(min(done, self.prompt))

    def put(self, value: Tensor) -> None:
        """Called with the prompt, and then after each pass with the new token."""
        if not self.asked:
            self.asked = True
            return
        self._look()
        self.passes += 1
        self.report(self.prompt + self.passes)

    def end(self) -> None:
        """Called when all is written."""

    def _look(self) -> None:
        """Takes note of what the pass has evicted, if it has."""
        if self.recorder is None or not self.recorder.seen:
            return
        held = [self.cache.layers[index].positions[0].cpu() for index in self.cache.trace.layers]
        self.left = self.history(self.cache.get_seq_length())
        kept = torch.zeros_like(self.left, dtype=torch.bool)
        for rows, positions in zip(kept, held, strict=True):
            for row, own in zip(rows, positions, strict=True):
                row[own[own >= 0]] = True
        self.left[(self.left < 0) & ~kept] = len(self.evictions)
        self.evictions.append(self.recorder.eviction(self.passes, kept))

    def history(self, tokens: int) -> Tensor:
        """Which eviction has taken each of ``tokens`` entries so far, ``(L, H, tokens)`` int64; -1 where none has."""
        heads = sorted({self.cache.layers[index].positions.shape[1] for index in self.cache.trace.layers})
        if len(heads) > 1:
            raise ValueError(f"the view needs as many KV heads in every layer, but this model has {heads}")
        left = torch.full((len(self.cache.trace.layers), heads[0], tokens), -1)
        if self.evictions:
            left[..., : self.left.shape[2]] = self.left
        return left


class _Recorder:
    """Listens to a policy's scorer and refiner while the cache uses them.

    Attributes:
        policy: what to give to the cache: the same, with a scorer and a refiner that are overheard.
        seen: by layer, what its last eviction saw.
    """

    def __init__(self, policy: Policy) -> None:
        assert policy.scorer is not None
        self.plain = policy
        self.seen: dict[int, _Seen] = {}
        self.latest = -1
        scorer = _overheard(policy.scorer, "score", self._on_scores)
        refiner = policy.refiner and _overheard(policy.refiner, "refine", self._on_refined)
        self.policy = dataclasses.replace(policy, scorer=scorer, refiner=refiner)

    def forget(self) -> None:
        """Forgets what was seen."""
        self.seen.clear()

    def _on_scores(self, scores: Tensor, view: CacheView) -> None:
        # What stands in the cache is overwritten by the eviction: hence copies.
        self.seen[view.layer] = _Seen(
            positions=view.positions[0].cpu().clone(),
            values=view.values[0].cpu().clone(),
            protected=view.protected[0].cpu().clone(),
            scores=scores[0].cpu().clone(),
        )
        self.latest = view.layer

    def _on_refined(self, refined: Tensor, *given: Any, **named: Any) -> None:
        self.seen[self.latest].refined = refined[0].cpu().clone()

    def eviction(self, step: int, kept: Tensor) -> Eviction:
        """What was seen, once it is known what the eviction at pass ``step`` kept, ``(L, H, n)`` bool."""
        assert self.plain.scorer is not None
        layers = [self.seen[index] for index in sorted(self.seen)]
        self.forget()
        heads = len(layers[0].positions)
        cosines: dict[tuple[int, int], Tensor] = {}
        for group in _sharing(self.plain.scope, len(layers), heads):
            layer, head = group[0]
            held = layers[layer].positions[head]
            real = held >= 0
            signatures = self._signatures([layers[at].values[own, real] for at, own in group])
            cosines |= dict.fromkeys(group, nearest(signatures, kept[layer, head, held[real]]))
        valid = [layer.positions >= 0 for layer in layers]
        refined = [layer.refined for layer in layers if layer.refined is not None]

        def packed(rows: Iterable[Tensor]) -> Tensor:
            return torch.cat([own[real] for own, real in zip(rows, valid, strict=True)])

        return Eviction(
            step=step,
            scores=packed(layer.scores for layer in layers),
            refined=packed(refined) if refined else None,
            cosines=torch.cat([cosines[at] for at in itertools.product(range(len(layers)), range(heads))]),
            flags=packed(self._flags(layer) for layer in layers),
        )

    def _flags(self, layer: _Seen) -> Tensor:
        assert self.plain.scorer is not None
        positions, protected = layer.positions[None], layer.protected[None]
        closed = protected | (positions < 0)
        scores = self.plain.scorer.nonnegative(layer.scores[None], ~closed)
        hubs, discounted = marks(self.plain.refiner, scores, positions, closed)
        return (PROTECTED * protected + HUB * hubs + DISCOUNTED * discounted)[0].to(torch.uint8)

    def _signatures(self, values: Sequence[Tensor]) -> Tensor:
        """``(n, D)`` of unit length, from the values ``(n, D)`` of each of the heads that share a set."""
        selector = self.plain.selector
        means = selector.mean_values([value[None, None] for value in values])
        return unit_signatures(means, centre=getattr(selector, "centre", False))[0]


@dataclass
class _Seen:
    """A layer at an eviction: ``positions``, ``protected``, ``scores`` ``(H, n)`` and ``values (H, n, D)``, and what
    the refiner made of the scores."""

    positions: Tensor
    values: Tensor
    protected: Tensor
    scores: Tensor
    refined: Tensor | None = None


def _overheard(part: P, method: str, listener: Callable[..., None]) -> P:
    """An equal scorer or refiner whose ``method`` also tells ``listener`` its result and arguments."""
    twin, plain = copy.copy(part), getattr(part, method)

    def told(*given: Any, **named: Any) -> Tensor:
        result: Tensor = plain(*given, **named)
        listener(result, *given, **named)
        return result

    object.__setattr__(twin, method, told)  # the dataclass is frozen
    return twin


def _sharing(scope: str, layers: int, heads: int) -> Iterable[list[tuple[int, int]]]:
    """The heads ``(layer, head)`` that share one set under ``scope``."""
    groups: dict[Any, list[tuple[int, int]]] = {}
    for layer, head in itertools.product(range(layers), range(heads)):
        key = {"model": 0, "aligned": head, "layer": layer}.get(scope, (layer, head))
        groups.setdefault(key, []).append((layer, head))
    return groups.values()


def marks(refiner: Refiner | None, scores: Tensor, positions: Tensor, closed: Tensor) -> tuple[Tensor, Tensor]:
    """Which entries are hubs, and which the refiner discounts as their neighbours, ``(B, H, N)`` bool each.

    Args:
        refiner: the policy's; its window counts, or 5 if it has none.
        scores: ``(B, H, N)`` float32, >= 0 but where ``closed``.
        positions, closed: as :meth:`kvretain.refine.Refiner.refine` takes them.
    """
    local = isinstance(refiner, Hub | HardNMS)
    kernel = refiner.kernel if isinstance(refiner, Hub | HardNMS) else Hub.kernel

    def survives(neighbours: str) -> Tensor:
        return hub_refine(
            scores, 0.5, kernel=kernel, discount=0.0, gate_exponent=0.0, calibrate=False,
            positions=positions, protected=closed, neighbours=neighbours,
        ) > 0  # fmt: skip

    hubs = survives("position") & ~closed
    if not local:
        return hubs, torch.zeros_like(hubs)
    spared = survives("hub") if isinstance(refiner, Hub) and refiner.neighbours == "hub" else hubs
    return hubs, ~spared & ~closed & (scores > 0)


def nearest(signatures: Tensor, chosen: Tensor, *, rows: int = 1024) -> Tensor:
    """For each entry the largest cosine to another one that is chosen, ``(n,)`` float32; 0 if there is no other.

    Args:
        signatures: ``(n, D)``, of unit length or 0.
        chosen: ``(n,)`` bool.
        rows: entries compared at a time.
    """
    picked = chosen.nonzero()[:, 0]
    if not len(picked):
        return signatures.new_zeros(len(signatures))
    parts = []
    for start in range(0, len(signatures), rows):
        own = torch.arange(start, min(start + rows, len(signatures)))
        cosines = signatures[own] @ signatures[picked].T
        parts.append(cosines.masked_fill(own[:, None] == picked, -torch.inf).amax(-1))
    found = torch.cat(parts)
    return torch.where(found.isfinite(), found, 0.0)
