"""The hooks on a model: copies of it, switched attention, and generation that leaves the cache out."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from transformers import LlamaForCausalLM

from kvretain import RetentionCache

from .models import build, cache_argument, forward, tokens


def kept(net, policy: str) -> list[torch.Tensor]:
    cache = RetentionCache.for_model(net, policy, budget=12)
    for seed in range(2):
        forward(net, tokens(seed, 1, 20), cache)
    cache.check_integrity()
    return [layer.positions for layer in cache.layers]


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize(("first", "second"), [
    ("snapkv", "snapkv"), ("knorm", "knorm"), ("knorm", "snapkv"), ("snapkv", "knorm"), ("adakv", "adakv"),
    ("kvzip@head", "kvzip-plus"),
])  # fmt: skip
def test_a_copy_of_a_model_in_use_is_a_model_of_its_own(duplicate, first, second):
    net = build("llama")
    expected = kept(build("llama"), second)
    live = RetentionCache.for_model(net, first, budget=12)
    forward(net, tokens(0, 1, 20), live)
    other = duplicate(net)
    assert all(torch.equal(a, b) for a, b in zip(kept(other, second), expected, strict=True))
    ids = tokens(3, 1, 9)
    assert torch.equal(other(ids).logits, build("llama")(ids).logits)
    assert torch.equal(forward(net, tokens(1, 1, 20), live), forward(other, tokens(1, 1, 20), follow(other, first)))


def follow(net, policy: str) -> RetentionCache:
    cache = RetentionCache.for_model(net, policy, budget=12)
    forward(net, tokens(0, 1, 20), cache)
    return cache


def test_a_copy_gets_its_own_attention_back():
    net = build("llama")
    live = RetentionCache.for_model(net, "snapkv", budget=12)
    other = copy.deepcopy(net)
    cache = RetentionCache.for_model(other, "snapkv", budget=12)
    assert other.config._attn_implementation == "kvretain_sdpa"
    del cache
    gc.collect()
    assert other.config._attn_implementation == "sdpa" and net.config._attn_implementation == "kvretain_sdpa"
    del live
    gc.collect()
    assert net.config._attn_implementation == "sdpa"


def test_models_of_one_configuration_object_do_not_untap_each_other():
    config = build("llama").config
    first, second = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    caches = [RetentionCache.for_model(net, "snapkv", budget=12) for net in (first, second)]
    for net, cache in zip((first, second), caches, strict=True):
        forward(net, tokens(0, 1, 20), cache)
    caches.pop()
    gc.collect()
    forward(first, tokens(1, 1, 20), caches[0])
    caches.clear()
    del cache
    gc.collect()
    assert config._attn_implementation == "sdpa"


def test_a_pickled_model_runs_in_another_process(tmp_path):
    net = build("llama")
    live = RetentionCache.for_model(net, "snapkv", budget=12)
    forward(net, tokens(0, 1, 20), live)
    torch.save(net, tmp_path / "net.pt")
    script = (
        "import sys, torch; net = torch.load(sys.argv[1], weights_only=False); "
        "torch.save(net(torch.arange(1, 9)[None]).logits, sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "net.pt", tmp_path / "logits.pt"], check=True)
    expected = build("llama")(torch.arange(1, 9)[None]).logits
    assert torch.allclose(torch.load(tmp_path / "logits.pt"), expected, atol=1e-5)


def test_attention_switched_under_a_cache_that_observes_it():
    net = build("llama")
    cache = RetentionCache.for_model(net, "snapkv", budget=12)
    forward(net, tokens(0, 1, 20), cache)
    net.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"changed to eager after this cache was made.*'snapkv'"):
        forward(net, tokens(1, 1, 5), cache)
    forward(net, tokens(0, 1, 20), RetentionCache.for_model(net, "snapkv", budget=12))


def test_a_model_that_drops_the_cache_in_generate_is_reported():
    """Phi-3 leaves any cache out when a text passes the length for which it was trained first."""
    net = build("phi3", original_max_position_embeddings=32)
    ids = tokens(0, 1, 40)
    cache = RetentionCache.for_model(net, "streaming", budget=16)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.warns(UserWarning, match=r"40 tokens ran without the RetentionCache.*passes 32 tokens"):
        net.generate(ids, attention_mask=torch.ones_like(ids), **{cache_argument(net): cache}, **options)
    assert cache.get_seq_length() == 0
    fresh = RetentionCache.for_model(net, "streaming", budget=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        forward(net, ids, fresh)
        more = torch.cat([ids, tokens(1, 1, 1)], 1)
        net.generate(more, attention_mask=torch.ones_like(more), **{cache_argument(net): fresh}, **options)
    assert fresh.get_seq_length() == 43 and fresh.layers[0].kept < 20
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other = build("phi3", original_max_position_embeddings=32)
        held = RetentionCache.for_model(other, "streaming", budget=16)
        other(ids[:, :20])  # a short pass without a cache says nothing,
        other(ids, use_cache=False)  # nor does one that wants none
    assert held.get_seq_length() == 0
