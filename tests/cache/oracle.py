"""The reference that every policy must agree with: full attention in which exactly the evicted entries are hidden.

A *recording* says what a run under test did: for each forward its tokens, its mask, its logits, and the positions that
each layer held just before and just after it. :class:`Oracle` replays the tokens on its own copy of the model with a
plain ``DynamicCache``, from which nothing is ever evicted, and with an attention function of its own. In layer l,
key/value head h and row b it hides a past column unless the position of that column is among those that the run held
for (b, l, h) just before the step. The step's own tokens are visible causally; padding is hidden by the 2-D mask;
sliding layers see the model's own mask.

Nothing of kvretain is imported here: the oracle knows only ``cache.layers[i].positions``.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from .models import build, forward, positions_of

Held = dict[int, Tensor]
"""Layer index -> positions (B, H, kept); sliding layers are absent."""


@dataclass
class Step:
    """One forward of the run under test.

    ``ids`` (B, q); ``mask`` (B, seen + q), the padding mask over all columns so far; ``logits`` (B, q, V), or (B, 1, V)
    for the last column only; ``parents`` (B,), the row that each row continues, if rows were reordered before the step.
    """

    ids: Tensor
    mask: Tensor
    logits: Tensor
    before: Held
    after: Held
    parents: Tensor | None = None

    @property
    def evicts(self) -> bool:
        """Whether a real entry, old or of this step, is missing afterwards."""
        return any(bool((self.real_before(layer) > (self.after[layer] >= 0).sum(-1)).any()) for layer in self.after)

    def real_before(self, layer: int) -> Tensor:
        """Real entries (B, H) that attention saw in ``layer`` at this step."""
        new = self.mask[:, -self.ids.shape[1] :].sum(-1, keepdim=True)
        old = (self.before[layer] >= 0).sum(-1) if layer in self.before else 0
        return old + new.expand(-1, self.after[layer].shape[1])


def held(cache) -> Held:
    """A copy of what each retention layer of ``cache`` says that it holds."""
    return {i: layer.positions.clone() for i, layer in enumerate(cache.layers) if _positions(layer) is not None}


def _positions(layer) -> Tensor | None:
    return layer.positions if hasattr(layer, "positions") and layer.is_initialized else None


# --- running --------------------------------------------------------------------------------------


@dataclass
class Turn:
    """Tokens (B, q) fed in one forward, then ``decode`` greedy tokens. ``mask`` (B, q) marks the real ones."""

    ids: Tensor
    mask: Tensor | None = None
    decode: int = 0


def play(model, cache, turns: Sequence[Turn], *, pass_mask: bool = True) -> list[Step]:
    """Runs ``turns`` in a hand-written loop and records them. ``pass_mask=False`` gives the model no mask at all."""
    steps: list[Step] = []
    seen = torch.zeros(len(turns[0].ids), 0, dtype=torch.long)

    def step(ids: Tensor, mask: Tensor) -> Tensor:
        nonlocal seen
        seen = torch.cat([seen, mask.long()], -1)
        before = held(cache)
        logits = forward(model, ids, cache, mask=seen if pass_mask else None)
        steps.append(Step(ids, seen, logits, before, held(cache)))
        return logits[:, -1:].argmax(-1)

    for turn in turns:
        chosen = step(turn.ids, torch.ones_like(turn.ids) if turn.mask is None else turn.mask)
        for _ in range(turn.decode):
            chosen = step(chosen, torch.ones_like(chosen))
    return steps


@dataclass
class Recorder:
    """A logits processor that records what ``generate`` does with ``cache``; it is called once after every forward."""

    cache: object
    mask: Tensor
    histories: list[Tensor] = field(default_factory=list)
    holds: list[Held] = field(default_factory=list)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.histories.append(input_ids.clone())
        self.holds.append(held(self.cache))
        return scores

    def steps(self, logits: Sequence[Tensor]) -> list[Step]:
        """The recording; ``logits`` are those that ``generate(output_logits=True)`` returned, (B, V) a step.

        Which row continues which is read from the token histories alone, so a cache that reorders wrongly is found out.
        """
        steps = []
        mask = self.mask.repeat_interleave(len(self.histories[0]) // len(self.mask), 0)
        for index, (history, after) in enumerate(zip(self.histories, self.holds, strict=True)):
            ids, before, parents = history, {}, None
            if index:
                ids = history[:, -1:]
                parents = _parents(self.histories[index - 1], history[:, :-1], len(self.mask))
                before = {layer: positions[parents] for layer, positions in self.holds[index - 1].items()}
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
            steps.append(Step(ids, mask, logits[index][:, None], before, after, parents))
        return steps


def _parents(earlier: Tensor, prefixes: Tensor, groups: int) -> Tensor:
    """For each row of ``prefixes``, the first row of ``earlier`` with the same tokens in the same batch item."""
    same = (prefixes[:, None] == earlier[None]).all(-1)
    group = torch.arange(len(earlier)) // (len(earlier) // groups)
    same &= group[:, None] == group[None]
    assert bool(same.any(-1).all()), "a row continues no earlier row"
    return same.long().argmax(-1)


# --- reference ------------------------------------------------------------------------------------

_visible: contextvars.ContextVar[dict[int, Tensor]] = contextvars.ContextVar("visible")
NAME = "oracle_attention"


def _attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_,
) -> tuple[Tensor, None]:
    """Plain attention with grouped heads, soft cap and attention sinks; hides per row, layer and key/value head."""
    heads = key.shape[1]
    grouped = query.unflatten(1, (heads, -1))  # (B, H, G, q, D)
    logits = scaling * grouped @ key[:, :, None].transpose(-1, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + attention_mask[:, :, None]
    if (visible := _visible.get().get(module.layer_idx)) is not None:
        logits = logits.masked_fill(~visible[:, :, None, None], torch.finfo(logits.dtype).min)
    logits = logits.float()
    if s_aux is not None:
        sinks = s_aux.float().reshape(1, heads, -1, 1, 1).expand(*logits.shape[:-1], 1).to(logits)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


class Oracle:
    """The reference for one tiny model of :mod:`cache.models`."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = build(name, dtype=dtype, attention=NAME)

    def logits(self, steps: Sequence[Step], *, hide: bool = True) -> Iterator[Tensor]:
        """Reference logits (B, q, V) of each step, fed with the run's own tokens. ``hide=False``: nothing is hidden."""
        cache = DynamicCache(config=self.model.config)
        for step in steps:
            if step.parents is not None:
                cache.reorder_cache(step.parents)
            size = step.ids.shape[1]
            assert cache.get_seq_length() + size == step.mask.shape[1]
            visible = {layer: visible_columns(kept, step.mask, size) for layer, kept in step.before.items() if hide}
            token = _visible.set(visible)
            try:
                positions = positions_of(step.mask)[:, -size:]
                yield forward(self.model, step.ids, cache, mask=step.mask, positions=positions)
            finally:
                _visible.reset(token)


