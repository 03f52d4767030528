"""The edit for LMCache's token dropping, on the SDK's documented tensors, against a model of transformers."""

from __future__ import annotations

import enum

import pytest
import torch
from cache.models import cache_argument, distinct, forward, model
from transformers import DynamicCache

from kvretain import retain
from kvretain.cache import support
from kvretain.integrations.lmcache import dropper
from kvretain.rope import Rope

ROPE = Rope.plain(1e4 ** (-torch.arange(0, 8, 2) / 8))


class Kind(enum.Enum):
    """As ``lmcache.sdk.LMCacheSDKCacheKind``."""

    KV = "kv"
    QUERY = "query"


def flat(states: torch.Tensor) -> torch.Tensor:
    """``(L, H, T, D)`` as the SDK has it, ``(L, T, H * D)``."""
    return states.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_engine_goes_on_as_the_model_would_from_the_kept_tokens(name) -> None:
    """What the edit stores, used as an engine does: keys at positions 0 to K-1, the next token at K."""
    net, ids = model(name), distinct(2, 49)[None]
    plain = DynamicCache(config=net.config)
    forward(net, ids[:, :48], plain)
    size = plain.layers[0].keys.shape[3]
    rope = support.rope_of(net.get_decoder(), 0)
    kv = torch.stack([flat(torch.cat([getattr(layer, part) for layer in plain.layers])) for part in ("keys", "values")])
    edit = dropper("keydiff+hub@model", head_size=size, rope=rope, ratio=0.4, chunk=8)
    edited, tokens = edit({Kind.KV: kv}, ids[0, :48].tolist())
    assert edited.shape == (2, kv.shape[1], 32, kv.shape[3])  # 29 stay, rounded up to whole chunks
    layers = [(layer.keys, layer.values) for layer in plain.layers]
    chosen = retain(*map(list, zip(*layers, strict=True)), policy="keydiff+hub@model", budget=32)[0][0, 0]
    assert tokens == ids[0, chosen].tolist()
    # The engine's cache, filled from what was stored.
    cache = DynamicCache(config=net.config)
    for at, (keys, values) in enumerate(zip(*edited, strict=True)):
        cache.update(*(part.unflatten(-1, (-1, size)).transpose(0, 1)[None] for part in (keys, values)), at)
    got = forward(net, ids[:, 48:], cache, positions=torch.tensor([[32]]))
    # Keys that were rotated at their new positions in the first place: the same rotation undone and done by hand.
    expected = DynamicCache(config=net.config)
    for at, (keys, values) in enumerate(layers):
        stay = keys[:, :, chosen]
        cos, sin = rope.cos_sin(chosen[None])
        raw = rope.unrotate(stay.double(), cos.double(), sin.double())
        cos, sin = rope.cos_sin(torch.arange(32)[None])
        expected.update(rope.rotate(raw, cos.double(), sin.double()).float(), values[:, :, chosen], at)
    wanted = net(
        input_ids=ids[:, 48:], position_ids=torch.tensor([[32]]), **{cache_argument(net): expected}
    ).logits.detach()
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_dropping_the_end_alone_is_a_shorter_prompt() -> None:
    """Kept tokens that stand at their own positions need no new rotation: bit for bit the entries of that prompt."""
    kv = torch.randn(2, 3, 32, 2 * 8, generator=torch.Generator().manual_seed(0))
    edit = dropper("knorm@model", head_size=8, rope=ROPE, budget=16, chunk=8, sinks=16, recent=0)
    edited, tokens = edit({"kv": kv}, list(range(100, 132)))
    assert tokens == list(range(100, 116))
    assert torch.equal(edited[1], kv[1, :, :16])
    torch.testing.assert_close(edited[0], kv[0, :, :16], atol=1e-6, rtol=1e-5)


def test_queries_come_from_their_own_context() -> None:
    generator = torch.Generator().manual_seed(1)
    kv, queries = (torch.randn(n, 3, 32, heads * 8, generator=generator) for n, heads in ((2, 2), (1, 4)))
    edit = dropper("snapkv(window=4)@model", head_size=8, rope=ROPE, budget=16, chunk=8)
    with pytest.raises(ValueError, match=r"needs queries: .*qcache.connect"):
        edit({Kind.KV: kv}, range(32))
    _, tokens = edit({Kind.KV: kv, Kind.QUERY: queries}, range(32))
    by_head = [[layer.unflatten(-1, (-1, 8)).transpose(0, 1)[None] for layer in part] for part in (*kv, queries[0])]
    last = [layer[:, :, -4:] for layer in by_head[2]]
    chosen = retain(by_head[0], by_head[1], policy="snapkv(window=4)@model", budget=16, queries=last)[0]
    assert tokens == chosen[0, 0].tolist()
    assert edit({Kind.KV: kv, Kind.QUERY: queries.flip(2)}, range(32))[1] != tokens


def test_what_fits_comes_back_as_it_is() -> None:
    kv = torch.randn(2, 3, 16, 16)
    for limit in ({"budget": 16}, {"budget": 24}, {"ratio": 0.2}):
        edited, tokens = dropper("knorm@model", head_size=8, rope=ROPE, chunk=8, **limit)({"kv": kv}, range(16))
        assert edited is kv and tokens == list(range(16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "knorm"}, "scope @model"),
        ({"policy": "hubkv"}, "scope @model"),
        ({"budget": 20}, r"whole chunks of 8 tokens, so a budget of 20 cannot be kept: 16 can"),
        ({"budget": 3}, r"budget of 3 cannot be kept: 8 can"),
        ({"ratio": 0.5}, "either budget"),
        ({"budget": None}, "either budget"),
    ],
)
def test_bad_settings(change, words) -> None:
    given = {"policy": "knorm@model", "head_size": 8, "rope": ROPE, "budget": 16, "chunk": 8} | change
    with pytest.raises(ValueError, match=words):
        dropper(given.pop("policy"), **given)


@pytest.mark.parametrize(
    "tensor", [None, torch.zeros(1, 3, 32, 16), torch.zeros(2, 3, 31, 16), torch.zeros(2, 3, 32, 12)]
)
def test_bad_tensors(tensor) -> None:
    edit = dropper("knorm@model", head_size=8, rope=ROPE, budget=16, chunk=8)
    with pytest.raises(ValueError, match=r"kv tensor must be \[2, layers, 32 tokens, heads \* 8\]"):
        edit({} if tensor is None else {"kv": tensor}, range(32))
