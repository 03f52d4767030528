"""Bad input is refused with a ``ValueError`` that says what is wrong and what would be right."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import transformers
from gates import random_gate

from kvretain import Policy, RetentionCache, artefacts, presets, scorers
from kvretain.calibrate import calibrate

from .models import build, cache_argument, forward, left_padded, tokens
from .oracle import Turn, held, play


def make(net, policy="knorm", **options) -> RetentionCache:
    return RetentionCache.for_model(net, policy, **options)


def refuses(*words: str):
    """A ``ValueError`` whose message holds every word, in any order."""
    return pytest.raises(ValueError, match="(?is)" + "".join(f"(?=.*(?:{word}))" for word in words))


# --- making ---------------------------------------------------------------------------------------


def test_weights_for_another_number_of_heads(llama) -> None:
    with refuses("3 weights were given", "this llama model has 2 KV heads"):
        make(llama, "knorm+fixed(weights=(1.0, 1.0, 2.0))", budget=8)
    cache = make(llama, ratio=0)
    with refuses("1 weights were given", "this llama model has 2 KV heads"):
        cache.compress("knorm+fixed(weights=(1.0,))", budget=8)
    make(llama, "knorm+fixed(weights=(1.0, 2.0))", budget=8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ("budget", "ratio", "neither")),
        ({"budget": 8, "ratio": 0.5}, ("budget", "ratio", "8", "0.5")),
        ({"budget": 0}, ("budget", "at least 1", "0")),
        ({"budget": -3}, ("budget", "at least 1", "-3")),
        ({"budget": 8.0}, ("budget", "whole", "8.0")),
        ({"budget": True}, ("budget", "whole", "True")),
        ({"budget": "8"}, ("budget", "whole", "'8'")),
        ({"ratio": 1.0}, ("ratio", "removed", "1.0")),
        ({"ratio": -0.1}, ("ratio", "removed", "-0.1")),
        ({"ratio": float("nan")}, ("ratio", "nan")),
        ({"ratio": "0.5"}, ("ratio", "'0.5'")),
        ({"ratio": True}, ("ratio", "True")),
        ({"budget": 8, "every": 0}, ("every", "at least 1")),
        ({"budget": 8, "every": 2.5}, ("every", "whole")),
        ({"budget": 8, "sinks": -1}, ("sinks", "at least 0")),
        ({"budget": 8, "recent": 1.5}, ("recent", "whole")),
        ({"budget": 8, "sinks": 5, "recent": 4}, ("9", "8", "budget", "sinks", "recent")),
        ({"budget": 8, "sinks": 9}, ("9", "8", "budget", "sinks")),
        ({"budget": 8, "recent": 9}, ("9", "8", "budget", "recent")),
    ],
    ids=str,
)
def test_budget_out_of_range(llama, options, words) -> None:
    with refuses(*words):
        make(llama, **options)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("snapkw", ("snapkw", "unknown", "valid", "snapkv", "streaming")),
        ("snapkv+hab", ("hab", "unknown", "valid", "hub")),
        ("snapkv/topp", ("topp", "unknown", "valid", "topk")),
        ("snapkv@heads", ("heads", "unknown", "valid", "head", "layer", "model")),
        ("snapkv(windows=4)", ("windows", "snapkv", "valid", "window", "kernel")),
        ("snapkv+hub(diskount=1)", ("diskount", "hub", "valid", "discount")),
        ("snapkv(window=0)", ("window",)),
        ("snapkv(kernel=4)", ("snapkv", "kernel", "odd", "4")),
        ("snapkv+hub(kernel=4)", ("hub_refine", "kernel", "odd", "4")),
        ("snapkv+smooth(kernel=2)", ("smooth", "kernel", "odd", "2")),
        ("snapkv(4)", ("named", "snapkv")),
        ("snapkv(window=", ("snapkv",)),
        ("", ("scorer", "form")),
        ("+hub", ("scorer", "form")),
        (7, ("policy", "int")),
    ],
    ids=str,
)
def test_unknown_policy_or_argument(llama, policy, words) -> None:
    with refuses(*words):
        make(llama, policy, budget=8)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
UNSERVED = [
    ("T5", "ForConditionalGeneration", {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16}, ("T5", "encoder")),
    ("Mistral", "ForCausalLM", SMALL | {"sliding_window": 8}, ("mistral", "sliding", "full attention")),
    ("Mamba", "ForCausalLM", {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}, ("mamba",)),
    ("Bloom", "ForCausalLM", {"hidden_size": 32, "n_layer": 1, "n_head": 2}, ("bloom", "distance|ALiBi")),
    (
        "FalconH1",
        "ForCausalLM",
        SMALL | {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        ("falcon_h1", "layer 0", "LinearAttentionAndFullAttentionLayer"),
    ),
]


@pytest.mark.parametrize(("family", "kind", "settings", "words"), UNSERVED, ids=[row[0] for row in UNSERVED])
def test_models_that_cannot_be_served_are_refused_by_name(family, kind, settings, words) -> None:
    config = getattr(transformers, f"{family}Config")(**({"vocab_size": 64} | settings))
    net = getattr(transformers, family + kind)(config).eval()
    with refuses(*words):
        make(net, budget=8)


def test_heads_that_share_values_are_not_evicted_apart() -> None:
    """DiffLlama pairs the values of different heads, so sets per head would hide other entries than they evict."""
    settings = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    net = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**settings)).eval()
    with refuses("diffllama", "head"):
        make(net, "knorm", budget=8)


def test_something_that_is_no_model_is_refused() -> None:
    with pytest.raises((ValueError, TypeError), match=r"(?i)model"):
        make(torch.nn.Linear(2, 2), budget=8)


# --- running --------------------------------------------------------------------------------------


def test_more_protected_entries_than_a_ratio_leaves(llama) -> None:
    cache = make(llama, ratio=0.9, sinks=3)
    with refuses("3", "2", "protected", "sinks", "ratio"):
        forward(llama, tokens(1, 1, 20), cache)


def test_a_protected_prompt_longer_than_the_budget(llama) -> None:
    cache = make(llama, budget=8, protect_prompt=True)
    with refuses("20", "8", "prompt", "budget"):
        forward(llama, tokens(1, 1, 20), cache)
    forward(llama, tokens(1, 1, 6), cache)  # the refusal changed nothing
    assert cache.get_seq_length() == 6
    cache.check_integrity()


WINDOWED = ["snapkv(window=20)", "snapkv(window=64)+hub@layer", "rkv(window=20)", "snapkv(window=20)@shared"]


@pytest.mark.parametrize("policy", WINDOWED)
def test_a_context_too_short_for_the_window(llama, policy) -> None:
    """Nothing stands before the window, so nothing could be told apart; one token more is enough."""
    name, window = policy.partition("(")[0], int(policy.partition("=")[2].partition(")")[0])
    for options in ({"budget": 8}, {"ratio": 0.5}):
        cache = make(llama, policy, **options)
        with refuses(name, f"window of {window} tokens", "only 20", "longer contexts", rf"{name}\(window=5\)"):
            forward(llama, tokens(1, 1, 20), cache)
        assert cache.get_seq_length() == 0  # the refusal changed nothing
        forward(llama, tokens(1, 1, window + 1), cache)
        assert cache.trace.evictions == 1
        cache.check_integrity()


def test_a_context_too_short_for_the_window_is_kept_whole_where_nothing_must_go(llama) -> None:
    for options in ({"budget": 20}, {"ratio": 0.0}):
        cache = make(llama, "snapkv(window=64)", **options)
        forward(llama, tokens(1, 1, 20), cache)
        assert cache.layers[0].kept == 20


def test_protection_that_leaves_nothing_to_value_needs_no_window(llama) -> None:
    cache = make(llama, "snapkv(window=64)", budget=8, sinks=3, recent=5)
    forward(llama, tokens(1, 1, 20), cache)
    assert all(p[0, 0].tolist() == [0, 1, 2, 15, 16, 17, 18, 19] for p in held(cache).values())


def test_a_short_row_beside_a_longer_one_keeps_its_first_and_last_tokens(llama) -> None:
    ids, mask = left_padded([tokens(3, 30), tokens(4, 8)])
    cache = make(llama, "snapkv(window=8)", ratio=0.5)
    forward(llama, ids, cache, mask=mask)
    assert all(p[1, 0, -4:].tolist() == [0, 1, 6, 7] for p in held(cache).values())


def test_a_recorded_context_too_short_for_the_window(llama) -> None:
    cache = make(llama, "snapkv(window=20)", ratio=0)
    forward(llama, tokens(1, 1, 20), cache)
    with refuses("snapkv", "window of 20"):
        cache.compress("snapkv(window=20)", ratio=0.5)
    cache.compress("snapkv(window=4)", ratio=0.5)  # the refusal changed nothing
    assert cache.layers[0].kept == 10


@pytest.mark.parametrize("policy", ["snapkv(window=64)", "snapkv(window=64)+hub", "rkv(window=64)"])
def test_a_window_that_the_budget_does_not_hold(llama, policy) -> None:
    """No error: half of the budget is the latest tokens, sinks and the window's oldest entries fill the rest."""
    cache = make(llama, policy, budget=16, sinks=2)
    forward(llama, tokens(1, 1, 80), cache)
    kept = [0, 1, *range(16, 22), *range(72, 80)]
    for positions in held(cache).values():
        assert positions[0, 0].tolist() == kept


