"""Models that mix full attention with layers that carry a state: their full-attention layers against the oracle, their
states through copies, resets, beams and replays, and what is refused."""

from __future__ import annotations

import copy
from functools import cache as memoise

import pytest
import torch

from kvretain import CompiledDecoding, Policy, RetentionCache
from kvretain.cache import support

from .models import HYBRIDS, cache_argument, forward, model, tokens
from .oracle import Oracle, Recorder, compare, play
from .test_oracle import GENERATES, SCRIPTS, _rows
from .test_replay import Recording

FAST = ("lfm2", "qwen3_next")
SITUATIONS = ("single", "left-padded ratio", "chunked prefill", "turns left-padded")
TOLERANCE = 1e-3
"""These models' own chunked kernels differ from their single steps by up to 1e-4; a wrong entry moves logits by 1."""

oracle = memoise(Oracle)


def names(*fast: str, without: tuple[str, ...] = ()) -> list:
    """All hybrids but ``without``; those not in ``fast`` are slow."""
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in HYBRIDS if n not in without]


def read(net, cache, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Logits of ``ids``, at positions from ``start`` on."""
    return forward(net, ids, cache, positions=torch.arange(start, start + ids.shape[1])[None])


def states(cache) -> list[torch.Tensor]:
    """What the layers without keys hold."""
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    held = [state for layer in layers for state in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    return [state.clone() for state in held if state is not None]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(
    "policy", ["snapkv+hub", "kvzip", *(pytest.param(p, marks=pytest.mark.slow) for p in ("keydiff@model", "adakv"))]
)
@pytest.mark.parametrize("name", names(*FAST))
def test_evicting_is_hiding_in_the_full_attention_layers(name, policy, situation):
    options, script = SCRIPTS[situation]
    net = model(name)
    if policy == "kvzip" and (name == "jamba" or "padded" in situation):
        with pytest.raises(ValueError, match="forget their states" if name == "jamba" else "rows of one length"):
            play(net, RetentionCache.for_model(net, policy, **options), script)
        return
    cache = RetentionCache.for_model(net, policy, **options)
    # Bamba counts positions anew in every pass if it is given none.
    steps = play(net, cache, script, pass_mask="padded" in situation or name == "bamba")
    cache.check_integrity()
    assert compare(oracle(name), steps, atol=TOLERANCE).evictions >= 2
    assert len(steps[-1].after) == 2, "two of the four layers hold entries"
    shown = zip(steps, oracle(name).logits(steps, hide=False), strict=True)
    assert max((step.logits - logits).abs()[:, -1].max().item() for step, logits in shown) > 100 * TOLERANCE


@pytest.mark.parametrize("situation", ["greedy generate", "beams"])
@pytest.mark.parametrize("name", names(*FAST))
def test_generate(name, situation):
    options, arguments = GENERATES[situation]
    net, prompt = model(name), _rows(0, (32, 25, 18))
    cache = RetentionCache.for_model(net, "snapkv+hub", **options)
    recorder = Recorder(cache, prompt.mask)
    out = net.generate(
        prompt.ids,
        attention_mask=prompt.mask,
        logits_processor=[recorder],
        output_logits=True,
        return_dict_in_generate=True,
        **({"do_sample": False, cache_argument(net): cache} | arguments),
    )
    assert compare(oracle(name), recorder.steps(out.logits), atol=TOLERANCE).evictions >= 2


@pytest.mark.parametrize("name", names(*FAST))
def test_a_copy_goes_its_own_way(name):
    net = model(name)
    cache = RetentionCache.for_model(net, "knorm", budget=14, every=4)
    read(net, cache, tokens(1, 1, 30))
    before, other = states(cache), copy.deepcopy(cache)
    expected = [read(net, other, tokens(n, 1, 1), 30 + n) for n in range(6)]
    assert before and all(map(torch.equal, states(cache), before)), "the copy's passes changed the original's states"
    assert any(not torch.equal(*pair) for pair in zip(states(other), before, strict=True))
    assert all(torch.equal(read(net, cache, tokens(n, 1, 1), 30 + n), expected[n]) for n in range(6))


@pytest.mark.parametrize("name", names(*FAST))
def test_rows_are_chosen_with_their_states(name):
    net, ids = model(name), tokens(1, 3, 31)
    cache = RetentionCache.for_model(net, "knorm", budget=14, every=4)
    read(net, cache, ids[:, :30])
    one = copy.deepcopy(cache)
    one.batch_select_indices(torch.tensor([2, 0]))
    one.check_integrity()
    whole = read(net, copy.deepcopy(cache), ids[:, 30:], 30)
    assert torch.allclose(read(net, one, ids[[2, 0], 30:], 30), whole[[2, 0]], atol=1e-5)
    cache.batch_repeat_interleave(2)
    twice = ids[:, 30:].repeat_interleave(2, 0)
    assert torch.allclose(read(net, cache, twice, 30), whole.repeat_interleave(2, 0), atol=1e-5)


@pytest.mark.parametrize("name", names(*FAST))
def test_a_reset_cache_is_a_new_one(name):
    net, ids = model(name), tokens(2, 2, 20)
    used, new = (RetentionCache.for_model(net, "knorm", budget=14, every=4) for _ in range(2))
    read(net, used, tokens(1, 1, 30))
    used.reset()
    assert states(used) == []
    for start, stop in ((0, 18), (18, 19), (19, 20)):
        assert torch.equal(read(net, used, ids[:, start:stop], start), read(net, new, ids[:, start:stop], start))


@pytest.mark.parametrize("name", names(*FAST, without=("jamba",)))
def test_a_replay_leaves_the_states_as_they_were(name):
    net, ids = model(name), tokens(1, 1, 30)
    replayed, plain = (RetentionCache.for_model(net, policy, budget=14) for policy in ("kvzip(chunk=8)", "knorm"))
    assert torch.equal(read(net, replayed, ids), read(net, plain, ids))
    assert all(map(torch.equal, states(replayed), states(plain)))
    assert replayed.layers[1].positions.shape[-1] == 14


@pytest.mark.parametrize("name", names(*FAST, without=("jamba",)))  # Jamba forgets its state in a pass of many tokens
def test_a_replay_scores_as_reading_the_text_and_its_repetition_in_one_pass_does(name):
    net, ids, chunk, first = model(name, "eager"), tokens(1, 1, 24), 8, 2
    scorer = Recording(chunk=chunk, lead=0, first=first, prompt=())
    cache = RetentionCache.for_model(net, Policy(scorer), ratio=0.5)
    read(net, cache, ids)
    for start in range(0, 24, chunk):
        part = slice(start, start + chunk)
        with torch.no_grad():
            found = net(torch.cat([ids, ids[:, part]], 1), output_attentions=True, use_cache=False).attentions
        weights = [w[:, :, 24:].clone() for w in found if w is not None]
        assert len(weights) == len(scorer.seen) == 2
        for scores, asked in zip(scorer.seen, weights, strict=True):
            hidden = torch.ones(24 + chunk, dtype=torch.bool)
            hidden[:first] = hidden[part] = hidden[24:] = False
            asked = asked.masked_fill(hidden, 0.0)
            expected = (asked / asked.sum(-1, keepdim=True))[..., part].amax(2).unflatten(1, (2, -1)).amax(2)
            torch.testing.assert_close(scores[:, :, part], expected, atol=TOLERANCE, rtol=0)


def test_what_a_state_cannot_do_is_refused(tmp_path):
    net = model("qwen3_next")
    cache = RetentionCache.for_model(net, "knorm", budget=14, every=4)
    read(net, cache, tokens(1, 1, 30))
    kept, before = cache.layers[1].positions.clone(), states(cache)
    for work, message in (
        (lambda: cache.crop(-1), "cannot crop: layer 0, a LinearAttentionLayer"),
        (lambda: cache.save(tmp_path / "cache"), "LinearAttentionLayer, whose state cannot be saved"),
        (lambda: CompiledDecoding(net, cache), "cannot decode compiled: it has a LinearAttentionLayer"),
        (lambda: RetentionCache.for_model(net, "kvzip-plus", budget=14), "cannot be told which modules attend"),
        (lambda: RetentionCache.for_model(net, "expected", budget=14), "qwen3_next models: .* rotary positions"),
    ):
        with pytest.raises(ValueError, match=message):
            work()
    assert torch.equal(cache.layers[1].positions, kept) and all(map(torch.equal, states(cache), before))


@pytest.mark.parametrize("name", names("lfm2", "qwen3_next", "jamba", "bamba", "granitemoehybrid", "qwen3_5"))
def test_every_hybrid_passes_the_self_test(name):
    assert support.verify(model(name)) < 1e-3
