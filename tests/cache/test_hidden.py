"""Fast KVzip in the cache: the oracle, the numbers that stay with the entries, and hooks that leave with the cache."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from gates import random_gate
from torch import Tensor

from kvretain import Policy, RetentionCache, artefacts
from kvretain.cache import support
from kvretain.evidence.replay import compressed, record, recording_key
from kvretain.observe.collect import collect, parse_scorer
from kvretain.scores import FastKVzip

from .models import MODELS, cache_argument, forward, left_padded, model, tokens
from .oracle import held, play
from .test_oracle import SCRIPTS, agrees, agrees_in_beams


@pytest.fixture(scope="module", autouse=True)
def _gates(tmp_path_factory):
    """Every tiny model has a random gate in the user's cache folder, as `train-gate` would leave one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRETAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        for name in MODELS:
            random_gate(model(name)).save(artefacts.own_path("gate", model(name)))
        yield


@dataclass(frozen=True)
class Recording(FastKVzip):
    """Fast KVzip that also keeps its views, with copies of the numbers, which are changed in place."""

    views: list = field(default_factory=list, compare=False)

    def score(self, view) -> Tensor:
        self.views.append(replace(view, gate=view.gate.clone()))
        return super().score(view)


@contextmanager
def watched(net) -> Iterator[dict[int, list[Tensor]]]:
    """The output of each layer's input norm, pass by pass: what enters attention, read off another module."""
    seen: dict[int, list[Tensor]] = {}
    handles = [
        layer.input_layernorm.register_forward_hook(
            lambda module, args, output, index=index: seen.setdefault(index, []).append(output.detach())
        )
        for index, layer in enumerate(net.model.layers)
    ]
    yield seen
    for handle in handles:
        handle.remove()


CELLS = [
    *(
        (policy, "llama", situation)
        for policy in ("fastkvzip", "fastkvzip@head", "fastkvzip+hub@shared(floor=0.2)", "fastkvzip+hub@layer")
        for situation in SCRIPTS
    ),
    *(
        (policy, name, situation)
        for name in MODELS
        if name != "llama"
        for policy, situation in (
            ("fastkvzip", "turns left-padded"),
            ("fastkvzip@head", "left-padded ratio"),
            ("fastkvzip@model", "chunked prefill"),
            ("fastkvzip@head(layers='pyramid')", "three turns"),
        )
    ),
]


@pytest.mark.parametrize(("policy", "name", "situation"), CELLS)
def test_cell(policy, name, situation):
    agrees(policy, name, situation)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", ["fastkvzip", "fastkvzip@head"])
def test_beams(policy, attention):
    agrees_in_beams(policy, attention)


