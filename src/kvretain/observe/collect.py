"""Scores of a real model on a real text, from one prefill. The only file here that touches a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..cache import CacheView, RetentionCache
from ..cache.support import keyword
from ..policy import Policy, presets
from ..scores import Scorer, scorers
from ..select.signatures import mean_values
from .measures import FEWEST, SIGNATURES


@dataclass(frozen=True)
class Observation:
    """What one prefill showed. ``L`` layers with full attention, ``H`` KV heads; tensors are on the CPU.

    Attributes:
        scores: by name of the scorer, ``(L, H, M)`` float32, >= 0 (as refiners see them), of the ``M`` entries that
            are neither sinks nor in the recent window; consecutive positions from ``sinks`` on.
        attention: ``(L, H, T, T)`` float32: the share of a query's attention that goes to a block of ``block`` keys,
            mean over the queries of a block and the query heads of the group. Rows sum to 1.
        values: ``(M, D)`` float32 mean value vectors of the same entries over layers and heads, as α's signatures
            are before they are normalised; by the names in :data:`~kvretain.observe.measures.SIGNATURES`.
        block: tokens per block of ``attention``.
        layers: the layers' indices in the model.
        tokens: tokens read.
        sinks, window: first and last tokens that are left out of ``scores``.
    """

    scores: Mapping[str, Tensor]
    attention: Tensor
    values: Mapping[str, Tensor]
    block: int
    layers: tuple[int, ...]
    tokens: int
    sinks: int
    window: int

    @property
    def candidates(self) -> int:
        """``M``, the entries that are neither sinks nor in the window."""
        return self.tokens - self.sinks - self.window

    @property
    def heads(self) -> int:
        """All heads of all layers, ``L x H``."""
        return self.attention.shape[0] * self.attention.shape[1]


def parse_scorer(text: str) -> Scorer:
    """The scorer that ``text`` names, e.g. ``snapkv(window=16)``.

    Raises:
        ValueError: it is no scorer, or has more to it (a refiner, selector or scope).
    """
    policy = Policy.parse(text)
    scorer = policy.scorer
    if scorer is None:
        raise ValueError("the policy 'full' has no scores to observe; name a scorer, e.g. snapkv")
    if text.strip() in presets:  # whose scope says nothing about scores
        policy = Policy(scorer, policy.refiner, policy.selector, policy.merger)
    if policy != Policy(scorer):
        raise ValueError(
            f"observe looks at plain scores, so {text!r} must be a scorer alone, e.g. {scorers.name_of(scorer)}"
        )
    return scorer


def protection(tokens: int, observed: Iterable[Scorer]) -> tuple[int, int]:
    """How many first and last of ``tokens`` the scores leave out: the most sinks and the widest window of any scorer.

    The window is at least SnapKV's 8, so that scorers without one compare with it.

    Raises:
        ValueError: the text is too short.
    """
    if tokens < FEWEST:
        raise ValueError(f"the text has {tokens} tokens; observe needs at least {FEWEST}")
    observed = list(observed)
    sinks, window = max(scorer.sinks for scorer in observed), max(8, *(scorer.window for scorer in observed))
    if 2 * (sinks + window) > tokens:
        raise ValueError(f"{tokens} tokens are too few beside {sinks} sinks and a window of {window}")
    return sinks, window


def collect(
    model: Any,
    ids: Tensor,
    names: Mapping[str, Scorer],
    *,
    blocks: int = 100,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Observation:
    """Runs ``model`` once over ``ids`` and records what each scorer says at the eviction that follows.

    All scorers see the same pass, the one in which nothing has been evicted yet. Queries come through the cache's own
    tap; the model is left as it was. Learned attention sinks (GPT-OSS) are not in the attention blocks.

    Args:
        model: a decoder-only transformers model that :class:`~kvretain.RetentionCache` serves.
        ids: ``(1, n)`` token ids, ``n`` at least :data:`~kvretain.observe.FEWEST`.
        names: the scorers, by the names that they get in :attr:`Observation.scores`.
        blocks: most rows and columns of the attention map.
        report: receives the layers done and the model's layers.

    Raises:
        ValueError: a text too short, scores that are not finite, or a model that cannot be served.
    """
    tokens = ids.shape[1]
    sinks, window = protection(tokens, names.values())
    recorder = _Recorder(names, tokens, -(-tokens // blocks), report)
    cache = RetentionCache.for_model(model, Policy(recorder), ratio=0.5, sinks=sinks, recent=window)
    with torch.inference_mode():
        decoder = model.get_decoder()
        decoder(input_ids=ids.to(model.device), **keyword(decoder, cache))
    layers = tuple(sorted(recorder.attention))
    values = {
        name: mean_values([recorder.values[name, layer][None, None] for layer in layers])[0, sinks : tokens - window]
        for name in SIGNATURES
    }
    return Observation(
        scores={name: torch.stack([recorder.scores[name, layer] for layer in layers]).clone() for name in names},
        attention=torch.stack([recorder.attention[layer] for layer in layers]).clone(),
        values=values,
        block=recorder.block,
        layers=layers,
        tokens=tokens,
        sinks=sinks,
        window=window,
    )


@dataclass(frozen=True)
class _Recorder(Scorer):
    """Asks several scorers, keeps what they say, and answers with the first one's scores."""

    inner: Mapping[str, Scorer]
    tokens: int
    block: int
    report: Callable[[int, int], None]
    scores: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    attention: dict[int, Tensor] = field(default_factory=dict)
    values: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"queries"}).union(*(scorer.needs for scorer in self.inner.values()))

    @property
    def window(self) -> int:
        """Every query, for the attention map; a scorer reads the last ones that it wants."""
        return self.tokens

    def __getattr__(self, name: str) -> Any:
        """What the cache asks of a scorer that says what is collected (``first``, ``gate``, ...); they must agree."""
        inner = self.__dict__.get("inner", {})
        found = {vars(scorer)[name] for scorer in inner.values() if name in vars(scorer)}
        if not found:
            raise AttributeError(name)
        if len(found) > 1:
            values = ", ".join(sorted(map(repr, found)))
            raise ValueError(f"scorers observed together must agree on {name!r}, not {values}")
        return found.pop()

    def score(self, view: CacheView) -> Tensor:
        answers = []
        for name, scorer in self.inner.items():
            scores = scorer.score(view)
            if not scores.isfinite().all():
                raise ValueError(f"scorer {name!r} gave NaN or infinite scores at layer {view.layer}")
            answers.append(scores)
            shifted = scorer.nonnegative(scores, view.candidates)[0]
            self.scores[name, view.layer] = shifted[view.candidates[0]].reshape(shifted.shape[0], -1).cpu()
        for name, normalised in SIGNATURES.items():
            self.values[name, view.layer] = mean_values([view.values], normalise_heads=normalised)[0].cpu()
        self.attention[view.layer] = block_attention(view, self.block).cpu()
        self.report(view.layer + 1, view.num_layers)
        return answers[0]


def block_attention(view: CacheView, block: int, *, rows: int = 256) -> Tensor:
    """:attr:`Observation.attention` of one layer, ``(H, T, T)``, from a view of one row with the queries of all keys.

    Weights are made for about ``rows`` queries at a time.
    """
    assert view.queries is not None
    tokens, device = view.queries.shape[2], view.queries.device
    slots = torch.arange(tokens, device=device)
    of_block = slots // block
    count = of_block.bincount()
    pooled = torch.zeros(view.keys.shape[1], len(count), len(count), device=device)
    for queries in slots.split(rows):
        logits = view.logits(view.queries[:, :, queries])[0]  # (H, G, rows, N)
        weights = logits.masked_fill(slots > queries[:, None], -torch.inf).softmax(-1).mean(1)
        shares = weights.new_zeros(*weights.shape[:2], len(count)).index_add_(2, of_block, weights)
        pooled.index_add_(1, of_block[queries], shares)
    return pooled / count[:, None]