def test_more_recent_tokens_than_a_ratio_leaves(llama) -> None:
    cache = make(llama, "snapkv", ratio=0.9, recent=5)
    with refuses("5 protected", "budget of 4", "recent", "lower the ratio"):
        forward(llama, tokens(1, 1, 40), cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_scores_that_are_not_finite_name_scorer_and_layer(llama, bad) -> None:
    knorm = scorers["knorm"]

    @dataclasses.dataclass(frozen=True)
    class Broken(knorm):
        def score(self, view):
            scores = super().score(view).clone()
            if view.layer == 1:
                scores[0, 1, 7] = bad
            return scores

    name = f"broken_{bad}"
    scorers.register(name)(Broken)
    cache = make(llama, Policy(Broken()), budget=8)
    with refuses(name, "layer 1", "nan|inf", "check the scorer, or the model's keys"):
        forward(llama, tokens(1, 1, 20), cache)
    with refuses("reset"):  # half of the layers have stored the pass
        forward(llama, tokens(1, 1, 1), cache)
    cache.reset()
    forward(llama, tokens(1, 1, 8), cache)
    cache.check_integrity()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda view: None, "returned NoneType"),
        (lambda view: view.positions.tolist(), "returned list"),
        (lambda view: view.positions, r"returned \(1, 2, 20\) torch.int64"),
        (lambda view: torch.zeros(1, 20), r"returned \(1, 20\) torch.float32"),
    ],
)
def test_scores_that_are_no_scores_name_scorer_and_layer(llama, answer, words) -> None:
    @dataclasses.dataclass(frozen=True)
    class Wrong(scorers["knorm"]):
        def score(self, view):
            return answer(view)

    with refuses("scorer 'Wrong'", words, "at layer 0", r"expected \(1, 2, 20\) torch.float32"):
        forward(llama, tokens(1, 1, 20), make(llama, Policy(Wrong()), budget=8))


