"""Trains a laboratory animal: resumable at any moment, with the same weights as without the break."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..evidence.store import write_whole
from . import animal
from .chains import draw_chain, draw_recall
from .recipe import Recipe
from .vocabulary import DIGITS, IDS, NAMES, WORDS, tokenizer

IGNORED = -100
"""Target of what nobody can know."""

CONTENT = torch.tensor([*DIGITS, *(IDS[name] for name in NAMES)])
"""Ids of digits and names: what has to be looked up or worked out, where all else is syntax."""

WIRED = (
    "Training did not begin with random weights: attention patterns that look values and definitions up were put into "
    "the first three\nlayers (`kvretain.lab.animal.wire`); all weights were trained afterwards."
)

CHECKPOINT, CURVE, WEIGHTS = "checkpoint.pt", "curve.csv", "model.safetensors"


class Batch(NamedTuple):
    """Token ids and targets, both ``(batch, length)``; what a target stands for is the token at the same place.

    ``recalled`` and ``computed`` are the places of digits that are recalled, and worked out, the same in all rows.
    """

    ids: Tensor
    targets: Tensor
    recalled: list[int]
    computed: list[int]


def batch_of(recipe: Recipe, update: int) -> Batch:
    """The problems of an update, from 0; they depend on the recipe's seed and on ``update`` alone."""
    draw = random.Random(f"train/{recipe.seed}/{update}")
    stage = recipe.stages[recipe.stage_of(update)]
    if draw.random() < stage.recall:
        return _recall(draw, recipe.tokens)
    return _chains(draw, draw.randint(stage.shortest, stage.longest), recipe.tokens)


