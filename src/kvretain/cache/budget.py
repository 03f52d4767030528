"""How many entries stay, when to evict, and what is protected."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..scores import Scorer

TRIGGERS = ("slack", "periodic")
"""When a single-token pass evicts, see :class:`Budget`."""


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} is a whole number of at least {least}, not {value!r}")


@dataclass(frozen=True)
class Budget:
    """A number of entries per KV head, or a fraction of the tokens seen.

    Attributes:
        tokens: entries kept per head, protected ones included.
        ratio: fraction *removed* of the real tokens seen by a row, in [0, 1).
        every: decode cadence in tokens; ``every=1`` never ends a pass above the budget.
        trigger: what a single-token pass waits for before it compresses down to ``tokens``. ``"slack"``: that
            ``tokens + every`` entries are stored. ``"periodic"``: that the columns seen, padding included, are a
            multiple of ``every`` (and more than ``tokens`` are stored), as R-KV does; then caches evict at the same
            passes whatever their prompts and budgets. Either way storage never exceeds ``tokens + every``, and a long
            run saw-tooths from ``tokens`` to ``tokens + every - 1`` after a pass: ``tokens + (every - 1) / 2`` on
            average.
        sinks: first tokens protected; None takes the scorer's default, shrunk to fit.
        recent: last tokens protected; None likewise.
        protect_prompt: protect everything that came before the first single-token step.

    Raises:
        ValueError: both or neither of ``tokens`` and ``ratio``, or one of the numbers out of its range.
    """

    tokens: int | None
    ratio: float | None
    every: int = 128
    sinks: int | None = None
    recent: int | None = None
    protect_prompt: bool = False
    trigger: str = "slack"

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.ratio is None):
            given = "neither" if self.tokens is None else f"budget={self.tokens} and ratio={self.ratio}"
            raise ValueError(
                f"give either budget (entries kept per head) or ratio (fraction removed), not {given}; "
                "the policy 'full' alone needs none"
            )
        if self.tokens is not None:
            _whole("budget", self.tokens, 1)
        if self.ratio is not None and (
            isinstance(self.ratio, bool) or not isinstance(self.ratio, numbers.Real) or not 0 <= self.ratio < 1
        ):
            raise ValueError(f"ratio is the fraction removed, a number in [0, 1), not {self.ratio!r}")
        _whole("every", self.every, 1)
        if self.trigger not in TRIGGERS:
            raise ValueError(f"trigger is one of {', '.join(map(repr, TRIGGERS))}, not {self.trigger!r}")
        for name in ("sinks", "recent"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0)
        explicit = (self.sinks or 0) + (self.recent or 0)
        if self.tokens is not None and explicit > self.tokens:
            raise ValueError(self._overfull(explicit, self.tokens, "sinks and recent tokens"))

    def keep(self, seen: int) -> int:
        """Entries to keep of ``seen`` real tokens: ``tokens``, or ``seen - floor(ratio * seen)`` and at least 1.

        The rounding never removes more than the fraction asked for.
        """
        if self.tokens is not None:
            return self.tokens
        assert self.ratio is not None
        # The epsilon undoes binary rounding: 0.29 * 100 is 28.999999999999996.
        return max(1, seen - math.floor(self.ratio * seen + 1e-9))

    def due(self, kept: int, target: int, seen: int) -> bool:
        """Whether a single-token pass that leaves ``kept`` entries after ``seen`` columns evicts down to ``target``."""
        if self.trigger == "periodic":
            return kept > target and seen % self.every == 0
        return kept >= target + self.every

    def check_prompt(self, prompt: int, target: int) -> None:
        """Checks, before the first generated token is fed, that a protected prompt of ``prompt`` entries leaves room.

        Raises:
            ValueError: it fills the ``target`` entries, so that every eviction would drop all that was generated.
        """
        if prompt >= target:
            raise ValueError(
                f"the protected prompt of {prompt} tokens fills the budget of {target} entries per head, so nothing "
                f"that is generated could be kept: raise the budget above {prompt}, or let the prompt compete "
                "(protect_prompt=False)"
            )

    def protection(self, target: int, prompt: int, scorer: Scorer, seen: int = 0) -> tuple[int, int]:
        """Sinks and recent tokens to protect under a budget of ``target`` entries, ``prompt`` of them protected
        already, after ``seen`` tokens.

        Numbers the user gave are kept; the scorer's defaults shrink: recent to half of the room, sinks to a quarter.

        Raises:
            ValueError: more protected entries than ``target``.
        """
        if prompt > target:
            raise ValueError(self._overfull(prompt, target, "prompt tokens (protect_prompt=True)"))
        room = target - prompt
        recent = self.recent
        if recent is None:
            recent = min(max(scorer.recent(target), scorer.local(seen)), room // 2)
        # A protected prompt holds the sinks already.
        default = 0 if prompt else min(scorer.sinks, target // 4)
        sinks = default if self.sinks is None else self.sinks
        explicit = (0 if prompt else self.sinks or 0) + (self.recent or 0)
        if explicit > room:
            raise ValueError(self._overfull(explicit + prompt, target, "sinks, recent and prompt tokens"))
        if self.recent is None:
            recent = min(recent, room - (0 if prompt else sinks))
        elif self.sinks is None:
            sinks = min(sinks, room - recent)
        return sinks, recent

    def protections(
        self,
        scorer: Scorer,
        targets: Sequence[int],
        prompts: Sequence[int],
        seen: Sequence[int],
        stored: Sequence[float],
        *,
        scored: bool = True,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """:meth:`protection` row by row: sinks, and recent tokens.

        Args:
            scorer: the policy's.
            targets: entries that fit; ``prompts`` protected already, ``seen`` tokens, ``stored`` real entries.
            scored: whether the scorer values the entries, which some cannot after few tokens.

        Raises:
            ValueError: more protected entries than fit, or no row that loses any is long enough to be valued.
        """
        rows = zip(targets, prompts, seen, strict=True)
        pairs = [self.protection(target, prompt, scorer, n) for target, prompt, n in rows]
        sinks, recent = zip(*pairs, strict=True)
        # A short row beside a longer one is served; it is an error where no row can be valued.
        valued = [
            n
            for n, target, has, *protected in zip(seen, targets, stored, sinks, recent, prompts, strict=True)
            if sum(protected) < min(target, has) < has
        ]
        if scored and valued:
            scorer.check_seen(max(valued))
        return sinks, recent

    @staticmethod
    def _overfull(protected: int, budget: int, what: str) -> str:
        return (
            f"{protected} protected entries ({what}) do not fit into a budget of {budget} entries per head: "
            "raise the budget (or lower the ratio), or protect fewer (sinks=, recent=, protect_prompt=False)"
        )


def protected_entries(
    positions: Tensor, seen: Tensor, sinks: Sequence[int], recent: Sequence[int], prompts: Tensor | None = None
) -> Tensor:
    """Entries that stay whatever their score, bool in the shape of ``positions``.

    Args:
        positions: ``(B, H or 1, N)`` int64; -1 is padding, which is never protected.
        seen: ``(B,)`` int64, real tokens seen by each row.
        sinks, recent: first and last tokens, one number each for all rows or one per row.
        prompts: ``(B,)`` int64, first tokens that are protected, too.
    """
    first, last = (torch.tensor(n, device=positions.device)[:, None, None] for n in (sinks, recent))
    protected = (positions < first) | (positions >= seen[:, None, None] - last)
    if prompts is not None:
        protected |= positions < prompts[:, None, None]
    return protected & (positions >= 0)