@pytest.mark.parametrize("scope", ["head", "layer", "model", "shared", "model-heads"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("situation", ["single", "left-padded", "chunked prefill", "turns left-padded"])
def test_numbers_are_the_gate_s_of_the_tokens_that_stayed(name, scope, situation):
    """After every eviction of a run, each entry's number is what the gate says of its own token's hidden state."""
    net, scorer = model(name), Recording()
    gates = random_gate(net).layers
    options, script = SCRIPTS[situation]
    cache = RetentionCache.for_model(net, Policy(scorer, scope=scope), **options)
    with watched(net) as seen:
        steps = play(net, cache, script, pass_mask="padded" in situation)
    mask = steps[-1].mask
    checked = {layer.index: 0 for layer in cache._retained}
    ranks = {layer.index: layer.rank for layer in cache._retained}
    for view in scorer.views:
        whole = torch.cat(seen[view.layer], 1)  # (B, T, E)
        numbers = gates[ranks[view.layer]](whole)  # (B, H, T)
        for row in range(len(mask)):
            columns = mask[row].nonzero()[:, 0]  # of its positions
            at = columns[view.positions[row].clamp_min(0)]
            real = view.valid[row]
            assert torch.allclose(view.gate[row][real], numbers[row].gather(1, at)[real], atol=1e-5)
            checked[view.layer] += int(real.sum())
    assert min(checked.values()) > 50


def test_two_models_caches_and_policies_do_not_mix():
    """Caches that take turns on one model, one of them without a gate, keep the numbers that they keep alone."""
    net, ids = model("llama"), [tokens(seed, 1, 20) for seed in range(3)]
    policies = ("fastkvzip@head", "knorm", "fastkvzip@model-heads")
    alone = []
    for policy, prompt in zip(policies, ids, strict=True):
        cache = RetentionCache.for_model(net, policy, budget=12, every=3)
        for part in (prompt, *prompt[:, :6].split(1, 1)):
            forward(net, part, cache)
        alone.append(held(cache))
    caches = [RetentionCache.for_model(net, policy, budget=12, every=3) for policy in policies]
    for cache, prompt in zip(caches, ids, strict=True):
        forward(net, prompt, cache)
    for at in range(6):
        for cache, prompt in zip(caches, ids, strict=True):
            forward(net, prompt[:, at : at + 1], cache)
    for cache, expected in zip(caches, alone, strict=True):
        for a, b in zip(held(cache).values(), expected.values(), strict=True):
            assert torch.equal(a, b)
    assert all(layer._attention is None for layer in caches[1].layers)


def test_threads_do_not_mix():
    net = model("llama")
    prompts = [tokens(seed, 1, 24) for seed in range(4)]
    expected = []
    for prompt in prompts:
        cache = RetentionCache.for_model(net, "fastkvzip", budget=10)
        forward(net, prompt, cache)
        expected.append(held(cache))
    found: dict[int, dict] = {}

    def run(at: int) -> None:
        for _ in range(3):
            cache = RetentionCache.for_model(net, "fastkvzip", budget=10)
            forward(net, prompts[at], cache)
            found[at] = held(cache)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, cells in enumerate(expected):
        assert all(torch.equal(found[at][layer], cells[layer]) for layer in cells)


def hooks(net) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in net.modules())


def test_hooks_leave_with_the_last_cache_that_needs_them():
    net = model("llama")
    gc.collect()
    assert hooks(net) == 0
    plain = RetentionCache.for_model(net, "knorm", budget=8)
    assert hooks(net) == 2
    first = RetentionCache.for_model(net, "fastkvzip@head", budget=8)
    second = copy.deepcopy(first)
    assert hooks(net) == 4  # one on each of two attention modules
    assert net.config._attn_implementation == "sdpa"  # heads of equal length need no other attention
    del first
    gc.collect()
    assert hooks(net) == 4
    forward(net, tokens(0, 1, 20), second)
    del second
    gc.collect()
    assert hooks(net) == 2
    forward(net, tokens(0, 1, 20), plain)
    del plain
    gc.collect()
    assert hooks(net) == 0


def test_copies_rows_crop_and_reset():
    net = model("llama")
    for policy in ("fastkvzip@head", "fastkvzip@model-heads"):
        cache = RetentionCache.for_model(net, policy, budget=12, every=4)
        forward(net, tokens(0, 3, 20), cache)
        twin = copy.deepcopy(cache)
        assert twin.layers[0].gate is cache.layers[0].gate
        following = tokens(1, 3, 2)
        for part in following.split(1, 1):
            forward(net, part, cache)
        cache.crop(-2)
        for part in following.split(1, 1):
            assert torch.allclose(forward(net, part, cache), forward(net, part, twin), atol=1e-5)
        for a, b in zip(cache.layers, twin.layers, strict=True):
            assert torch.equal(a._numbers(), b._numbers())
        rows = torch.tensor([2, 0])
        twin.batch_select_indices(rows)
        twin.batch_repeat_interleave(2)
        for part in tokens(2, 3, 8)[rows.repeat_interleave(2)].split(1, 1):
            forward(net, part, twin)
        for part in tokens(2, 3, 8).split(1, 1):
            forward(net, part, cache)
        assert cache.trace.evictions >= 2
        for a, b in zip(held(cache).values(), held(twin).values(), strict=True):
            for x, y in zip(a[rows.repeat_interleave(2)].flatten(0, 1), b.flatten(0, 1), strict=True):
                assert torch.equal(x[x >= 0], y[y >= 0])
        cache.reset()
        fresh = RetentionCache.for_model(net, policy, budget=12, every=4)
        for one in (cache, fresh):
            forward(net, tokens(0, 3, 20), one)
        assert all(torch.equal(a, b) for a, b in zip(held(cache).values(), held(fresh).values(), strict=True))


def test_a_recording_serves_other_policies(tmp_path):
    net, ids = model("llama"), tokens(8, 1, 30)
    ready = RetentionCache.for_model(net, "fastkvzip", ratio=0)
    forward(net, ids, ready)
    for policy in ("fastkvzip@model-heads", "fastkvzip+hub@layer", "knorm@shared"):
        twin, direct = copy.deepcopy(ready), RetentionCache.for_model(net, policy, budget=10)
        twin.compress(policy, budget=10)
        forward(net, ids, direct)
        for a, b in zip(held(twin).values(), held(direct).values(), strict=True):
            for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True):
                assert torch.equal(x[x >= 0], y[y >= 0])
        forward(net, ids[:, :1], twin)  # the numbers went with the entries, whoever evicted
        for layer in twin.layers:
            assert layer._numbers().shape == layer.positions.shape
    other = str(random_gate(net, seed=9).save(tmp_path / "g.safetensors"))
    with pytest.raises(ValueError, match="needs another gate than that of the policy"):
        copy.deepcopy(ready).compress(f"fastkvzip(gate={other!r})", budget=10)
    plain = RetentionCache.for_model(net, "knorm", ratio=0)
    forward(net, ids, plain)
    with pytest.raises(ValueError, match="needs the hidden states of earlier passes"):
        plain.compress("fastkvzip@head", budget=10)