@pytest.mark.parametrize("refiner", ["hub", "smd", "nms", "smooth"])
def test_negative_scores_under_a_refiner(llama, refiner) -> None:
    """A scorer that returns negative scores without saying that they are signed."""

    @dataclasses.dataclass(frozen=True)
    class Signed(scorers["random"]):
        def score(self, view):
            return super().score(view) - 0.5

    policy = Policy(Signed(), Policy.parse(f"knorm+{refiner}").refiner)
    name = "smooth" if refiner == "smooth" else "hub_refine"  # smd and nms are hub_refine with parts switched off
    with refuses(name, "must be >= 0", "-0"):
        forward(llama, tokens(1, 1, 20), make(llama, policy, budget=8))


@pytest.mark.parametrize("policy", ["snapkv", "knorm", "knorm@model"])
def test_keys_with_nan_are_noticed(policy) -> None:
    net = build("llama")
    with torch.no_grad():
        net.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    with refuses(policy.partition("@")[0], "layer 1", "nan"):
        forward(net, tokens(1, 1, 20), make(net, policy, budget=8))


@pytest.mark.parametrize("policy", ["snapkv", "knorm"])
def test_a_cache_of_another_model(llama, qwen3, policy) -> None:
    cache = make(llama, policy, budget=8)
    with refuses("model", "made for|for_model"):
        forward(qwen3, tokens(1, 1, 20), cache)
    twin = build("llama")  # the same shapes: still another model
    with refuses("model", "made for|for_model"):
        forward(twin, tokens(1, 1, 20), make(llama, policy, budget=8))
    both = make(twin, policy, budget=8)
    forward(twin, tokens(1, 1, 20), both)
    with refuses("model", "made for|for_model"):  # with hooks on both models
        forward(llama, tokens(1, 1, 1), both)