def visible_columns(kept: Tensor, mask: Tensor, size: int) -> Tensor:
    """Columns (B, H, T) that a head may see: those of its ``kept`` positions (B, H, K) and the step's own ``size``."""
    visible = torch.zeros(*kept.shape[:2], mask.shape[1], dtype=torch.bool)
    visible[:, :, mask.shape[1] - size :] = True
    for row, row_mask in enumerate(mask[:, : mask.shape[1] - size]):
        columns = row_mask.nonzero()[:, 0]  # column of the row's p-th real token
        for head, positions in enumerate(kept[row]):
            visible[row, head, columns[positions[positions >= 0]]] = True
    return visible


# --- comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """``worst``: largest logit difference; ``evictions``: steps that evicted; ``ties``: greedy tokens excused."""

    worst: float
    evictions: int
    ties: int


def compare(oracle: Oracle, steps: Sequence[Step], *, atol: float) -> Verdict:
    """Asserts that every step's logits and greedy token agree with the oracle's.

    A differing greedy token is excused only where the oracle's two best logits lie within ``2 * atol`` of each other.
    """
    worst, ties = 0.0, 0
    for index, (step, expected) in enumerate(zip(steps, oracle.logits(steps), strict=True)):
        got, size = step.logits.float(), step.logits.shape[1]
        expected = expected[:, -size:].float()
        real = step.mask[:, -size:].bool()
        assert bool(got[real].isfinite().all()), f"step {index}: logits are not finite"
        difference = (got - expected).abs().amax(-1)[real].max().item()
        worst = max(worst, difference)
        assert difference <= atol, (
            f"step {index} of {len(steps)}: logits differ by {difference:.2e}, allowed {atol:.0e}"
        )
        first, second = expected[:, -1].topk(2).values.unbind(-1)
        moved = got[:, -1].argmax(-1) != expected[:, -1].argmax(-1)
        assert bool((first - second)[moved].le(2 * atol).all()), f"step {index}: another greedy token"
        ties += int(moved.sum())
    return Verdict(worst, sum(step.evicts for step in steps), ties)


def check_positions(step: Step) -> None:
    """Asserts the contract of ``positions``: dtype, order, padding first, nothing returns, nothing is invented."""
    seen = step.mask.sum(-1)
    new = step.mask[:, -step.ids.shape[1] :].sum(-1)
    for layer, positions in step.after.items():
        assert positions.dtype == torch.int64 and positions.ndim == 3 and len(positions) == len(step.ids)
        for row in range(len(positions)):
            for head in range(positions.shape[1]):
                where = f"layer {layer}, row {row}, head {head}: {positions[row, head].tolist()}"
                kept = [p for p in positions[row, head].tolist() if p >= 0]
                assert kept == sorted(set(kept)), f"not ascending, {where}"
                allowed = set(range(int(seen[row] - new[row]), int(seen[row])))
                if layer in step.before:
                    allowed |= {p for p in step.before[layer][row, head].tolist() if p >= 0}
                assert set(kept) <= allowed, f"holds what it should not know, {where}"
