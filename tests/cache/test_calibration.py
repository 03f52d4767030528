"""Calibrated policies in a cache: what is measured is what enters the rotation, on every type that is said to be
tested; the oracle; nothing observed; recordings of other policies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvretain import Policy, RetentionCache, artefacts
from kvretain.cache import support
from kvretain.calibrate import calibrate, calibration_for
from kvretain.evidence.replay import compressed, record, recording_key
from kvretain.scores.trig import Trig

from .models import MODELS, build, forward, left_padded, model, tokens
from .oracle import held
from .test_oracle import SCRIPTS, agrees


@pytest.fixture(autouse=True, scope="module")
def calibrations(tmp_path_factory):
    """One for every tiny model, where policies look by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRETAIN_CACHE", str(tmp_path_factory.mktemp("calibrations")))
        for name in MODELS:
            net = model(name)
            calibrate(net, tokens(77, 200)).save(artefacts.own_path("calibration", net))
        yield


# What is measured

BEFORE_ROPE = ("q_norm", "q_layernorm", "query_layernorm", "q_proj", "qkv_proj", "query_key_value")
"""Modules of an attention whose output enters the rotation, the last one first."""

PARTIAL = {"glm4_moe", "gpt_neox", "minimax_m2", "nemotron", "persimmon", "phi", "stablelm"}
"""Types that rotate a part of the head by default, or here."""