def test_another_batch_size(llama) -> None:
    cache = make(llama, budget=8)
    forward(llama, tokens(1, 2, 20), cache)
    with refuses("2 rows", "3", "reset|new cache"):
        forward(llama, tokens(2, 3, 4), cache)
    assert cache.get_seq_length() == 20
    cache.check_integrity()
    forward(llama, tokens(2, 2, 4), cache)
    cache.reset()
    forward(llama, tokens(2, 3, 4), cache)


ROWS = left_padded([tokens(3, 16), tokens(4, 12)])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda mask: mask.clone().index_fill_(1, torch.tensor([0]), 1), ("contradicts", "padding")),
        (lambda mask: mask.clone().index_fill_(1, torch.tensor([9]), 0), ("contradicts", "real")),
        (lambda mask: torch.cat([mask[:, 1:5], mask[:, :1], mask[:, 5:]], 1), ("contradicts",)),
        (lambda mask: mask.flip(0), ("contradicts",)),
        (lambda mask: mask[:, 1:], ("attention_mask", r"\(2, 16\)", r"\(2, 17\)")),
        (lambda mask: mask[:, -1:], ("attention_mask", r"\(2, 1\)", r"\(2, 17\)")),
        (lambda mask: torch.cat([mask, mask[:, -1:]], 1), ("attention_mask", r"\(2, 18\)", r"\(2, 17\)")),
        (lambda mask: None, ("attention_mask", "padding")),
        (lambda mask: torch.zeros(2, 1, 1, 17), ("4-D", "2-D", "mask")),
        (lambda mask: {"full_attention": torch.zeros(2, 1, 1, 17)}, ("dict", "2-D", "mask")),
    ],
    ids=["shown", "hidden", "moved", "rows swapped", "short", "only new", "long", "missing", "4-D", "dict"],
)
@pytest.mark.parametrize("evicted", [True, False], ids=["evicted", "whole"])
@pytest.mark.parametrize("policy", ["snapkv", "knorm"])
def test_a_mask_that_contradicts_what_was_seen(llama, policy, evicted, change, words) -> None:
    ids, mask = ROWS
    cache = make(llama, policy, budget=8 if evicted else 64)
    forward(llama, ids, cache, mask=mask)
    before = held(cache)
    grown = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    positions = torch.tensor([[16], [12]])
    with refuses(*words):
        forward(llama, tokens(5, 2, 1), cache, mask=change(grown), positions=positions)
    forward(llama, tokens(5, 2, 1), cache, mask=grown)  # the refusal changed nothing
    assert all((positions[..., :-1] == before[layer]).all() for layer, positions in held(cache).items())
    cache.check_integrity()


def test_a_four_dimensional_mask_at_the_first_pass(llama) -> None:
    with refuses("4-D", "2-D"):
        forward(
            llama,
            tokens(1, 1, 12),
            make(llama, budget=8),
            mask=torch.zeros(1, 1, 12, 12),
            positions=torch.arange(12)[None],
        )


@pytest.mark.parametrize("policy", ["snapkv", "knorm", "keydiff@model"])
@pytest.mark.parametrize("options", [{"budget": 12}, {"ratio": 0.5}], ids=str)
def test_a_row_without_any_token(llama, policy, options) -> None:
    """Either served, the row staying empty until its first token, or refused before anything is stored."""
    ids, mask = ROWS
    mask = mask.clone()
    mask[1] = 0
    cache = make(llama, policy, **options)
    try:
        forward(llama, ids, cache, mask=mask)
    except ValueError as error:
        assert "row" in str(error) and cache.get_seq_length() == 0
        cache.check_integrity()
        return
    assert all(bool((positions[1] == -1).all()) for positions in held(cache).values())
    forward(llama, tokens(5, 2, 1), cache, mask=torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1))
    assert all(positions[1].max() == 0 for positions in held(cache).values())
    cache.check_integrity()


