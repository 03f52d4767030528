"""Pairs of runs that must agree, bitwise wherever nothing is evicted."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

from kvretain import RetentionCache

from .models import MODELS, build, cache_argument, distinct, forward, left_padded, model, positions_of, tokens
from .oracle import Step, Turn, held, play

EVERY_MODEL = [(name, attention) for name, (*_, attentions) in MODELS.items() for attention in attentions]
KEEPS_ALL = [
    ("snapkv+hub", {"budget": 64}),
    ("h2o", {"budget": 64}),
    ("keydiff@model", {"budget": 64}),
    ("tova", {"ratio": 0.0}),
]
TAPPED = ("snapkv", "h2o", "tova")
POLICIES = ("random", "streaming", "knorm", "keydiff", *TAPPED, "snapkv+hub", "knorm@layer", "keydiff@model")

single = [Turn(tokens(0, 1, 24), decode=12), Turn(tokens(1, 1, 5), decode=4)]
padded = [
    Turn(*left_padded([tokens(2, 21), tokens(3, 13), tokens(4, 2)]), decode=10),
    Turn(*left_padded([tokens(5, 3), tokens(6, 7), tokens(7, 1)]), decode=6),
]


def make(net, policy: str, **options) -> RetentionCache:
    return RetentionCache.for_model(net, policy, **options)


def same_bits(left: list[Step], right: list[Step]) -> None:
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a.ids, b.ids), f"step {index}: other tokens"
        assert torch.equal(a.logits, b.logits), (
            f"step {index}: logits differ by {(a.logits - b.logits).abs().max():.1e}"
        )


# --- nothing is evicted ---------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [single, padded], ids=["single", "left-padded"])
@pytest.mark.parametrize(("name", "attention"), EVERY_MODEL, ids=lambda value: value)
@pytest.mark.parametrize(("policy", "options"), [*KEEPS_ALL, ("full", {})], ids=lambda value: str(value))
def test_budget_of_at_least_the_length_is_bitwise_dynamic_cache(policy, options, name, attention, turns) -> None:
    net = model(name, attention)
    batch = turns is padded
    cache = make(net, policy, **options)
    run = play(net, cache, turns, pass_mask=batch)
    same_bits(run, play(net, DynamicCache(config=net.config), turns, pass_mask=batch))
    assert not any(step.evicts for step in run)
    assert cache.get_seq_length() == run[-1].mask.shape[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", ["snapkv+hub", "keydiff"])
def test_half_precision_without_eviction_is_bitwise_dynamic_cache(policy, dtype) -> None:
    net = model("llama", "sdpa", dtype)
    same_bits(play(net, make(net, policy, budget=64), padded), play(net, DynamicCache(config=net.config), padded))


@pytest.mark.parametrize("policy", ["snapkv+hub", "keydiff", "full"])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_generate_without_eviction_equals_dynamic_cache(llama, policy, arguments) -> None:
    ids, mask = left_padded([tokens(2, 21), tokens(3, 13)])
    caches = [
        make(llama, policy, **({} if policy == "full" else {"budget": 64})),
        DynamicCache(config=llama.config),
    ]
    outputs = []
    for cache in caches:
        torch.manual_seed(0)
        outputs.append(
            llama.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=16,
                **({"do_sample": False, cache_argument(llama): cache} | arguments),
            )
        )
    assert torch.equal(*outputs)


@pytest.mark.parametrize("policy", ["snapkv+hub", "h2o", "knorm"])
@pytest.mark.parametrize("net", ["llama", "gemma3"])
def test_chunked_prefill_equals_one_shot(policy, net) -> None:
    net = model(net)
    ids = tokens(8, 2, 30)
    chunked, whole = make(net, policy, budget=30), make(net, policy, budget=30)
    chunks = torch.cat([forward(net, part, chunked) for part in ids.split((11, 1, 8, 10), 1)], 1)
    torch.testing.assert_close(chunks, forward(net, ids, whole), atol=1e-4, rtol=0)
    # The eviction that follows is the same too: the collected queries and attention do not depend on the chunks.
    turn = tokens(9, 2, 6)
    torch.testing.assert_close(forward(net, turn, chunked), forward(net, turn, whole), atol=1e-4, rtol=0)
    same_positions(held(chunked), held(whole))


def same_positions(left: dict, right: dict, rows: slice = slice(None)) -> None:
    assert left.keys() == right.keys() and left
    for layer in left:
        assert torch.equal(left[layer][rows], right[layer][rows]), f"layer {layer}"


# --- generate = a hand-written loop --------------------------------------------------------------


def generate(net, ids, cache, new: int, **arguments) -> torch.Tensor:
    mask = torch.ones_like(ids)  # given, as generate would take a generated pad token for padding
    arguments = {"do_sample": False, cache_argument(net): cache} | arguments
    return net.generate(ids, attention_mask=mask, max_new_tokens=new, **arguments)[:, ids.shape[1] :]


def greedy(steps: list[Step]) -> list[int]:
    return [int(step.logits[0, -1].argmax()) for step in steps]


@pytest.mark.parametrize("policy", ["snapkv+hub", "h2o", "keydiff@model"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_conversation_through_generate(name, policy) -> None:
    """The second call is given the whole conversation; what the cache has seen of it is not fed again."""
    net, ids = model(name), tokens(71, 1, 30)
    cache, by_hand = (make(net, policy, budget=12, every=4) for _ in range(2))
    answer = generate(net, ids, cache, 10)
    conversation = torch.cat([ids, answer, tokens(72, 1, 7)], 1)
    second = generate(net, conversation, cache, 10)
    steps = play(net, by_hand, [Turn(ids, decode=9), Turn(conversation[:, 39:], decode=9)], pass_mask=False)
    assert answer[0].tolist() == greedy(steps[:10])
    assert second[0].tolist() == greedy(steps[10:])
    same_positions(held(cache), held(by_hand))


@pytest.mark.parametrize("policy", ["snapkv+hub", "h2o", "keydiff@model"])
def test_generate_in_prefill_chunks(llama, policy) -> None:
    ids = tokens(73, 1, 30)
    cache, by_hand = (make(llama, policy, budget=12, every=4) for _ in range(2))
    answer = generate(llama, ids, cache, 10, prefill_chunk_size=8)
    *chunks, last = ids.split(8, 1)
    steps = play(llama, by_hand, [*map(Turn, chunks), Turn(last, decode=9)], pass_mask=False)
    assert answer[0].tolist() == greedy(steps[len(chunks) :])
    same_positions(held(cache), held(by_hand))


def test_embeddings_positional_arguments_and_the_bare_decoder(llama) -> None:
    """The ways to call a model other than by keyword, with ids, through its language-model head."""
    ids, mask = left_padded([tokens(74, 24), tokens(75, 18)])
    following, grown = tokens(76, 2, 1), torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    positions = [positions_of(mask), positions_of(grown)[:, -1:]]
    caches = [make(llama, "snapkv+hub", ratio=0.5) for _ in range(3)]
    with torch.no_grad():
        for cache, inputs in zip(caches, ("ids", "embeddings", "positional"), strict=True):
            for tokens_in, mask_in, position in zip((ids, following), (mask, grown), positions, strict=True):
                if inputs == "positional":
                    llama.model(tokens_in, mask_in, position, cache)
                    continue
                fed = {"input_ids": tokens_in}
                if inputs == "embeddings":
                    fed = {"inputs_embeds": llama.get_input_embeddings()(tokens_in)}
                llama(attention_mask=mask_in, position_ids=position, **{cache_argument(llama): cache}, **fed)
    for other in caches[1:]:
        same_positions(held(caches[0]), held(other))
        assert all(torch.equal(a.keys, b.keys) for a, b in zip(caches[0].layers, other.layers, strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_masks_of_any_dtype(llama, dtype) -> None:
    ids, mask = left_padded([tokens(74, 24), tokens(75, 14)])
    caches = [make(llama, "snapkv+hub", ratio=0.5, every=4) for _ in range(2)]
    for step in range(10):
        fed = tokens(80 + step, 2, 1) if step else ids
        grown = torch.cat([mask, torch.ones(2, step, dtype=torch.long)], 1)
        positions = positions_of(grown)[:, -fed.shape[1] :]
        logits = [
            forward(llama, fed, cache, mask=grown.to(kind), positions=positions)
            for cache, kind in zip(caches, (torch.long, dtype), strict=True)
        ]
        assert torch.equal(*logits)


@pytest.mark.parametrize("policy", POLICIES)
def test_autocast(llama, policy) -> None:
    """Scores stay float32 inside an autocast region."""
    cache = make(llama, policy, budget=12, every=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for part in (tokens(77, 1, 20), *tokens(78, 1, 9).split(1, 1)):
            assert bool(forward(llama, part, cache).isfinite().all())
    assert cache.trace.evictions >= 2
    cache.check_integrity()


# --- batch = solo ---------------------------------------------------------------------------------


def real(positions: torch.Tensor) -> list[list[int]]:
    """The kept positions of each head of one row, padding dropped."""
    return [[p for p in head if p >= 0] for head in positions.tolist()]


def rows_equal_solo_runs(net, make_cache, *turns: tuple[int, ...]) -> None:
    """Positions and logits of a left-padded batch, row by row, against runs of each row alone; the tokens are given.

    ``turns``: the lengths of the rows in each turn, ``1`` for a decoded token.
    """
    turns = [lengths if isinstance(lengths, tuple) else (lengths,) * len(turns[0]) for lengths in turns]
    rows = [distinct(90 + row, sum(lengths)).split(lengths) for row, lengths in enumerate(zip(*turns, strict=True))]
    together = play(net, make_cache(), [Turn(*left_padded(list(turn))) for turn in zip(*rows, strict=True)])
    for row, parts in enumerate(rows):
        alone = play(net, make_cache(), [Turn(part[None]) for part in parts], pass_mask=False)
        for index, (batch, solo) in enumerate(zip(together, alone, strict=True)):
            where = f"row {row} step {index}"
            for layer in solo.after:
                assert real(batch.after[layer][row]) == real(solo.after[layer][0]), f"{where} layer {layer}"
            torch.testing.assert_close(
                batch.logits[row, -1], solo.logits[0, -1], atol=1e-4, rtol=0, msg=f"{where}: logits"
            )
            assert batch.logits[row, -1].argmax() == solo.logits[0, -1].argmax(), f"{where}: another token"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_equals_its_solo_run_under_a_budget(name, policy) -> None:
    """All rows are longer than the budget, so batch and solo runs evict at the same steps.

    The later turn is padded too, except for sliding windows: transformers counts them in columns, padding included.
    """
    net = model(name)
    later = (5, 5, 5) if name == "gemma3" else (9, 2, 5)
    rows_equal_solo_runs(net, lambda: make(net, policy, budget=16, every=4), (28, 22, 17), *(1,) * 10, later, *(1,) * 5)


@pytest.mark.parametrize("ratio", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("policy", [*POLICIES, "rkv", "lagkv", "value-norm"])
def test_a_row_equals_its_solo_run_under_a_ratio_at_prefill(llama, policy, ratio) -> None:
    """The rows keep different numbers of entries; the next tokens (which evict nothing yet) must agree as well."""
    rows_equal_solo_runs(llama, lambda: make(llama, policy, ratio=ratio), (33, 18, 9), 1, 1, 1)


def test_a_mask_of_ones_is_no_mask(llama) -> None:
    turns = [Turn(tokens(14, 2, 20), decode=10), Turn(tokens(15, 2, 6), decode=6)]
    runs = [play(llama, make(llama, "snapkv+hub", budget=8, every=4), turns, pass_mask=m) for m in (True, False)]
    same_bits(*runs)


# --- the cadence, by hand -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_token_by_token_evicts_what_a_prefill_would(llama, policy) -> None:
    """A first eviction at length n chooses the same set whether the n tokens came at once or one by one."""
    ids = torch.stack([distinct(31, 30), distinct(32, 30)])
    slow, fast = make(llama, policy, budget=18, every=12), make(llama, policy, budget=18, every=12)
    for token in ids.split(1, 1):
        forward(llama, token, slow)
    forward(llama, ids, fast)
    same_positions(held(slow), held(fast))
    assert all(positions.shape[-1] == 18 for positions in held(slow).values())
    following = tokens(33, 2, 1)
    torch.testing.assert_close(forward(llama, following, slow), forward(llama, following, fast), atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_one_evicts_at_each_token(llama, policy) -> None:
    steps = play(llama, make(llama, policy, budget=8, every=1), [Turn(tokens(33, 1, 20), decode=8)])
    for step in steps:
        assert step.evicts and all(positions.shape[-1] == 8 for positions in step.after.values())


def test_every_decides_when_a_decode_step_evicts(llama) -> None:
    steps = play(llama, make(llama, "knorm", budget=8, every=5), [Turn(tokens(33, 1, 20), decode=16)])
    assert [step.after[0].shape[-1] for step in steps] == [8, *(9, 10, 11, 12, 8) * 3, 9]


def test_streaming_keeps_sinks_and_recent_tokens(llama) -> None:
    cache = make(llama, "streaming", budget=8, every=4, sinks=3)
    play(llama, cache, [Turn(tokens(34, 1, 20), decode=4)])
    for positions in held(cache).values():
        assert positions[0].tolist() == [[0, 1, 2, 19, 20, 21, 22, 23]] * 2


def test_explicit_protection_is_kept(llama) -> None:
    cache = make(llama, "random", budget=8, every=4, sinks=2, recent=3)
    play(llama, cache, [Turn(tokens(34, 2, 20), decode=8)])
    for positions in held(cache).values():
        assert (positions[..., :2] == torch.tensor([0, 1])).all()
        assert (positions[..., -3:] == torch.tensor([25, 26, 27])).all()


def test_a_protected_prompt_stays(llama) -> None:
    cache = make(llama, "random", budget=16, every=4, protect_prompt=True)
    play(llama, cache, [Turn(tokens(34, 1, 12), decode=20)])
    for positions in held(cache).values():
        assert (positions[..., :12] == torch.arange(12)).all()


# --- copies and resets ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_deep_copy_goes_its_own_way(name, policy) -> None:
    net = model(name)
    cache = make(net, policy, budget=10, every=4)
    play(net, cache, [Turn(*left_padded([tokens(41, 20), tokens(42, 14)]), decode=6)])
    mask = torch.ones(2, cache.get_seq_length(), dtype=torch.long)
    mask[1, :6] = 0
    twin, before = copy.deepcopy(cache), held(cache)
    logits = [[], []]
    for token in tokens(43, 2, 9).split(1, 1):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        logits[0].append(forward(net, token, cache, mask=mask))
    assert twin.get_seq_length() == mask.shape[1] - 9
    same_positions(held(twin), before)
    for index, token in enumerate(tokens(43, 2, 9).split(1, 1), start=mask.shape[1] - 8):
        logits[1].append(forward(net, token, twin, mask=mask[:, :index]))
    assert torch.equal(torch.cat(logits[0]), torch.cat(logits[1]))
    same_positions(held(twin), held(cache))
    twin.check_integrity()


@pytest.mark.parametrize("policy", ["snapkv+hub", "keydiff"])
def test_asking_twice_gives_the_same_answer(llama, policy) -> None:
    """One prefill, two questions on copies of it: the first leaves nothing behind for the second."""
    cache = make(llama, policy, budget=10, every=4)
    forward(llama, tokens(44, 1, 24), cache)
    question = Turn(tokens(45, 1, 5), decode=8)
    answers = [play(llama, copy.deepcopy(cache), [question], pass_mask=False) for _ in range(2)]
    same_bits(*answers)
    same_bits(answers[0], play(llama, cache, [question], pass_mask=False))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_reset_then_rerun_gives_the_same_bits(name, policy) -> None:
    net = model(name)
    cache = make(net, policy, budget=10, every=4)
    first = play(net, cache, padded)
    cache.reset()
    assert cache.get_seq_length() == 0 and len(cache.trace) == 0
    cache.check_integrity()
    second = play(net, cache, padded)
    same_bits(first, second)
    same_positions(first[-1].after, second[-1].after)
    cache.reset()
    play(net, cache, single, pass_mask=False)  # another batch size is fine after a reset


@pytest.mark.parametrize("policy", POLICIES)
def test_crop_takes_back_what_came_after_the_last_eviction(llama, policy) -> None:
    cache = make(llama, policy, budget=10, every=6)
    forward(llama, tokens(46, 1, 20), cache)
    twin = copy.deepcopy(cache)
    for token in tokens(47, 1, 3).split(1, 1):
        forward(llama, token, cache)
    try:
        cache.crop(-3)
    except ValueError as error:  # a policy that has watched the cropped queries may refuse, with the reason
        assert policy not in ("random", "streaming", "knorm", "keydiff") and "queries" in str(error)
        return
    assert cache.get_seq_length() == 20
    cache.check_integrity()
    for token in tokens(48, 1, 8).split(1, 1):
        assert torch.equal(forward(llama, token, cache), forward(llama, token, twin))
    same_positions(held(cache), held(twin))


@pytest.mark.parametrize("operation", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
@pytest.mark.parametrize("policy", POLICIES)
def test_batch_operations_move_whole_rows(llama, policy, operation) -> None:
    """A moved row goes on as it would have: the same entries, padding, observations, and so the same evictions."""
    lengths = (30, 24, 20)
    tokens_of = [distinct(51 + row, length + 16).split((length, 2, 14)) for row, length in enumerate(lengths)]
    prompt, first, later = zip(*tokens_of, strict=True)
    prompt = Turn(*left_padded(list(prompt)))
    cache = make(llama, policy, budget=16, every=6)
    play(llama, cache, [prompt, *map(Turn, torch.stack(first).split(1, 1))])
    moved = copy.deepcopy(cache)
    if operation == "batch_repeat_interleave":
        rows = torch.arange(3).repeat_interleave(2)
        moved.batch_repeat_interleave(2)
    else:
        rows = torch.tensor([2, 0, 0] if operation == "reorder_cache" else [2, 0])
        getattr(moved, operation)(rows)
    moved.check_integrity()
    for step, token in enumerate(torch.stack(later).split(1, 1), start=3):
        mask = torch.cat([prompt.mask, torch.ones(3, step, dtype=torch.long)], 1)
        expected = forward(llama, token, cache, mask=mask)
        logits = forward(llama, token[rows], moved, mask=mask[rows])
        torch.testing.assert_close(logits, expected[rows], atol=1e-4, rtol=0)
        for layer, positions in held(moved).items():
            assert torch.equal(positions, held(cache)[layer][rows]), f"step {step} layer {layer}"
    assert cache.trace.evictions >= 3
    moved.check_integrity()


# --- nothing left behind --------------------------------------------------------------------------


def _fingerprint(net) -> dict:
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_state_dict_hooks",
        "_forward_hooks_with_kwargs",
    )
    state = {
        "config": net.config.to_dict(),
        "implementation": net.config._attn_implementation,
        "dict": sorted(vars(net)),
    }
    for name, module in net.named_modules():
        state[name] = (
            type(module),
            sorted(vars(module)),
            [len(getattr(module, hook, {})) for hook in hooks],
            "forward" in vars(module),
            getattr(getattr(module, "config", None), "_attn_implementation", None),
        )
    return state


@pytest.mark.parametrize(
    ("name", "attention", "policy"),
    [
        *(("llama", "sdpa", policy) for policy in POLICIES),
        *(
            (name, attention, policy)
            for name, attention in (("llama", "eager"), ("gemma3", "sdpa"), ("gpt_oss", "eager"))
            for policy in ("snapkv", "keydiff@model")
        ),
    ],
)
def test_nothing_is_left_on_the_model(name, attention, policy) -> None:
    net = build(name, attention=attention)
    turns = [Turn(tokens(61, 1, 20), decode=8)]
    plain = play(net, DynamicCache(config=net.config), turns)
    before = _fingerprint(net)
    first, second = (make(net, policy, budget=8, every=4) for _ in range(2))
    play(net, first, turns)
    play(net, second, turns)
    same_bits(plain, play(net, DynamicCache(config=net.config), turns))  # while the caches are alive
    del first
    gc.collect()
    play(net, second, [Turn(tokens(62, 1, 4), decode=2)], pass_mask=False)  # the other cache still works
    del second
    gc.collect()
    assert _fingerprint(net) == before
    same_bits(plain, play(net, DynamicCache(config=net.config), turns))


def test_an_exception_in_the_model_leaves_nothing_behind() -> None:
    net = build("llama")
    before = _fingerprint(net)
    cache = make(net, "snapkv", budget=8)
    forward(net, tokens(63, 1, 20), cache)
    with pytest.raises(IndexError):
        forward(net, torch.full((1, 1), 10**6), cache)
    del cache
    gc.collect()
    assert _fingerprint(net) == before


def test_the_model_can_be_freed_before_the_cache() -> None:
    import weakref

    net = build("llama")
    cache = make(net, "snapkv", budget=8)
    forward(net, tokens(63, 1, 20), cache)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
    assert cache.get_seq_length() == 20
