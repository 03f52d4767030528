"""Reading the tokens a second time before an eviction, for scorers that need it (KVzip), and taking that back.

The replay runs through the model's own decoder with this cache, as one more pass per chunk whose columns are removed
again; nothing of it is left but one number per entry.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from . import support, tap
from .layer import RetentionLayer
from .session import Plan

if TYPE_CHECKING:
    from .cache import RetentionCache


class Repeats(Protocol):
    """What a scorer with the need ``"replay"`` says of it, see :class:`kvretain.scores.KVzip`."""

    chunk: int
    lead: int
    first: int
    prompt: tuple[int, ...]
    normalise: bool


@dataclass
class Unscored:
    """Token ids of the columns that no replay has scored yet: those since the last eviction."""

    ids: list[Tensor] = field(default_factory=list)

    @staticmethod
    def check(inputs: Tensor) -> None:
        """Raises ValueError for embeddings, which cannot be repeated."""
        if inputs.ndim != 2:
            raise ValueError("a scorer that replays the context needs input_ids, not inputs_embeds")

    def add(self, inputs: Tensor) -> None:
        """Takes note of a pass's ``input_ids (B, n)``."""
        self.ids.append(inputs.detach())

    def crop(self, columns: int) -> None:
        """Takes the last ``columns`` columns back."""
        ids = torch.cat(self.ids, 1) if self.ids else None
        self.ids = [] if ids is None else [ids[:, : ids.shape[1] - columns]]

    def select(self, rows: Tensor) -> None:
        """Replaces the batch by the rows at the indices ``rows``."""
        self.ids = [part[rows.to(part.device)] for part in self.ids]


def replay(cache: RetentionCache, scorer: Repeats) -> None:
    """Feeds the unscored tokens again and leaves in each layer what every entry received at most."""
    session, layers, decoder = cache._session, cache._retained, cache._attachment.decoder
    ids = torch.cat(cache._unscored.ids, 1)
    batch, columns = ids.shape
    seen, plan = session.columns.seen, session.plan
    valid = None if session.mask is None else session.mask[:, seen - columns :]
    prompt = torch.tensor(scorer.prompt, dtype=ids.dtype, device=ids.device).expand(batch, -1)
    projections = support.output_projections(decoder) if scorer.normalise else None
    # Sliding windows and recurrent states are transformers' own: they are copied and put back.
    others = [(layer, copy.deepcopy(layer.__dict__)) for layer in cache.layers if not isinstance(layer, RetentionLayer)]
    for layer in layers:
        layer.start_replay()
    for start in range(0, columns, scorer.chunk):
        stop, lead = min(start + scorer.chunk, columns), max(start - scorer.lead, 0)
        fed = torch.cat([prompt, ids[:, lead:stop]], 1)
        asking = fed.new_ones(fed.shape, dtype=torch.bool)
        real = asking.clone()
        if valid is not None:
            real[:, prompt.shape[1] :] = valid[:, lead:stop]
        asking[:, : fed.shape[1] - (stop - start)] = False
        session.plan = Plan(fed.shape[1], True, False, 0, 0)
        cache._replaying = Replaying(columns - start, columns - stop, asking & real, real, scorer.first, projections)
        arguments: dict[str, Any] = {
            "position_ids": session.columns.counts(batch, ids.device)[:, None] + real.cumsum(1) - 1
        }
        if session.mask is not None:
            arguments["attention_mask"] = torch.cat([session.mask, real], 1).long()
        try:
            decoder(input_ids=fed, use_cache=True, **arguments, **{cache._argument: cache})
        finally:
            cache._replaying, session.plan = None, plan
            tap.observe_by(None)
            for layer in layers:
                layer.rewind(seen)
            for other, state in others:
                other.__dict__.update(copy.deepcopy(state))
    cache._unscored.ids = []


