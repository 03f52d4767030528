"""How a laboratory animal is made: its size and the stages of its training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stretch of training.

    Attributes:
        updates: how many.
        shortest, longest: steps of its chains, drawn uniformly.
        recall: share of batches that are pure recall (:func:`~kvretain.lab.chains.draw_recall`).
    """

    updates: int
    shortest: int
    longest: int
    recall: float = 0.1

    def __post_init__(self) -> None:
        if self.updates < 1 or not 1 <= self.shortest <= self.longest or not 0 <= self.recall <= 1:
            raise ValueError(f"a stage has updates, 1 <= shortest <= longest and a share of recall, not {self}")


@dataclass(frozen=True)
class Recipe:
    """All that the weights depend on, beside versions of software and the machine.

    Attributes:
        width, layers, heads, groups, inner: of the Llama: hidden size, layers, query heads, KV heads, size of the MLP.
        theta: base of its rotary embedding.
        wired: whether training starts from weights that look back and recall, see :func:`~kvretain.lab.animal.wire`,
            or from random ones.
        stages: in their order.
        tokens: of a batch, about.
        rate: the largest learning rate; it rises over the first ``warmup`` updates and falls linearly, to 2 % of it.
        decay: AdamW's weight decay of matrices.
        betas: AdamW's.
        emphasis: weight of digits and names in the loss; syntax has 1.
        seed: of the initial weights and of all problems.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    groups: int = 2
    inner: int = 384
    theta: float = 500_000.0
    wired: bool = True
    stages: tuple[Stage, ...] = (Stage(900, 1, 5), Stage(400, 2, 14), Stage(900, 6, 24, 0.05))
    tokens: int = 2000
    rate: float = 2e-3
    warmup: int = 100
    decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.98)
    emphasis: float = 4.0
    seed: int = 0

    @property
    def updates(self) -> int:
        """Of all stages."""
        return sum(stage.updates for stage in self.stages)

    def stretched(self, factor: float) -> Recipe:
        """The same with ``factor`` times the updates in each stage.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"a recipe is stretched by a positive factor, not {factor}")
        stages = [dataclasses.replace(one, updates=max(1, round(factor * one.updates))) for one in self.stages]
        return dataclasses.replace(self, stages=tuple(stages))

    def stage_of(self, update: int) -> int:
        """The place of the stage that an update, from 0, belongs to."""
        ends = [sum(stage.updates for stage in self.stages[: place + 1]) for place in range(len(self.stages))]
        return next(place for place, end in enumerate(ends) if update < end)

    def rate_of(self, update: int) -> float:
        """The learning rate of an update, from 0."""
        return self.rate * min((update + 1) / self.warmup, max(0.02, 1 - update / self.updates))
