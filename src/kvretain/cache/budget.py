"""How many entries stay, when to evict, and what is protected."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from ..scores import Scorer


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} is a whole number of at least {least}, not {value!r}")


@dataclass(frozen=True)
class Budget:
    """A number of entries per KV head, or a fraction of the tokens seen.

    Attributes:
        tokens: entries kept per head, protected ones included.
        ratio: fraction *removed* of the real tokens seen by a row, in [0, 1).
        every: decode cadence: compress when ``tokens + every`` entries are stored, down to ``tokens``.
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

    def protection(self, target: int, prompt: int, scorer: Scorer) -> tuple[int, int]:
        """Sinks and recent tokens to protect under a budget of ``target`` entries, ``prompt`` of them protected
        already.

        Numbers the user gave are kept; the scorer's defaults shrink: recent to half of the room, sinks to a quarter.

        Raises:
            ValueError: more protected entries than ``target``.
        """
        if prompt > target:
            raise ValueError(self._overfull(prompt, target, "prompt tokens (protect_prompt=True)"))
        room = target - prompt
        recent = min(scorer.recent(target), room // 2) if self.recent is None else self.recent
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

    @staticmethod
    def _overfull(protected: int, budget: int, what: str) -> str:
        return (
            f"{protected} protected entries ({what}) do not fit into a budget of {budget} entries per head: "
            "raise the budget (or lower the ratio), or protect fewer (sinks=, recent=, protect_prompt=False)"
        )