def test_an_attention_implementation_changed_under_a_cache() -> None:
    """Observation is lost and noticed for the old cache; a new cache observes again."""
    net = build("llama")
    old = make(net, "snapkv", budget=8, every=4)
    forward(net, tokens(1, 1, 20), old)
    net.set_attn_implementation("eager")
    new = make(net, "h2o", budget=8, every=4)
    forward(net, tokens(1, 1, 20), new)
    new.check_integrity()


def test_right_padding_is_refused_or_right(llama) -> None:
    """Padding on the right at prefill: the next token's position would follow the padding; entries must not leak."""
    ids, mask = (t.flip(1) for t in ROWS)
    cache = make(llama, budget=8)
    try:
        forward(llama, ids, cache, mask=mask)
    except ValueError as error:
        assert "padding" in str(error)
        return
    for positions in held(cache).values():
        assert int(positions[1].max()) == 11 and bool((positions[1] >= 0).all())


# --- operations that cannot -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["snapkv", "knorm"])
def test_crop_across_an_eviction(llama, policy) -> None:
    cache = make(llama, policy, budget=8, every=4)
    forward(llama, tokens(1, 1, 20), cache)
    forward(llama, tokens(2, 1, 1), cache)
    before = held(cache)
    with refuses("crop", "evicted", "deepcopy|copy"):
        cache.crop(-2)
    assert cache.get_seq_length() == 21 and all(torch.equal(before[i], p) for i, p in held(cache).items())
    cache.check_integrity()


@pytest.mark.parametrize("policy", ["snapkv", "knorm"])
def test_crop_behind_a_full_sliding_window(gemma3, policy) -> None:
    """transformers' sliding layer has dropped what a crop would need; the refusal leaves all layers as they were."""
    cache = make(gemma3, policy, budget=64)
    forward(gemma3, tokens(1, 1, 20), cache)
    with refuses("crop", "window|sliding|queries"):
        cache.crop(-1)
    cache.check_integrity()
    forward(gemma3, tokens(2, 1, 1), cache)
    assert cache.get_seq_length() == 21


@pytest.mark.parametrize("argument", [5, -100], ids=str)
def test_crop_to_a_length_or_beyond_the_start(llama, argument) -> None:
    cache = make(llama, "knorm", budget=64)
    forward(llama, tokens(1, 1, 20), cache)
    with refuses("crop"):
        cache.crop(argument)
    assert cache.get_seq_length() == 20


def test_assisted_decoding_is_refused_with_a_reason(llama) -> None:
    ids = tokens(1, 1, 20)
    for policy in ("snapkv", "knorm"):
        for extra in ({"assistant_model": build("llama")}, {"prompt_lookup_num_tokens": 3}):
            cache = make(llama, policy, budget=8)
            with refuses("assisted|speculative|prompt_lookup|assistant", "rejected|roll", "evict|gone"):
                llama.generate(ids, max_new_tokens=12, do_sample=False, **{cache_argument(llama): cache}, **extra)


def test_an_untouched_cache_answers(llama) -> None:
    cache = make(llama, budget=8)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0 and len(cache.trace) == 0
    assert cache.trace.mean_length == 0 and cache.trace.peak_length == 0
    cache.check_integrity()
    copy.deepcopy(cache).check_integrity()
    cache.reset()
    cache.crop(0)
    forward(llama, tokens(1, 1, 4), cache)


def test_policy_objects_and_presets_are_accepted(llama, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVRETAIN_CACHE", str(tmp_path))
    random_gate(llama).save(artefacts.own_path("gate", llama))
    calibrate(llama, tokens(0, 40)).save(artefacts.own_path("calibration", llama))
    for policy in (Policy.parse("snapkv+hub"), *presets):
        cache = make(llama, policy, **({} if policy == "full" else {"budget": 8}))
        play(llama, cache, [Turn(tokens(1, 1, 20), decode=2)])
        cache.check_integrity()