def test_an_evaluation_shares_one_recording_per_gate():
    net, ids = model("llama"), tokens(8, 30).tolist()
    policies = [
        Policy.parse(text) for text in ("fastkvzip@head", "fastkvzip+hub@layer", "knorm", "fastkvzip(gate='x')")
    ]
    keys = [recording_key(policy) for policy in policies]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    recorded = record(net, ids, policies[:2])
    for policy in policies[:2]:
        direct = RetentionCache.for_model(net, policy, ratio=0.6)
        forward(net, torch.tensor([ids]), direct)
        found = held(compressed(recorded, policy, 0.6))
        assert all(torch.equal(a, b) for a, b in zip(found.values(), held(direct).values(), strict=True))


def test_half_precision_models_keep_float32_numbers():
    net = model("llama", dtype=torch.bfloat16)
    scorer = Recording()
    forward(net, tokens(0, 1, 30), RetentionCache.for_model(net, Policy(scorer), budget=10))
    assert all(view.gate.dtype == torch.float32 for view in scorer.views)


def test_embeddings_do():
    net = model("llama")
    ids, caches = tokens(0, 1, 30), [RetentionCache.for_model(net, "fastkvzip", budget=10) for _ in range(2)]
    forward(net, ids, caches[0])
    with torch.no_grad():
        net(inputs_embeds=net.get_input_embeddings()(ids), **{cache_argument(net): caches[1]})
    for a, b in zip(held(caches[0]).values(), held(caches[1]).values(), strict=True):
        assert torch.equal(a, b)


def test_the_window_is_two_percent_and_never_nothing():
    for seen, recent in ((10, 1), (49, 1), (150, 3), (15999, 319), (16000, 4096)):
        assert FastKVzip().local(seen) == recent
    net = model("llama")
    cache = RetentionCache.for_model(net, "fastkvzip(share=0.1)@head", budget=40)
    forward(net, tokens(0, 1, 100), cache)
    for layer in cache.layers:
        assert bool((layer.positions[..., -10:] == torch.arange(90, 100)).all())
        assert bool((layer.positions[..., :4] == torch.arange(4)).all())
    short = RetentionCache.for_model(net, "fastkvzip@head", budget=10)
    forward(net, tokens(0, 1, 30), short)
    assert all(bool((layer.positions[..., -1] == 29).all()) for layer in short.layers)
    assert any(int((layer.positions[..., 4:-1].diff(dim=-1) != 1).sum()) for layer in short.layers)


