"""Scorers of kvpress by duck typing: presses written here, none of kvpress' own."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import pytest
import torch
from cache.test_oracle import agrees
from scores.views import pad, random_view, row, strip
from torch.nn import functional

from kvretain import Policy, RetentionCache, refiners, scorers
from kvretain.integrations.kvpress import from_press
from kvretain.integrations.kvpress._marks import lifted, marked


@dataclass
class Press:
    """What kvpress' scorers share."""

    compression_ratio: float = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        raise NotImplementedError


class Short(Press):
    """Short keys first."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)


class Unlike(Press):
    """Keys unlike the mean key first: depends on all entries, and its sign differs from head to head."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        mean = functional.normalize(keys, dim=-1).mean(2, keepdim=True)
        return -functional.cosine_similarity(keys, mean, dim=-1)


@dataclass
class Window(Press):
    """What the last queries attend to, read as SnapKV's press reads it."""

    window_size: int = 4

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert hidden_states.shape[1] > self.window_size, "the window is too long"
        group = module.config.num_attention_heads // keys.shape[1]
        weights = attentions[..., -self.window_size :, : -self.window_size].mean(-2)
        scores = weights.unflatten(1, (keys.shape[1], group)).mean(2)
        return functional.pad(scores, (0, self.window_size), value=scores.max().item() + 1)


@dataclass
class Ends(Press):
    """Sinks and the most recent entries; which are recent depends on the ratio."""

    n_sink: int = 3

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = torch.ones_like(keys[..., 0])
        dropped = keys.shape[2] - int(keys.shape[2] * (1 - self.compression_ratio))
        scores[:, :, self.n_sink : self.n_sink + dropped] = 0
        return scores


WORKING = [Short(), Unlike(), Window(), Ends()]


@pytest.mark.parametrize("press", WORKING, ids=lambda press: type(press).__name__)
@pytest.mark.parametrize("seed", range(3))
def test_rows_and_padding_do_not_leak(press, seed):
    scorer = from_press(press)
    view = random_view(seed, seen=(19, 7, 12), kept=12)
    scores = scorer.score(view)
    assert scores.dtype == torch.float32 and scores.isfinite().all()
    before = torch.rand(12, generator=torch.Generator().manual_seed(seed)) < 0.5
    padded = strip(scorer.score(pad(view, before)), before)
    torch.testing.assert_close(padded[view.valid], scores[view.valid])
    for index in range(3):
        real = view.valid[index]
        torch.testing.assert_close(scorer.score(row(view, index))[0][real], scores[index][real])


def test_a_press_equals_the_scorer_of_the_same_name():
    view = random_view(1)
    for press, name in ((Short(), "knorm"), (Unlike(), "keydiff")):
        theirs, ours = from_press(press).score(view), scorers[name]().score(view)
        torch.testing.assert_close(theirs[view.valid], ours[view.valid])


def test_heads_with_unequal_numbers_of_entries_are_valued_one_by_one():
    view = random_view(2, seen=(20,), kept=20)
    short = view.positions.clone()
    short[:, 1, :7] = -1
    scores = from_press(Unlike()).score(replace(view, positions=short))
    alone = Unlike().score(None, None, view.keys[:, 1:, 7:], view.values, None, None)
    torch.testing.assert_close(scores[:, 1:, 7:], alone)
    torch.testing.assert_close(scores[:, :1], from_press(Unlike()).score(view)[:, :1])
    assert (scores[:, 1, :7] == 0).all()


def test_attention_of_the_last_queries_is_causal_and_complete():
    """A press with a window sees the weights that full attention over the entries has."""
    view = random_view(3, seen=(14,), kept=14)
    caught = []

    class Look(Window):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            caught.append(attentions)
            return super().score(module, hidden_states, keys, values, attentions, kwargs)

    scorer = from_press(Look())
    assert scorer.needs == {"queries"} and scorer.window == 4
    caught.clear()
    scorer.score(view)
    (weights,) = caught
    assert weights.shape == (1, 4, 4, 14)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 4))
    keys = view.keys.repeat_interleave(2, 1)
    logits = view.scaling * view.queries[:, :, -4:] @ keys.transpose(-1, -2)
    hidden = torch.arange(14) > torch.arange(10, 14)[:, None]
    torch.testing.assert_close(weights, logits.masked_fill(hidden, -torch.inf).softmax(-1))


def test_the_ratio_is_what_goes_now_and_the_press_stays_as_it_was():
    press = Ends(compression_ratio=0.1)
    view = replace(random_view(4, seen=(20,), kept=20), budget=9)
    scores = from_press(press).score(view)
    assert press.compression_ratio == 0.1
    assert torch.equal(scores[0, 0].bool(), (torch.arange(20) < 3) | (torch.arange(20) >= 14))
    rows = replace(random_view(4, seen=(20, 20), kept=20), budget=9, budgets=(9, 5))
    assert from_press(press).score(rows).sum(-1).tolist() == [[9, 9], [5, 5]]


# --- refused --------------------------------------------------------------------------------------


def refusing(text: str):
    """A press whose score evaluates ``text``."""

    class Custom(Press):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            eval(text)
            return keys[..., 0]

    return Custom()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("hidden_states[:, -4:]", "hidden_states"),
        ("torch.nn.functional.linear(hidden_states, keys)", "hidden_states"),
        ("torch.cat([hidden_states, hidden_states])", "hidden_states"),
        ("module.o_proj.weight", "module.o_proj"),
        ("hasattr(module, 'q_proj')", "module.q_proj"),
        ("module.config.hidden_size", "module.config.hidden_size"),
        ("kwargs['position_embeddings']", r"kwargs\['position_embeddings'\]"),
        ("attentions.sum(2)", "attentions.sum"),
        ("attentions[..., -1:, :-1]", "attentions"),
        ("len(attentions)", "attentions"),
    ],
)
def test_a_press_that_reads_more_than_a_cache_keeps_is_refused_at_once(text, what):
    with pytest.raises(ValueError, match=rf"^Custom reads {what}, which a cache does not keep; from_press takes"):
        from_press(refusing(text))