@dataclass(frozen=True)
class Replaying:
    """One chunk's repetition.

    Attributes:
        begin, end: the chunk's columns, counted back from the last column seen (``begin > end >= 0``).
        asking: ``(B, n)`` bool, the repeated queries that count.
        real: ``(B, n)`` bool, repeated tokens that are not padding.
        first: first tokens that every softmax includes.
        projections: each layer's output projection ``(E, Hq * Dv)``, to normalise weights by; None leaves them.
        norms: lengths ``(B, n)`` of the hidden states that have entered the attention of a layer, until it is scored.
    """

    begin: int
    end: int
    asking: Tensor
    real: Tensor
    first: int
    projections: dict[int, Tensor] | None = None
    norms: dict[int, Tensor] = field(default_factory=dict)

    def enter(self, index: int, hidden: Tensor) -> None:
        """Called before the attention of layer ``index`` with its input ``(B, n, E)``."""
        if self.projections is not None:
            self.norms[index] = torch.linalg.vector_norm(hidden, dim=-1, dtype=torch.float32)

    def score(self, layer: RetentionLayer, query: Tensor, block: int = 256) -> None:
        """Raises ``layer``'s numbers to the weights that the repeated ``query (B, Hq, n, D)`` gives the chunk."""
        keys, values = layer._all()
        new, total = query.shape[2], keys.shape[2]
        past = total - new
        positions = layer.positions[:, :, :past]
        slots = torch.arange(past, device=keys.device)
        chunk = (slots >= past - self.begin) & (slots < past - self.end) & (positions >= 0)
        allowed = chunk | ((positions >= 0) & (positions < self.first))
        view = layer.view()
        groups = query.shape[1] // keys.shape[1]
        # The largest weight by query head: what normalises it does not depend on the query, but for its own length.
        best = torch.zeros(*keys.shape[:2], groups, past, device=keys.device)
        lengths = None if self.projections is None else self.norms.pop(layer.index).clamp_min(1e-12)
        own = torch.arange(new, device=keys.device)
        for start in range(0, new, block):
            stop = min(start + block, new)
            logits = view.logits(query[:, :, start:stop])  # (B, H, G, n, N + new)
            causal = (own <= own[start:stop, None]) & self.real[:, None, None, None, :].to(keys.device)
            mask = torch.cat(
                [
                    allowed[:, :, None, None].expand(-1, -1, 1, stop - start, -1),
                    causal.expand(-1, keys.shape[1], 1, -1, -1),
                ],
                -1,
            )
            weights = logits.masked_fill_(~mask, -torch.inf).softmax(-1)[..., :past]
            counted = self.asking[:, None, None, start:stop, None].to(keys.device)
            if not counted.all():  # only what does not count can have a row of NaN
                weights = weights.masked_fill(~counted, 0.0)
            if lengths is not None:
                weights = weights / lengths[:, None, None, start:stop, None]
            best = torch.maximum(best, weights.amax(3))
        if self.projections is not None:
            own_chunk = slice(past - self.begin, past - self.end)
            best[..., own_chunk] *= projected_norms(values[:, :, own_chunk], self.projections[layer.index])
        layer.raise_numbers(best.amax(2).masked_fill(~chunk, 0.0))


def projected_norms(values: Tensor, projection: Tensor) -> Tensor:
    """Lengths ``(B, H, G, N)`` float32 of what each query head's slice of ``projection (E, Hq * Dv)`` makes of
    ``values (B, H, N, Dv)``."""
    batch, heads, size, width = values.shape
    if projection.shape[1] % (heads * width):
        raise ValueError(
            f"an output projection of {projection.shape[1]} inputs does not take values of {heads} heads x {width}"
        )
    slices = projection.unflatten(1, (heads, -1, width)).to(values.device)  # (E, H, G, Dv)
    lengths = torch.empty(batch, heads, slices.shape[2], size, device=values.device)
    for head in range(heads):  # one query head at a time: (B, N, E) is as large as a hidden state
        for group in range(slices.shape[2]):
            projected = values[:, head].to(torch.float32) @ slices[:, head, group].to(torch.float32).T
            lengths[:, head, group] = torch.linalg.vector_norm(projected, dim=-1)
    return lengths
