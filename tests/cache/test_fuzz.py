"""Random use: any policy, budget, batch, dtype and order of calls. Nothing breaks without one clear error, and what the
cache promises holds after every call."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvretain import RetentionCache

from .models import forward, model, tokens

SCORERS = ("random", "streaming", "knorm", "value-norm", "keydiff", "lagkv", "snapkv", "tova@head", "rkv", "h2o")
SCORERS += ("expected@head", "kvzip@head")
REFINERS = ("", "+hub", "+smd", "+head-nms")
SELECTORS = ("", "/diverse", "/greedy", "/segments(length=4)")
MERGERS = ("", "~nearest", "~segment(length=2)")
SCOPES = ("head", "layer", "model", "aligned", "shared", "model-heads")


class Use(RuleBasedStateMachine):
    """One cache at a time, and what it must have seen."""

    @initialize(data=st.data())
    def make(self, data):
        draw = data.draw
        scorer, refiner = draw(st.sampled_from(SCORERS)).partition("@")[0], draw(st.sampled_from(REFINERS))
        parts = draw(st.sampled_from(SELECTORS)), draw(st.sampled_from(MERGERS)), draw(st.sampled_from(SCOPES))
        self.policy = f"{scorer}{refiner}{parts[0]}{parts[1]}@{parts[2]}"
        self.rows = draw(st.integers(1, 3))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        self.net = model(draw(st.sampled_from(["llama", "gemma3"])), None, dtype)
        limit = {"budget": draw(st.integers(1, 24))} if draw(st.booleans()) else {"ratio": draw(st.floats(0, 0.99))}
        options = limit | {
            "every": draw(st.integers(1, 6)),
            "sinks": draw(st.none() | st.integers(0, 5)),
            "recent": draw(st.none() | st.integers(0, 5)),
            "protect_prompt": draw(st.booleans()),
            "trigger": draw(st.sampled_from(["slack", "periodic"])),
            "storage": draw(st.sampled_from([None, None, "int8", "fp8"])),
        }
        self.cache, self.seen, self.mask, self.seed = None, 0, None, 0
        try:
            self.cache = RetentionCache.for_model(self.net, self.policy, **options)
        except ValueError as error:
            assert len(str(error)) > 20
            self.policy = "knorm"
            self.cache = RetentionCache.for_model(self.net, self.policy, **limit)

    def feed(self, columns: int, padding: int) -> None:
        self.seed += 1
        ids = tokens(self.seed, self.rows, columns)
        new = torch.ones(self.rows, columns, dtype=torch.int64)
        if padding and self.rows > 1 and columns > 1:
            new[0, : min(padding, columns - 1)] = 0
        mask = new if self.mask is None else torch.cat([self.mask, new], 1)
        try:
            logits = forward(self.net, ids, self.cache, mask=mask)
        except ValueError as error:
            assert len(str(error)) > 20, "an error says what was wrong"
            self.restart()
            return
        self.mask, self.seen = mask, self.seen + columns
        assert logits[new.bool()].isfinite().all()

    @precondition(lambda self: self.cache)
    @rule(columns=st.integers(1, 40), padding=st.sampled_from([0, 0, 1, 5]))
    def prefill(self, columns, padding):
        self.feed(columns, padding)

    @precondition(lambda self: self.cache)
    @rule(count=st.integers(1, 9))
    def decode(self, count):
        for _ in range(count):
            if self.cache:
                self.feed(1, 0)

    @precondition(lambda self: self.cache and self.seen)
    @rule(data=st.data())
    def reorder(self, data):
        order = torch.tensor(data.draw(st.lists(st.integers(0, self.rows - 1), min_size=1, max_size=3)))
        self.cache.batch_select_indices(order)
        self.mask, self.rows = self.mask[order], len(order)

    @precondition(lambda self: self.cache and self.seen)
    @rule()
    def copied(self):
        self.cache = copy.deepcopy(self.cache)

    @precondition(lambda self: self.cache and self.seen)
    @rule()
    def saved(self):
        with tempfile.TemporaryDirectory() as folder:
            self.cache = RetentionCache.load(self.cache.save(Path(folder) / "cache"), self.net)

    @precondition(lambda self: self.cache and self.seen)
    @rule(columns=st.integers(1, 4))
    def crop(self, columns):
        try:
            self.cache.crop(-columns)
        except ValueError as error:
            assert len(str(error)) > 20
            return
        self.mask, self.seen = self.mask[:, : self.seen - columns], self.seen - columns

    @precondition(lambda self: self.cache and self.seen)
    @rule(ratio=st.floats(0, 0.9))
    def compress(self, ratio):
        try:
            self.cache.compress(self.policy, ratio=ratio)
        except ValueError as error:
            assert len(str(error)) > 20
            self.restart()

    @precondition(lambda self: self.cache)
    @rule()
    def restart(self):
        self.cache.reset()
        self.seen, self.mask = 0, None

    @invariant()
    def promises_hold(self):
        cache = getattr(self, "cache", None)
        if not cache or not self.seen:
            return
        cache.check_integrity()
        assert cache.get_seq_length() == self.seen
        budget = cache._session.budget
        for layer in cache.layers:
            if layer.is_sliding:
                continue
            real = layer.positions >= 0  # padding may stand between
            before = layer.positions.cummax(-1).values[..., :-1]
            assert (layer.positions[..., 1:] > before)[real[..., 1:]].all(), "positions ascend"
            assert (layer.positions.amax(-1) < self.mask.sum(-1)[:, None]).all()
            if budget.tokens is not None:
                assert real.sum(-1).float().mean() <= budget.tokens + budget.every


Use.TestCase.settings = settings(
    max_examples=60, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestUse = Use.TestCase