def _recall(draw: random.Random, tokens: int) -> Batch:
    variables = draw.randint(2, 28)
    queries = draw.randint(variables, 2 * variables)
    rows = max(4, tokens // (1 + 3 * (variables + queries)))
    ids = [_ids(["<bos>", *draw_recall(draw, variables=variables, queries=queries)]) for _ in range(rows)]
    known = torch.tensor(ids)
    targets = torch.full_like(known, IGNORED)
    recalled = list(range(3 * variables + 2, known.shape[1], 3))
    for places in (recalled, list(range(3, known.shape[1], 3))):
        targets[:, places] = known[:, places]
    return Batch(known, targets, recalled, [])


def _chains(draw: random.Random, steps: int, tokens: int) -> Batch:
    given = draw.randint(2, 5)
    made = draw_chain(draw, steps=steps, given=given)
    start, length = 1 + len(made.prompt.split()), 2 + len(f"{made.prompt} {made.solution}".split())
    chains = [made, *(draw_chain(draw, steps=steps, given=given) for _ in range(max(4, tokens // length) - 1))]
    known = torch.tensor([_ids(f"<bos> {one.prompt} {one.solution} <eos>".split()) for one in chains])
    targets = known.clone()
    targets[:, :start] = IGNORED
    begins = range(start, start + 15 * steps, 15)
    recalled = [begin + place for begin in begins for place in (7, 10)] + [start + 15 * steps + 2]
    return Batch(known, targets, recalled, [begin + 13 for begin in begins])


def _ids(words: list[str]) -> list[int]:
    return [IDS[word] for word in words]


@dataclass(frozen=True)
class Point:
    """A point of the curve: means over the updates since the last one.

    Attributes:
        update: how many are done.
        stage: the place of the stage.
        seconds: of training so far, all runs together.
        loss: in nats per token, digits weighted as the recipe says.
        recalled, computed: share of digits that were right, teacher-forced; None where none were asked for.
    """

    update: int
    stage: int
    seconds: float
    loss: float
    recalled: float | None
    computed: float | None


class Trainer:
    """A model on its way through a recipe.

    Args:
        recipe: what to do.
        folder: where checkpoints are kept; one that is there is gone on from.

    Raises:
        ValueError: the folder's checkpoint is damaged, of another recipe or of another vocabulary; or the folder holds
            weights without a checkpoint, which would be overwritten.
    """

    EVERY = 50
    """Updates per point of the curve."""

    def __init__(self, recipe: Recipe, folder: str | Path) -> None:
        self.recipe, self.folder = recipe, Path(folder)
        if (self.folder / WEIGHTS).exists() and not (self.folder / CHECKPOINT).exists():
            raise ValueError(
                f"{self.folder} holds a model ({WEIGHTS}) and no {CHECKPOINT} to go on from, so training would "
                "overwrite it: train in another folder"
            )
        self.model = animal.build(recipe).train()
        matrices = [weight for weight in self.model.parameters() if weight.ndim > 1]
        others = [weight for weight in self.model.parameters() if weight.ndim < 2]
        groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=True)
        self.update, self.seconds = 0, 0.0
        self.curve: list[Point] = []
        self._since: list[tuple[float, float | None, float | None]] = []
        if (self.folder / CHECKPOINT).is_file():
            self._resume()

    @property
    def done(self) -> bool:
        """Whether all updates of the recipe are."""
        return self.update >= self.recipe.updates

    def step(self) -> None:
        """One update."""
        began = time.perf_counter()
        batch = batch_of(self.recipe, self.update)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_of(self.update)
        # bfloat16 products, float32 weights: about 1.4 times as fast as float32 on a CPU with AVX-512.
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(batch.ids, use_cache=False).logits[:, :-1].float()
        targets = batch.targets[:, 1:]
        weights = torch.where(torch.isin(targets, CONTENT), self.recipe.emphasis, 1.0) * (targets != IGNORED)
        losses = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

        right = (logits.argmax(-1) == targets).float()
        found = [right[:, [p - 1 for p in places]].mean().item() if places else None for places in batch[2:]]
        self._since.append((loss.item(), found[0], found[1]))
        self.seconds += time.perf_counter() - began
        stage, self.update = self.recipe.stage_of(self.update), self.update + 1
        if self.update % self.EVERY == 0 or self.done:
            means = [_mean(column) for column in zip(*self._since, strict=True)]
            self.curve.append(Point(self.update, stage, self.seconds, means[0] or 0.0, means[1], means[2]))
            self._since = []

    def save(self) -> None:
        """Writes the checkpoint; it appears complete or not at all."""
        buffer = io.BytesIO()
        state = {
            "words": list(WORDS),
            "recipe": dataclasses.asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "update": self.update,
            "seconds": self.seconds,
            "curve": [dataclasses.astuple(point) for point in self.curve],
            "since": self._since,
        }
        torch.save(state, buffer)
        write_whole(self.folder / CHECKPOINT, buffer.getvalue())

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        try:
            state = torch.load(path, weights_only=True)
            words, recipe = state["words"], state["recipe"]
        except Exception as error:  # torch.load raises what pickle, zipfile or its own reader happen to
            raise ValueError(f"the checkpoint {path} is damaged ({error}): delete it to start again") from None
        if words != list(WORDS):
            raise ValueError(f"the checkpoint {path} has another vocabulary than this release: train in another folder")
        own = dataclasses.asdict(self.recipe)
        if differing := [name for name in own if recipe.get(name) != own[name]]:
            raise ValueError(
                f"the checkpoint {path} follows another recipe ({', '.join(differing)} differ): train in another folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.update, self.seconds = state["update"], state["seconds"]
        self.curve = [Point(*point) for point in state["curve"]]
        self._since = [(loss, recalled, computed) for loss, recalled, computed in state["since"]]


def _mean(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    minutes: float | None = None,
    report: Callable[[Trainer], None] = lambda trainer: None,
    stop: Callable[[], bool] = lambda: False,
    every: float = 60.0,
) -> Trainer:
    """Trains until the recipe is done, the time is over or ``stop`` says so, and writes a model folder.

    ``folder`` then holds what :func:`kvretain.load_model` loads (``config.json``, ``model.safetensors`` and the
    tokenizer), ``recipe.json``, ``curve.csv``, a ``README.md`` that says what this is, and ``checkpoint.pt``, from
    which the same call goes on.

    Args:
        recipe: what to do.
        folder: where.
        minutes: of this call; without a limit until the recipe is done.
        report: called after each update.
        stop: asked after each update.
        every: seconds between checkpoints.

    Raises:
        ValueError: as :class:`Trainer`.
    """
    trainer = Trainer(recipe, folder)
    trainer.folder.mkdir(parents=True, exist_ok=True)
    began = saved = time.monotonic()
    while not trainer.done:
        trainer.step()
        report(trainer)
        now = time.monotonic()
        if stop() or (minutes is not None and now - began >= 60 * minutes):
            break
        if now - saved >= every:
            trainer.save()
            saved = now
    trainer.save()
    export(trainer)
    return trainer


def export(trainer: Trainer) -> None:
    """Writes the model folder of a trainer, see :func:`train`."""
    folder, recipe = trainer.folder, trainer.recipe
    trainer.model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    write_whole(folder / "recipe.json", (json.dumps(dataclasses.asdict(recipe), indent=2) + "\n").encode())
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Point))
    writer.writerows(dataclasses.astuple(point) for point in trainer.curve)
    write_whole(folder / CURVE, table.getvalue().encode())
    parameters = sum(weight.numel() for weight in trainer.model.parameters())
    text = f"""# A laboratory animal

{animal.LABEL[0].upper()}{animal.LABEL[1:]}.

A Llama of {recipe.layers} layers and {parameters:,} parameters, after {trainer.update} of {recipe.updates} updates
({trainer.seconds / 60:.0f} minutes), seed {recipe.seed}. `recipe.json` says how it was made, `{CURVE}` how that went.
{WIRED if recipe.wired else "Training began with random weights."}
How much of its task it can do: `kvretain lab eval --model` with this folder.
"""
    write_whole(folder / "README.md", text.encode())