def test_a_row_in_a_batch_has_its_own_window():
    net = model("llama")
    rows = [tokens(1, 100), tokens(2, 40)]
    cache = RetentionCache.for_model(net, "fastkvzip(share=0.2)@head", ratio=0.5)
    forward(net, left_padded(rows)[0], cache, mask=left_padded(rows)[1])
    for row, ids in enumerate(rows):
        alone = RetentionCache.for_model(net, "fastkvzip(share=0.2)@head", ratio=0.5)
        forward(net, ids[None], alone)
        for a, b in zip(held(cache).values(), held(alone).values(), strict=True):
            assert torch.equal(a[row][a[row] >= 0], b[0].flatten())


def test_observe_sees_what_scorers_collect_by_their_own_fields():
    net, ids = model("llama"), tokens(0, 1, 150)
    scorer = Recording()
    forward(net, ids, RetentionCache.for_model(net, Policy(scorer), ratio=0.5))
    observed = collect(net, ids, {name: parse_scorer(name) for name in ("snapkv", "fastkvzip", "expected")})
    for view, scores in zip(scorer.views, observed.scores["fastkvzip"], strict=True):
        assert torch.allclose(view.gate[0, :, 4:-8], scores)
    assert collect(net, ids, {"kvzip": parse_scorer("kvzip")}).scores["kvzip"].amax() <= 1


def test_observe_refuses_scorers_that_collect_different_things(tmp_path):
    net, ids = model("llama"), tokens(0, 1, 150)
    other = str(random_gate(net, seed=9).save(tmp_path / "g.safetensors"))
    pair = {"own": FastKVzip(), "other": FastKVzip(gate=other)}
    with pytest.raises(ValueError, match="observed together must agree on 'gate'"):
        collect(net, ids, pair)
    with pytest.raises(ValueError, match="attention and hidden: an entry carries one number"):
        collect(net, ids, {"own": FastKVzip(), "h2o": parse_scorer("h2o")})


def test_a_model_whose_attention_cannot_be_told_is_refused_by_name(monkeypatch):
    net = model("llama")
    monkeypatch.setattr(net.model.layers[1].self_attn, "layer_idx", 0)
    with pytest.raises(ValueError, match="llama models: this policy's scorer needs the hidden states"):
        RetentionCache.for_model(net, "fastkvzip", budget=8)
    assert hooks(net) == 0


def test_a_layer_that_shows_no_hidden_states_is_an_error(monkeypatch):
    net = model("llama")
    cache = RetentionCache.for_model(net, "fastkvzip", budget=8)
    monkeypatch.setattr(cache, "enter_attention", lambda index, hidden: None)
    with pytest.raises(ValueError, match="the gate of layer 0 gave None scores"):
        forward(net, tokens(0, 1, 9), cache)


def test_a_scorer_cannot_ask_for_two_numbers():
    @dataclass(frozen=True)
    class Both(FastKVzip):
        needs = frozenset({"hidden", "attention"})

    with pytest.raises(ValueError, match="attention and hidden: an entry carries one number"):
        Policy(Both())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"gate": 3}, "path of a file"),
        ({"share": -0.1}, "from 0 to 1"),
        ({"share": True}, "from 0 to 1"),
        ({"window_size": 0}, "window_size"),
        ({"long": 0}, "long"),
    ],
)
def test_bad_fields(fields, words):
    with pytest.raises(ValueError, match=words):
        FastKVzip(**fields)


def test_attention_modules_are_found_in_every_verified_family():
    for name in MODELS:
        found = support.attentions_of(model(name).model)
        assert sorted(found) == list(range(model(name).config.num_hidden_layers))
