"""KVzip's replay: its scores against attention weights read from the model itself, the oracle, and nothing left
behind."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass, field

import pytest
import torch
import transformers
from torch import Tensor

from kvretain import Policy, RetentionCache
from kvretain.scores import KVzip

from .models import MODELS, build, forward, left_padded, model, tokens
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


def reference(net, ids: Tensor, chunk: int, lead: int, first: int, normalise: bool = False) -> list[Tensor]:
    """Per layer (1, H, N): from the weights that eager attention returns, renormalised over what the score sees.

    For KVzip+, hidden states are taken at the attention modules, and each head's value alone goes through the model's
    own output projection.
    """
    size = ids.shape[1]
    scores = None
    entering: dict[int, Tensor] = {}

    def enter(module, args, kwargs):
        entering[module.layer_idx] = kwargs["hidden_states"]

    hooks = [layer.self_attn.register_forward_pre_hook(enter, with_kwargs=True) for layer in net.model.layers]
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
            asked = asked[..., start:stop]
            if normalise:
                attention, hidden = net.model.layers[layer].self_attn, entering[layer]
                asked = asked / hidden[:, size + start - begin :].norm(dim=-1)[:, None, :, None]
                asked = asked * projected(attention, hidden[:, start:stop])[:, :, None]
            best = asked.amax(2).unflatten(1, (2, -1)).amax(2)  # over queries, then the group
            scores[layer][:, :, start:stop] = best
    for hook in hooks:
        hook.remove()
    return scores


@torch.no_grad()
def projected(attention, hidden: Tensor) -> Tensor:
    """Lengths (1, Hq, n) of what the output projection makes of each query head's value of ``hidden (1, n, E)``."""
    values = attention.v_proj(hidden).unflatten(-1, (2, -1))  # (1, n, H, D)
    lengths = []
    for query_head in range(4):
        alone = torch.zeros(*hidden.shape[:2], 4, values.shape[-1])
        alone[:, :, query_head] = values[:, :, query_head // 2]
        lengths.append(attention.o_proj(alone.flatten(2)).norm(dim=-1))
    return torch.stack(lengths, 1)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("chunk", "lead", "first"), [(2000, 8, 4), (9, 3, 4), (10, 0, 0), (7, 20, 2)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_scores_are_the_model_s_own_weights(name, chunk, lead, first, normalise):
    ids = tokens(3, 1, 30)
    got = recorded(model(name), ids, chunk=chunk, lead=lead, first=first, normalise=normalise)
    expected = reference(model(name, attention="eager"), ids, chunk, lead, first, normalise)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
        assert bool((b > 0).all())


def test_kvzip_plus_ranks_otherwise():
    ids = tokens(3, 1, 30)
    plain, plus = (recorded(model("llama"), ids, normalise=flag) for flag in (False, True))
    assert all(not torch.equal(a.argsort(-1), b.argsort(-1)) for a, b in zip(plain, plus, strict=True))


def test_kvzip_plus_in_a_later_chunk_of_the_prompt():
    """Entries that are scored already keep their number; those that came since are scored against their own chunk."""
    net, ids = model("llama"), tokens(5, 1, 24)
    scorer = Recording(normalise=True)
    cache = RetentionCache.for_model(net, Policy(scorer), budget=20)
    forward(net, ids, cache)
    forward(net, tokens(6, 1, 4), cache)
    first, second = scorer.seen[: len(scorer.seen) // 2], scorer.seen[len(scorer.seen) // 2 :]
    for before, after in zip(first, second, strict=True):
        kept = before.topk(20, -1).values.amin(-1)  # 4 sinks are kept whatever their number
        assert bool((after[..., 4:20] >= kept[..., None] - 1e-6).all()) and bool((after[..., 20:] > 0).all())


@pytest.mark.parametrize("policy", ["kvzip-plus", "kvzip(normalise=True,chunk=7,lead=2)@shared"])
@pytest.mark.parametrize("situation", ["turns left-padded", "chunked prefill"])
def test_kvzip_plus_under_the_oracle(policy, situation):
    agrees(policy, "llama", situation)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_kvzip_plus_on_other_models(name):
    agrees("kvzip-plus", name, "turns left-padded")


def test_kvzip_plus_in_a_padded_row_scores_as_alone():
    net = model("llama")
    rows = [tokens(1, 30), tokens(2, 19)]
    together = recorded(net, *left_padded(rows), normalise=True)
    for row, ids in enumerate(rows):
        for a, b in zip(together, recorded(net, ids[None], normalise=True), strict=True):
            assert torch.allclose(a[row, :, -len(ids) :], b[0], atol=1e-5)
            assert bool((a[row, :, : 30 - len(ids)] == 0).all())


def test_kvzip_plus_leaves_no_hook_behind():
    net = build("llama")
    modules = [layer.self_attn for layer in net.model.layers]
    cache = RetentionCache.for_model(net, "kvzip-plus", budget=8)
    forward(net, tokens(0, 1, 20), cache)
    assert all(module._forward_pre_hooks for module in modules)
    del cache
    gc.collect()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)


def test_a_model_without_a_plain_output_projection_is_refused_by_name():
    """GPT-2 keeps it in a transposed layer of its own kind; a quantised layer has no plain weights."""
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2)).eval()
    with pytest.raises(ValueError, match=r"gpt2 models: .* output projection .* layer 0 has none of the names o_proj"):
        RetentionCache.for_model(net, "kvzip-plus", budget=8)
    RetentionCache.for_model(net, "kvzip", budget=8)
    net = build("llama")
    weight = torch.zeros(32, 32, dtype=torch.int8)
    net.model.layers[1].self_attn.o_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(ValueError, match=r"llama models: .* layer 1 has none"):
        RetentionCache.for_model(net, "kvzip-plus", budget=8)


def test_compress_with_another_replay_is_refused():
    net = model("llama")
    cache = RetentionCache.for_model(net, "kvzip", ratio=0)
    forward(net, tokens(8, 1, 30), cache)
    with pytest.raises(ValueError, match=r"needs the norms of earlier passes"):
        cache.compress("kvzip-plus", budget=10)
    with pytest.raises(ValueError, match=r"'kvzip\(chunk=7\)' replays otherwise"):
        cache.compress("kvzip(chunk=7)", budget=10)
    other = RetentionCache.for_model(net, "kvzip(normalise=True)", ratio=0)
    forward(net, tokens(8, 1, 30), other)
    with pytest.raises(ValueError, match=r"replays otherwise: make the cache with 'kvzip.*' and ratio=0"):
        other.compress("kvzip@head", budget=10)
    other.compress("kvzip(normalise=True)@layer", budget=10)
    assert other.layers[0].kept == 10


def test_tokens_that_the_model_does_not_know_are_refused_before_it_runs():
    net = model("llama")
    known = net.config.vocab_size
    with pytest.raises(ValueError, match=rf"repeats the token {known}, but this llama model knows .* 0 to {known - 1}"):
        RetentionCache.for_model(net, f"kvzip(prompt=({known},))", budget=8)
    RetentionCache.for_model(net, f"kvzip(prompt=({known - 1},))", budget=8)


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
    [
        ({"chunk": 0}, "chunk"),
        ({"lead": -1}, "lead"),
        ({"first": 1.5}, "first"),
        ({"prompt": ("a",)}, "token ids"),
        ({"normalise": 1}, "normalise must be True or False, not 1"),
    ],
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