def test_a_press_that_reads_older_queries_than_its_window_is_refused():
    press = Window(window_size=4)
    with pytest.raises(ValueError, match=r"Window reads the attention of more than the last 2 queries"):
        from_press(press, window=2)

    class ObservedAttentionPress(Press):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return attentions.sum(2).unflatten(1, (keys.shape[1], -1)).mean(2)

    with pytest.raises(ValueError, match=r"more than the last 8 queries.*kvretain's own policy 'h2o'"):
        from_press(ObservedAttentionPress(), window=8)


def test_a_press_without_scores_is_refused():
    class AdaKVPress:
        pass

    with pytest.raises(ValueError, match=r"AdaKVPress has no score method; kvretain's own policy for it is 'adakv'"):
        from_press(AdaKVPress())
    for window in (-1, True, 2.0):
        with pytest.raises(ValueError, match="window is a whole number of at least 0"):
            from_press(Short(), window=window)


def test_a_press_that_fails_or_answers_in_another_shape_names_itself_and_the_layer():
    view = random_view(0, seen=(6,), kept=6)
    with pytest.raises(ValueError, match=r"Window failed on 6 entries of layer 3: AssertionError: the window is too"):
        from_press(Window(window_size=6)).score(view)
    with pytest.raises(ValueError, match=r"Wide returned \(1, 2, 6, 6\) at layer 3; expected \(1, 2, 6\)"):
        from_press(type("Wide", (Press,), {"score": lambda self, *call: call[2]})()).score(view)


def test_trying_a_press_leaves_the_random_numbers_alone():
    class Noise(Press):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return torch.rand(keys.shape[:-1])

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    from_press(Noise())
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is not None, reason="kvpress is installed")
def test_presses_of_ours_ask_for_kvpress():
    import kvretain.integrations.kvpress as integration

    for name in ("HubKVPress", "DiversePress"):
        with pytest.raises(ImportError, match=f"{name} is a press of kvpress, which is not installed: pip install"):
            getattr(integration, name)
    with pytest.raises(AttributeError, match="KnormPress"):
        _ = integration.KnormPress


# --- in a cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("press", WORKING, ids=lambda press: type(press).__name__)
@pytest.mark.parametrize("situation", ["left-padded", "chunked prefill"])
def test_a_press_in_a_cache_agrees_with_masked_full_attention(press, situation):
    agrees(Policy(from_press(press)), "llama", situation)


# Not keydiff with hub: ours shifts every head to >= 0, a press only heads that have a negative score.
@pytest.mark.parametrize(
    ("press", "own", "refiner"),
    [(Short(), "knorm", None), (Short(), "knorm", "hub"), (Unlike(), "keydiff", None)],
    ids=["knorm", "knorm+hub", "keydiff"],
)
@pytest.mark.parametrize("scope", ["head", "shared"])
def test_a_press_keeps_what_the_scorer_of_the_same_name_keeps(llama, press, own, refiner, scope):
    correct = refiners[refiner]() if refiner else None
    kept = []
    for scorer in (from_press(press), scorers[own]()):
        cache = RetentionCache.for_model(llama, Policy(scorer, correct, scope=scope), budget=12, every=4, sinks=2)
        ids = torch.randperm(95, generator=torch.Generator().manual_seed(2))[None, :50] + 1
        with torch.no_grad():
            for part in ids.split([40, *[1] * 10], 1):
                llama(part, past_key_values=cache)
        cache.check_integrity()
        kept.append([layer.positions for layer in cache.layers])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def test_sinks_and_window_of_the_press_are_protected(llama):
    ids = torch.randint(1, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    for press, first, last in ((Ends(), 3, 0), (Window(), 0, 4)):
        cache = RetentionCache.for_model(llama, Policy(from_press(press)), budget=16)
        with torch.no_grad():
            llama(ids, past_key_values=cache)
        for layer in cache.layers:
            kept = layer.positions[0, 0].tolist()
            assert kept[:first] == list(range(first)) and kept[16 - last :] == list(range(40 - last, 40))


# --- marks ----------------------------------------------------------------------------------------


def test_marks_are_runs_at_the_ends_that_top_every_head():
    scores = torch.rand(2, 3, 10, generator=torch.Generator().manual_seed(0))
    assert not marked(scores).any()
    scores[0, :, :2], scores[0, :, -3:], scores[0, :, 5] = 2.0, 2.0, 2.0
    scores[1, :2, -1] = 3.0
    expected = torch.zeros(2, 3, 10, dtype=torch.bool)
    expected[0, :, [0, 1, 7, 8, 9]] = True
    assert torch.equal(marked(scores), expected)
    assert not marked(torch.ones(1, 2, 5)).any()


def test_only_heads_with_a_negative_candidate_are_lifted():
    scores = torch.tensor([[[-2.0, 1.0, -5.0], [0.5, 1.0, 2.0]]])
    candidates = torch.tensor([[[True, True, False], [True, True, True]]])
    assert lifted(scores, candidates).tolist() == [[[0.0, 3.0, 0.0], [0.5, 1.0, 2.0]]]
