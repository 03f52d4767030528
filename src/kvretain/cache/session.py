"""What one cache's layers share: the budget, the columns seen, and the plan of the current forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..choose import choose, choose_unequal, row_budgets, shared_values
from ..policy import Policy
from ..select import Selector
from .budget import Budget
from .columns import Columns
from .view import CacheView

if TYPE_CHECKING:
    from .layer import RetentionLayer


@dataclass(frozen=True)
class Plan:
    """One forward pass: what comes in and, known from its start, what will have to go.

    Attributes:
        columns: new columns, padding included; 0 outside a forward pass (:meth:`Session.compress`).
        prefill: more than one column, or the first of all: a prompt, a chunk of it, or a new turn.
        evict: whether entries are evicted after the attention of this pass.
        target: entries per head that fit (largest over rows); storage is reserved for ``target + every`` of them.
        counts: real entries kept after the eviction, one number or one per row.
        sinks, recent: protected tokens at the start and at the end, one number each for all rows or one per row.
        prompt: whether the prompt is protected.
    """

    columns: int
    prefill: bool
    evict: bool
    target: int
    counts: int | tuple[int, ...]
    sinks: tuple[int, ...] = (0,)
    recent: tuple[int, ...] = (0,)
    prompt: bool = False


@dataclass
class Session:
    """Shared by a :class:`~kvretain.cache.RetentionCache` and its layers; it refers to neither, so nothing is kept
    alive.

    Attributes:
        policy, budget: what to keep and how much; ``budget`` is None for the policy ``full``.
        num_layers, retained: layers of the model, and how many of them are retention layers.
        batch: rows, once known.
        plan: the forward pass under way, None between passes.
        kept: entries per head that every retention layer holds between passes.
        stored: real entries of each row among them; None while nothing was padded.
        mask: ``(B, seen)`` bool, the real columns so far; None while nothing was padded.
        front: padding slots that lead each row right after the last eviction (rows that keep less than the largest).
        evicted_at: columns seen at the last eviction, ``evicted_to`` the entries that it left.
        values: for a selector that compares values over the whole model, that selector and, for the entries that
            survived the last eviction, their mean values ``(B, evicted_to, D)`` float32: computed once per token.
    """

    policy: Policy
    budget: Budget | None
    num_layers: int
    retained: int
    columns: Columns = field(default_factory=Columns)
    batch: int | None = None
    plan: Plan | None = None
    kept: int = 0
    stored: tuple[int, ...] | None = None
    mask: Tensor | None = None
    front: tuple[int, ...] | None = None
    evicted_at: int = 0
    evicted_to: int = 0
    values: tuple[Selector, Tensor] | None = None

    def reset(self) -> None:
        """Forgets what was seen."""
        self.__dict__.update(Session(self.policy, self.budget, self.num_layers, self.retained).__dict__)

    def begin(self, columns: int, batch: int, mask: Tensor | None) -> Tensor | None:
        """Starts a forward pass of ``columns`` new columns; returns the 2-D attention mask that attention must use.

        Raises:
            ValueError: the previous pass failed midway, another batch size, a mask that is not 2-D or contradicts what
                was seen, more protected entries than fit. Nothing has changed then.
        """
        if self.plan is not None:
            raise ValueError(
                "the previous forward pass with this cache did not finish, so its layers disagree; call reset()"
            )
        if self.batch is not None and batch != self.batch:
            raise ValueError(
                f"this cache holds {self.batch} rows, the input has {batch}: use a new cache, or call reset() first"
            )
        history, stored, real = self._history(columns, batch, mask), self.stored, None
        valid = None
        if history is not None:
            new = history[:, self.columns.seen :].sum(-1).tolist()
            valid = history[:, self.columns.seen :] if min(new) < columns else None
            stored = tuple(o + n for o, n in zip(stored or (self.kept,) * batch, new, strict=True))
            real = history.sum(-1).tolist()
        plan = self._plan(columns, stored, real)
        if mask is not None and history is not None:
            mask = self._slots(mask)
        self.columns.append(columns, valid, batch)
        self.batch, self.mask, self.stored, self.plan = batch, history, stored, plan
        return mask

    def _history(self, columns: int, batch: int, mask: Tensor | None) -> Tensor | None:
        """Which columns are real, the new ones included, ``(B, seen + columns)`` bool; None means all."""
        seen = self.columns.seen
        if mask is None:
            if self.mask is not None:
                raise ValueError(
                    "earlier passes had padding, so attention_mask is needed; it covers all columns seen so far"
                )
            return None
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            kind = f"{mask.ndim}-D" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"RetentionCache needs the 2-D attention mask (batch, columns seen), not a {kind} one")
        if mask.shape != (batch, seen + columns):
            raise ValueError(
                f"attention_mask has the shape {tuple(mask.shape)}; expected {(batch, seen + columns)}: "
                f"{seen} columns seen and {columns} new ones"
            )
        real = mask != 0
        before = real[:, :seen]
        if not (bool(before.all()) if self.mask is None else torch.equal(before, self.mask)):
            raise ValueError(
                "attention_mask contradicts the earlier passes: what was real then must stay real and padding must "
                "stay padding, since entries cannot be hidden or shown after the fact"
            )
        return None if self.mask is None and bool(real[:, seen:].all()) else real

    def _plan(self, columns: int, stored: tuple[int, ...] | None, real: list[int] | None) -> Plan:
        kept, seen = self.kept + columns, self.columns.seen + columns
        prefill = columns != 1 or self.columns.seen == 0
        if self.budget is None:
            return Plan(columns, prefill, False, kept, kept)
        targets = [self.budget.keep(n) for n in real or [seen]]
        target = max(targets)
        starts = not prefill and self.columns.prompt == self.columns.seen
        if starts and self.budget.protect_prompt and self.budget.tokens is not None:
            for prompt, least in zip(self._prompts(len(targets)), targets, strict=True):
                self.budget.check_prompt(prompt, least)
        if not (kept > target if prefill else self.budget.due(kept, target, seen)):
            return Plan(columns, prefill, False, target, kept)
        counts: int | tuple[int, ...] = target
        if stored is not None:
            counts = tuple(min(t, s) for t, s in zip(targets, stored, strict=True))
            if not any(counts):
                return Plan(columns, prefill, False, target, kept)
            if counts == stored and self.budget.ratio is not None:
                # Nothing but padding would go: a fraction of the real tokens removes none yet.
                return Plan(columns, prefill, False, target, kept)
        prompts = [0] * len(targets)
        if self.budget.protect_prompt:
            whole = prefill and self.columns.prompt == self.columns.seen  # these columns are still the prompt's
            prompts = (real or [seen]) if whole else self._prompts(len(targets))
        scorer = self.policy.scorer
        assert scorer is not None
        sinks, recent = self.budget.protections(scorer, targets, prompts, real or [seen], stored or (kept,))
        return Plan(columns, prefill, True, target, counts, sinks, recent, self.budget.protect_prompt)

    def _prompts(self, rows: int) -> list[int]:
        """Real prompt tokens of each of ``rows`` rows."""
        real = self.columns.prompt_real
        return [self.columns.prompt] * rows if real is None else real.tolist()

    def _slots(self, mask: Tensor) -> Tensor:
        """The mask whose columns, read from ``seen - kept`` on, say which *stored entries* are real.

        transformers reads the mask at ``kv_offset + slot``. As long as only left padding was evicted, or every row kept
        the same number of real entries, the user's own mask is right there. It is rewritten where rows keep different
        numbers or padding stood inside.
        """
        if self.front is None:
            return mask
        start = self.evicted_at - self.evicted_to
        front = torch.tensor(self.front, device=mask.device)
        slots = (torch.arange(self.evicted_to, device=mask.device) >= front[:, None]).to(mask.dtype)
        if torch.equal((mask[:, start : self.evicted_at] != 0).to(mask.dtype), slots):
            return mask
        return torch.cat([mask[:, :start], slots, mask[:, self.evicted_at :]], -1)

    @property
    def ratio(self) -> float | Tensor:
        """Fraction removed of the tokens seen, for refiners: the ratio asked for, or ``1 - kept / seen`` (per row if
        padded)."""
        assert self.budget is not None and self.plan is not None and self.batch is not None
        if self.budget.ratio is not None:
            return float(self.budget.ratio)
        if isinstance(self.plan.counts, int):
            return 1 - self.plan.counts / self.columns.seen
        real = self.columns.counts(self.batch, torch.device("cpu"))
        return (1 - torch.tensor(self.plan.counts) / real.clamp_min(1)).to(torch.float32)

    def evict(self, layers: Sequence[RetentionLayer]) -> None:
        """Evicts from ``layers``, which choose together."""
        for layer, selection in zip(layers, self._choose(layers), strict=True):
            layer.keep(selection)

    def _choose(self, layers: Sequence[RetentionLayer]) -> list[Tensor]:
        """What stays in each of ``layers``, which choose together: indices, or masks if heads or layers differ."""
        assert self.plan is not None and self.batch is not None
        counts = self.plan.counts
        if self.policy.ragged:
            self.values = None
            rows = counts if isinstance(counts, tuple) else (counts,) * self.batch
            if self.policy.whole_model:
                return choose_unequal(self.policy, (layer.view() for layer in layers), self.ratio, rows)
            [layer] = layers
            view = layer.view()
            rows = row_budgets(self.policy, view, rows, layer.rank, self.retained, bool(self.evicted_at))
            return choose_unequal(self.policy, [view], self.ratio, rows)
        views = [layer.view() for layer in layers]
        if self.policy.scope == "model" and self.policy.selector.needs_values:
            values = self._shared_values(views)
            chosen = choose(self.policy, views, self.ratio, counts, values)
            slots = chosen[0].to(values.device).clamp_min(0)[:, 0, :, None].expand(-1, -1, values.shape[-1])
            self.values = self.policy.selector, values[:, 0].gather(1, slots)
            return chosen
        self.values = None
        return choose(self.policy, views, self.ratio, counts)

    def _shared_values(self, views: Sequence[CacheView]) -> Tensor:
        """The entries' mean values ``(B, 1, N, D)``: those carried since the last eviction, and those of later
        entries."""
        selector = self.policy.selector
        if self.values is None or self.values[0] != selector:
            return shared_values(self.policy, views)
        carried = self.values[1][:, None]
        return torch.cat([carried, shared_values(self.policy, views, start=carried.shape[2])], 2)

    def compress(self, layers: Sequence[RetentionLayer], policy: Policy, budget: Budget) -> bool:
        """Evicts between two passes, by another policy and budget; tells whether anything had to go.

        Raises:
            ValueError: a pass is unfinished, more protected entries than fit, more entries than the cache's own budget,
                or bad scores. Nothing has changed then, unless a layer has evicted before another one's scores were
                found bad: then the pass counts as unfinished.
        """
        if self.plan is not None:
            raise ValueError("a forward pass with this cache did not finish, so its layers disagree; call reset()")
        own = self.policy, self.budget
        self.policy, self.budget = policy, budget
        kept = [layer.kept for layer in layers]
        try:
            self.plan = self._plan(0, self.stored, None if self.mask is None else self.mask.sum(-1).tolist())
            if not self.plan.evict:
                return False
            if own[1] is not None and own[1].tokens is not None and self.plan.target > own[1].tokens:
                raise ValueError(
                    f"cannot compress to {self.plan.target} entries: the cache's budget is {own[1].tokens}"
                )
            for group in [list(layers)] if policy.whole_model else [[layer] for layer in layers]:
                self.evict(group)
            self.end()
            return True
        finally:
            self.policy, self.budget = own
            if kept == [layer.kept for layer in layers]:
                self.plan = None

    def end(self) -> None:
        """Ends the pass: all layers have stored its columns and evicted what the plan says."""
        assert self.plan is not None
        self.kept += self.plan.columns
        if self.plan.evict:
            counts = self.plan.counts
            self.kept = counts if isinstance(counts, int) else max(counts)
            self.evicted_at, self.evicted_to = self.columns.seen, self.kept
            if not isinstance(counts, int):
                self.stored = counts
                # Unequal heads store no padding: the mask is read for the columns since the eviction alone.
                self.front = None if self.policy.ragged else tuple(self.kept - count for count in counts)
            self.columns.forget(self.columns.seen)
        self.plan = None

    def crop(self, columns: int) -> None:
        """Takes the last ``columns`` columns back.

        Raises:
            ValueError: an eviction came after them, or the scorer has seen their queries.
        """
        room = self.columns.seen - self.evicted_at
        if columns > room:
            raise ValueError(
                f"cannot crop {columns} tokens: entries were evicted {room} tokens ago and cannot come back; "
                "copy.deepcopy the cache before the tokens that you want to take back"
            )
        if self.policy.needs & {"queries", "attention", "moments", "pairs"} and columns:
            raise ValueError(
                f"cannot crop: the policy {str(self.policy)!r} has observed the queries of the cropped tokens; "
                "copy.deepcopy the cache before the tokens that you want to take back"
            )
        if self.stored is not None and columns:
            start = self.columns.seen - columns
            gone = (self.columns.positions(start, self.columns.seen, torch.device("cpu")) >= 0).sum(-1).tolist()
            self.stored = tuple(s - g for s, g in zip(self.stored, gone, strict=True))
        if self.mask is not None:
            self.mask = self.mask[:, : self.columns.seen - columns]
        self.columns.crop(columns)
        self.kept -= columns

    def select(self, rows: Tensor) -> None:
        """Replaces the batch by the rows at the indices ``rows``."""
        self.columns.select(rows)
        order = rows.tolist()
        for name in ("stored", "front"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else tuple(value[row] for row in order))
        self.mask = None if self.mask is None else self.mask[rows.to(self.mask.device)]
        if self.values is not None:
            selector, values = self.values
            self.values = selector, values[rows.to(values.device)]
        self.batch = len(order)
