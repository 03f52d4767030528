"""KVzip's replay: its scores against attention weights read from the model itself, the oracle, and nothing left
behind."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kvretain import Policy, RetentionCache
from kvretain.scores import KVzip

from .models import MODELS, forward, left_padded, model, tokens
from .oracle import held
from .test_oracle import SCRIPTS, agrees


@dataclass(frozen=True)
class Recording(KVzip):
    """KVzip that also keeps what each layer's view showed."""

    seen: list = field(default_factory=list, compare=False)

    def score(self, view) -> Tensor:
        scores = super().score(view)
        self.seen.append(scores.clone())
        return scores


def recorded(net, ids: Tensor, mask: Tensor | None = None, **fields) -> list[Tensor]:
    scorer = Recording(**fields)
    cache = RetentionCache.for_model(net, Policy(scorer), ratio=0.5)
    forward(net, ids, cache, mask=mask)
    return scorer.seen


def reference(net, ids: Tensor, chunk: int, lead: int, first: int) -> list[Tensor]:
    """Per layer (1, H, N): from the weights that eager attention returns, renormalised over what the score sees."""
    size = ids.shape[1]
    scores = None
    for start in range(0, size, chunk):
        stop, begin = min(start + chunk, size), max(start - lead, 0)
        fed = torch.cat([ids, ids[:, begin:stop]], 1)
        with torch.no_grad():
            weights = net(fed, output_attentions=True, use_cache=False).attentions
        scores = scores or [torch.zeros(1, 2, size) for _ in weights]
        visible = torch.zeros(fed.shape[1], dtype=torch.bool)
        visible[:first] = visible[start:stop] = visible[size:] = True
        for layer, layer_weights in enumerate(weights):
            asked = layer_weights[:, :, size + start - begin :].float() * visible
            asked = asked / asked.sum(-1, keepdim=True)
            best = asked[..., start:stop].amax(2).unflatten(1, (2, -1)).amax(2)  # over queries, then the group
            scores[layer][:, :, start:stop] = best
    return scores


@pytest.mark.parametrize(("chunk", "lead", "first"), [(2000, 8, 4), (9, 3, 4), (10, 0, 0), (7, 20, 2)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_scores_are_the_model_s_own_weights(name, chunk, lead, first):
    ids = tokens(3, 1, 30)
    got = recorded(model(name), ids, chunk=chunk, lead=lead, first=first)
    for a, b in zip(got, reference(model(name, attention="eager"), ids, chunk, lead, first), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_padded_row_scores_as_alone():
    net = model("llama")
    rows = [tokens(1, 30), tokens(2, 19)]
    together = recorded(net, *left_padded(rows), chunk=11, lead=4)
    for row, ids in enumerate(rows):
        alone = recorded(net, ids[None], chunk=100)
        if row == 0:
            alone = recorded(net, ids[None], chunk=11, lead=4)
            for a, b in zip(together, alone, strict=True):
                assert torch.allclose(a[row, :, -len(ids) :], b[0], atol=1e-5)
    whole = recorded(net, *left_padded(rows), chunk=100)
    for row, ids in enumerate(rows):
        for a, b in zip(whole, recorded(net, ids[None], chunk=100), strict=True):
            assert torch.allclose(a[row, :, -len(ids) :], b[0], atol=1e-5)
            assert bool((a[row, :, : 30 - len(ids)] == 0).all())


CELLS = [
    *((policy, "llama", s) for policy in ("kvzip@head", "hubkv", "kvzip(chunk=7,lead=2)@shared") for s in SCRIPTS),
    *((policy, name, "turns left-padded") for policy in ("kvzip@model", "hubkv") for name in MODELS if name != "llama"),
]


@pytest.mark.parametrize(("policy", "name", "situation"), CELLS)
def test_cell(policy, name, situation):
    """The oracle: whatever the replay scored, decoding goes on as if it had never happened."""
    cache, _ = agrees(policy, name, situation)
    assert cache._unscored.ids == [] or sum(part.shape[1] for part in cache._unscored.ids) < 40


def test_a_crop_is_forgotten_by_the_replay():
    net = model("llama")
    ids = tokens(4, 1, 20)
    one, two = (RetentionCache.for_model(net, "kvzip", budget=15) for _ in range(2))
    forward(net, ids[:, :10], one)
    forward(net, tokens(9, 1, 3), one)
    one.crop(-3)
    forward(net, ids[:, :10], two)
    for cache in (one, two):
        forward(net, ids[:, 10:], cache)
    assert all(torch.equal(a, b) for a, b in zip(held(one).values(), held(two).values(), strict=True))


def test_memory_after_a_decode_eviction_is_what_is_kept():
    net = model("llama")
    cache = RetentionCache.for_model(net, "kvzip@head", budget=12, every=4)
    forward(net, tokens(0, 1, 12), cache)
    for i in range(4):
        forward(net, tokens(i, 1, 1), cache)
    assert cache.trace.evictions == 1
    assert cache.nbytes == sum(2 * layer.keys.numel() * 4 for layer in cache.layers)


def test_compress_replays_first():
    net = model("llama")
    ids = tokens(8, 1, 30)
    ready = RetentionCache.for_model(net, "kvzip", ratio=0)
    forward(net, ids, ready)
    for policy in ("kvzip@model-heads", "kvzip+hub@layer"):
        twin = copy.deepcopy(ready)
        twin.compress(policy, budget=10)
        direct = RetentionCache.for_model(net, policy, budget=10)
        forward(net, ids, direct)
        for a, b in zip(held(twin).values(), held(direct).values(), strict=True):
            for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True):
                assert torch.equal(x[x >= 0], y[y >= 0])


def test_embeddings_cannot_be_repeated():
    net = model("llama")
    cache = RetentionCache.for_model(net, "kvzip", budget=8)
    with torch.no_grad(), pytest.raises(ValueError, match="needs input_ids, not inputs_embeds"):
        net(inputs_embeds=torch.randn(1, 20, 32), past_key_values=cache)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"chunk": 0}, "chunk"), ({"lead": -1}, "lead"), ({"first": 1.5}, "first"), ({"prompt": ("a",)}, "token ids")],
)
def test_bad_fields(fields, words):
    with pytest.raises(ValueError, match=words):
        KVzip(**fields)


def test_a_refused_pass_leaves_nothing_to_repeat():
    net = model("llama")
    ids = tokens(4, 1, 20)
    cache = RetentionCache.for_model(net, "kvzip", budget=15)
    with pytest.raises(ValueError, match="attention_mask has the shape"):
        forward(net, ids, cache, mask=torch.ones(1, 25, dtype=torch.long))
    forward(net, ids, cache)
    direct = RetentionCache.for_model(net, "kvzip", budget=15)
    forward(net, ids, direct)
    assert all(torch.equal(a, b) for a, b in zip(held(cache).values(), held(direct).values(), strict=True))