EXTRA = {
    "minimax_m2": {"head_dim": 16, "rotary_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                                    "partial_rotary_factor": 0.5}},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "stablelm": {"qk_layernorm": True},
    "glm4_moe": {"use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def tiny(kind: str):
    """A model of that type, its projections and norms far from trivial."""
    config = CONFIG_MAPPING[kind](
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        **EXTRA.get(kind, {}),
    )
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * 2
    torch.manual_seed(1)
    net = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif any(part in name for part in BEFORE_ROPE[:3]):
                parameter.copy_(torch.linspace(1, 2, len(parameter)))
    return net


def queries_before_rope(net, ids: Tensor) -> dict[int, Tensor]:
    """Per layer ``(Hq, n, D)`` float64, by plain hooks on the modules whose output the model rotates."""
    found: dict[int, Tensor] = {}
    hooks, count = [], len(ids)
    heads = net.config.num_attention_heads
    for index, layer in enumerate(net.get_decoder().layers):
        attention: nn.Module = getattr(layer, "self_attn", None) or layer.attention
        name = next(name for name in BEFORE_ROPE if getattr(attention, name, None) is not None)
        size = getattr(attention, "head_dim", None) or attention.head_size

        def keep(module, args, output, index=index, name=name, size=size):
            output = output.detach().double()
            if name == "query_key_value":  # per head: query, key, value
                output = output.unflatten(2, (heads, -1))[..., :size]
            elif output.ndim == 3:
                output = output.unflatten(2, (-1, size))  # of a fused projection the queries come first
            heads_first = output if output.shape[2] == count else output.transpose(1, 2)
            found[index] = heads_first[0, :heads]

        hooks.append(getattr(attention, name).register_forward_hook(keep))
    with torch.no_grad():
        net(ids[None])
    for hook in hooks:
        hook.remove()
    return found


def check_against_hooks(net) -> None:
    ids = tokens(5, 40)
    expected, found = queries_before_rope(net, ids), calibrate(net, ids, chunk=16)
    assert found.layers
    for layer in found.layers:
        rope, queries = support.rope_of(net.get_decoder(), layer), expected[layer]
        rotated, rest = queries[..., : rope.size], queries[..., rope.size :]
        half = rope.size // 2
        if rope.interleaved:
            real, imaginary = rotated[..., ::2], rotated[..., 1::2]
        else:
            real, imaginary = rotated[..., :half], rotated[..., half:]
        still = rest.chunk(2, -1) if rest.shape[-1] else (rest, rest)
        pairs = torch.complex(torch.cat([real, still[0]], -1), torch.cat([imaginary, still[1]], -1))
        torch.testing.assert_close(found.mean[layer].to(torch.complex128), pairs.mean(1), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.absolute[layer].double(), pairs.abs().mean(1), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.length[layer].double(), queries.norm(dim=-1).mean(1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_shared_models_are_measured_as_their_modules_say(name):
    assert model(name).config.model_type in support.ROTARY
    check_against_hooks(model(name))


SHARED = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss"}


@pytest.mark.parametrize("kind", sorted(support.ROTARY - SHARED))
def test_every_type_that_is_said_to_be_tested_is(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    net = tiny(kind)
    size = queries_before_rope(net, tokens(0, 5))[0].shape[-1]
    assert (support.rope_of(net.get_decoder(), 0).size < size) == (kind in PARTIAL or kind == "phi3")
    check_against_hooks(net)


@pytest.mark.parametrize(("kind", "size"), [("smollm3", 4), ("glm", 2), ("ernie4_5", 2)])
def test_types_that_are_refused_would_be_wrong(kind, size, monkeypatch):
    """They leave layers unrotated, or rotate otherwise than their angles look: the check above has teeth."""
    config = CONFIG_MAPPING[kind](
        vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=size, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    net = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=f"{kind} models: .* take rotary positions back, which is tested for"):
        RetentionCache.for_model(net, "trig", budget=8)
    monkeypatch.setattr(support, "ROTARY", support.ROTARY | {kind})
    with pytest.raises(AssertionError, match="not close"):
        check_against_hooks(net)


def test_the_frequencies_are_the_models_own_also_under_yarn_and_in_half_precision():
    for net in (model("llama"), model("gpt_oss"), build("llama").to(torch.bfloat16)):
        rope = support.rope_of(net.model, 1)
        assert torch.equal(rope.frequencies, net.model.rotary_emb.inv_freq.double())
        assert rope.scaling == pytest.approx(net.model.rotary_emb.attention_scaling)
    rope = support.rope_of(model("gemma3").model, 1)
    assert torch.equal(rope.frequencies, model("gemma3").model.rotary_emb.full_attention_inv_freq.double())


def test_models_without_rotation_are_refused_by_name(tmp_path):
    net = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](vocab_size=96, n_embd=32, n_layer=2, n_head=4)).eval()
    for attempt in (
        lambda: RetentionCache.for_model(net, "triattention", budget=8),
        lambda: calibrate(net, tokens(0, 20)),
    ):
        with pytest.raises(ValueError, match=r"^gpt2 models have no rotary positions, .*: choose .*keydiff, snapkv"):
            attempt()
    for name in ("keydiff", "snapkv", "tova", "knorm"):
        RetentionCache.for_model(net, name, budget=8)


def test_a_rotation_without_a_module_of_its_own_is_one_that_is_not_tested():
    config = CONFIG_MAPPING["gptj"](vocab_size=96, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)
    with pytest.raises(ValueError, match=r"gptj models: .* take rotary positions back, which is tested for"):
        RetentionCache.for_model(AutoModelForCausalLM.from_config(config).eval(), "triattention", budget=8)


# The scorer in a cache


def test_the_view_shows_the_calibration_the_rotation_and_the_next_position(llama):
    seen = []

    class Watching(Trig):
        def score(self, view):
            seen.append(view)
            return super().score(view)

    cache = RetentionCache.for_model(llama, Policy(Watching()), budget=10, every=4)
    forward(llama, tokens(0, 1, 20), cache)
    for _ in range(4):
        forward(llama, tokens(1, 1, 1), cache)
    assert [view.seen.tolist() for view in seen] == [[20], [20], [24], [24]]
    ropes = {layer.index: layer.rope for layer in cache.layers}
    calibration = calibration_for(llama, "", ropes)
    for view in seen:
        assert view.rope is ropes[view.layer]
        assert all(torch.equal(a, b) for a, b in zip(view.calibration, calibration.of(view.layer), strict=True))


def test_nothing_is_observed(llama):
    before = llama.config._attn_implementation
    cache = RetentionCache.for_model(llama, "triattention", budget=10)
    assert not cache.policy.tapped and llama.config._attn_implementation == before
    forward(llama, tokens(0, 1, 20), cache)
    layer = cache.layers[0]
    assert layer.kept == 10 and layer._window is layer._attention is layer._moments is layer.pair_sums is None
    forward(llama, tokens(1, 1, 1), cache)
    cache.crop(-1)  # as with any policy that has observed no queries


CELLS = [
    *((policy, "llama", situation) for policy in ("trig", "triattention") for situation in SCRIPTS),
    *(
        (policy, "llama", situation)
        for policy in ("triattention-union", "trig+hub@layer", "trig(aggregate='max')@shared(floor=0.2)")
        for situation in ("three turns ratio", "turns left-padded")
    ),
    *(("trig", name, "turns left-padded") for name in MODELS if name != "llama"),
]


@pytest.mark.parametrize(("policy", "name", "situation"), CELLS)
def test_cell(policy, name, situation):
    agrees(policy, name, situation)


def test_a_padded_row_keeps_what_it_keeps_alone(llama):
    rows = [tokens(1, 40), tokens(2, 29)]
    together = RetentionCache.for_model(llama, "triattention", budget=12)
    ids, mask = left_padded(rows)
    forward(llama, ids, together, mask=mask)
    for row, ids in enumerate(rows):
        alone = RetentionCache.for_model(llama, "triattention", budget=12)
        forward(llama, ids[None], alone)
        for both, one in zip(held(together).values(), held(alone).values(), strict=True):
            assert torch.equal(both[row], one[0])


@pytest.mark.parametrize("policy", ["trig@model(combine='max')", "triattention", "trig+hub"])
@pytest.mark.parametrize("own", ["full", "snapkv", "expected@head", "trig(norm=False)"])
def test_any_recording_serves_it(llama, own, policy):
    recorded = RetentionCache.for_model(llama, own, **({} if own == "full" else {"ratio": 0}))
    inpass = RetentionCache.for_model(llama, policy, ratio=0.5)
    for cache in (recorded, inpass):
        forward(llama, tokens(0, 1, 40), cache)
    short = copy.deepcopy(recorded)
    short.compress(policy, ratio=0.5)
    for a, b in zip(short.layers, inpass.layers, strict=True):
        assert torch.equal(a.positions, b.positions) and torch.equal(a.keys, b.keys) and a.kept == 20


def test_compressing_by_another_calibration_leaves_the_own_one_in_place(llama, tmp_path):
    other = calibrate(llama, tokens(5, 50)).save(tmp_path / "other.safetensors")
    cache = RetentionCache.for_model(llama, "trig", budget=12, every=4)
    forward(llama, tokens(0, 1, 40), cache)
    own = [layer.calibration for layer in cache.layers]
    cache.compress(f"trig(calibration={str(other)!r})", budget=10)
    assert [layer.calibration for layer in cache.layers] == own
    twin = copy.deepcopy(cache)
    assert all(a.calibration[0] is b.calibration[0] for a, b in zip(cache.layers, twin.layers, strict=True))
    with pytest.raises(FileNotFoundError, match="no calibration"):
        cache.compress("trig(calibration='nowhere.pt')", budget=8)
    assert cache.layers[0].kept == 10


def test_recordings_are_shared_with_policies_that_need_nothing(llama):
    policies = [Policy.parse(text) for text in ("triattention", "knorm", "snapkv", "trig@model(combine='max')")]
    assert len({recording_key(policy) for policy in policies}) == 1
    ids = tokens(0, 40).tolist()
    recorded = record(llama, ids, policies)
    assert recorded.policy.needs == {"queries"}
    for policy in policies:
        cache, inpass = compressed(recorded, policy, 0.5), RetentionCache.for_model(llama, policy, ratio=0.5)
        forward(llama, tokens(0, 40)[None], inpass)
        assert all(torch.equal(a, b) for a, b in zip(held(cache).values(), held(inpass).values(), strict=True))
