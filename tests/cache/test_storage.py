"""Memory is really freed, written in place, and counted: measured on the tensors, after every forward."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvretain import RetentionCache

from .models import build, cache_argument, forward, left_padded, model, tokens
from .oracle import Turn, held, play

BUDGET, EVERY = 10, 6
POLICIES = (
    "random",
    "streaming",
    "knorm",
    "keydiff",
    "tova",
    "snapkv",
    "h2o",
    "snapkv+hub",
    "knorm@layer",
    "keydiff@model",
)


def make(net, policy: str = "knorm", **options) -> RetentionCache:
    return RetentionCache.for_model(net, policy, **({"budget": BUDGET, "every": EVERY} | options))


def retained(cache) -> list:
    return [layer for layer in cache.layers if hasattr(layer, "positions")]


def sliding(cache) -> list:
    return [layer for layer in cache.layers if not hasattr(layer, "positions")]


def entry_bytes(layer) -> int:
    """Bytes of one entry in all heads and rows of ``layer``."""
    return sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in (layer.keys, layer.values))


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def measured(layers) -> int:
    """Bytes behind the keys and values of ``layers``, each storage counted once."""
    return sum(dict(storage(tensor) for layer in layers for tensor in (layer.keys, layer.values)).values())


def owned_bytes(cache) -> int:
    """Every byte that a walk over the cache's own objects can reach, each storage counted once."""
    storages, visited, todo = {}, set(), [cache.layers, getattr(cache, "_session", None)]
    while todo:
        item = todo.pop()
        if id(item) in visited or isinstance(item, torch.nn.Module):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            storages.update([storage(item)])
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list | tuple | set):
            todo += item
        elif hasattr(item, "__dict__"):
            todo += vars(item).values()
    return sum(storages.values())


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_multi_token_pass_the_bytes_are_those_of_the_kept_entries(policy, name, dtype) -> None:
    net = model(name, dtype=dtype)
    cache = make(net, policy)
    for turn in (tokens(1, 2, 30), tokens(2, 2, 5), tokens(3, 2, 17)):
        forward(net, turn, cache)
        exact = sum(BUDGET * entry_bytes(layer) for layer in retained(cache))
        assert measured(retained(cache)) == exact
        assert cache.nbytes == exact + measured(sliding(cache))


@pytest.mark.parametrize("policy", ["knorm", "snapkv", "keydiff@model"])
def test_a_prefill_that_fits_stores_no_more_than_itself(llama, policy) -> None:
    cache = make(llama, policy, budget=64)
    forward(llama, tokens(1, 2, 20), cache)
    assert cache.nbytes == sum(20 * entry_bytes(layer) for layer in cache.layers) == measured(cache.layers)


@pytest.mark.parametrize("policy", POLICIES)
def test_decoding_stays_within_budget_plus_every_and_writes_in_place(llama, policy) -> None:
    cache = make(llama, policy)
    forward(llama, tokens(1, 2, 30), cache)
    pointers = None
    for token in tokens(2, 2, 40).split(1, 1):
        forward(llama, token, cache)
        for layer in cache.layers:
            assert measured([layer]) <= (BUDGET + EVERY) * entry_bytes(layer)
        assert cache.nbytes == measured(cache.layers)
        now = [storage(tensor)[0] for layer in cache.layers for tensor in (layer.keys, layer.values)]
        assert pointers in (None, now), "decoding moved the storage"
        pointers = now


@pytest.mark.parametrize("policy", POLICIES)
def test_bookkeeping_is_small_beside_the_entries(policy) -> None:
    """Everything the cache owns, positions and observations included, measured at a realistic head size and budget.

    Positions cost at most 5 % of the entries. Policies that watch attention keep a few queries (snapkv: window x query
    heads) or one number per entry and head (h2o), which does not grow with the tokens seen.
    """
    net = build("llama", head_dim=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
    cache = make(net, policy, budget=128, every=32)
    forward(net, tokens(1, 1, 600), cache)
    first = owned_bytes(cache)
    for token in tokens(2, 1, 40).split(1, 1):
        forward(net, token, cache)
    observed = {"snapkv": 16 * 4 * 64 * 4, "snapkv+hub": 16 * 4 * 64 * 4, "tova": 4 * 64 * 4, "h2o": 160 * 2 * 4}.get(
        policy, 0
    )
    assert cache.nbytes == measured(cache.layers) == sum(160 * entry_bytes(layer) for layer in cache.layers)
    assert owned_bytes(cache) <= cache.nbytes * 1.05 + len(cache.layers) * (observed + 512)
    assert first <= sum(128 * entry_bytes(layer) for layer in cache.layers) * 1.05 + len(cache.layers) * (
        observed + 512
    )


def test_a_ratio_frees_memory_at_prefill(llama) -> None:
    full, half = make(llama, budget=200), make(llama, budget=None, ratio=0.75)
    for cache in (full, half):
        forward(llama, tokens(1, 1, 100), cache)
    assert half.nbytes * 4 == full.nbytes


def test_reset_frees_everything(llama) -> None:
    cache = make(llama, "snapkv")
    forward(llama, tokens(1, 2, 30), cache)
    cache.reset()
    assert cache.nbytes == 0
    assert owned_bytes(cache) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", ["knorm", "snapkv+hub", "h2o"])
def test_dtype_and_device_of_each_layer_are_kept(policy, dtype) -> None:
    net = model("llama", dtype=dtype)
    cache = make(net, policy)
    play(net, cache, [Turn(tokens(1, 1, 20), decode=12)])
    for layer in cache.layers:
        assert layer.keys.dtype == layer.values.dtype == dtype
        assert layer.keys.device == layer.values.device == torch.device("cpu")
        assert layer.positions.dtype == torch.int64


def test_a_cache_holds_no_autograd_graph(llama) -> None:
    cache = make(llama, "snapkv")
    llama(input_ids=tokens(1, 1, 20), **{cache_argument(llama): cache})  # with gradients enabled
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in (layer.keys, layer.values))


# --- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["knorm", "snapkv", "keydiff@model"])
def test_logical_and_physical_length_are_two_numbers(llama, policy) -> None:
    cache = make(llama, policy)
    seen = 0
    for ids in (tokens(1, 2, 30), *tokens(2, 2, 9).split(1, 1), tokens(3, 2, 4), *tokens(4, 2, 9).split(1, 1)):
        forward(llama, ids, cache)
        seen += ids.shape[1]
        kept = retained(cache)[0].positions.shape[-1]
        assert cache.get_seq_length() == seen
        for index, layer in enumerate(cache.layers):
            assert layer.keys.shape[2] == layer.values.shape[2] == kept
            assert cache.get_mask_sizes(1, index) == (kept + 1, seen - kept)
            assert cache.get_mask_sizes(7, index) == (kept + 7, seen - kept)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("policy", ["snapkv+hub", "knorm", "keydiff@model"])
def test_sliding_layers_are_transformers_own(name, policy) -> None:
    """Same class, length, positions of entries; the first one, which sees no evicted state below it, same bits."""
    net = model(name)
    cache, plain = make(net, policy), DynamicCache(config=net.config)
    turns = [Turn(*left_padded([tokens(1, 30), tokens(2, 22)]), decode=14)]
    steps = play(net, cache, turns)
    replay = torch.cat([steps[0].ids, *(step.ids for step in steps[1:])], 1)
    for step in steps:
        forward(net, step.ids, plain, mask=step.mask)
    assert replay.shape[1] == cache.get_seq_length()
    assert [type(layer) for layer in sliding(cache)] == [type(layer) for layer in plain.layers if layer.is_sliding]
    for index, layer in enumerate(cache.layers):
        assert layer.is_sliding == plain.layers[index].is_sliding
        if layer.is_sliding:
            assert layer.keys.shape == plain.layers[index].keys.shape
            assert layer.get_seq_length() == plain.layers[index].get_seq_length()
            assert cache.get_mask_sizes(1, index) == plain.get_mask_sizes(1, index)
    assert cache.layers[0].is_sliding and torch.equal(cache.layers[0].keys, plain.layers[0].keys)


# --- trace ----------------------------------------------------------------------------------------


COLUMNS = ("step", "layer", "tokens", "seen", "kept", "evicted", "nbytes")


class NaiveTrace:
    """The same numbers the slow way: look at the cache after every forward."""

    def __init__(self, cache) -> None:
        self.cache = cache
        self.rows: list[dict[str, int]] = []
        self.kept: dict[int, int] = {}
        self.steps = 0

    def record(self, fed: int) -> None:
        layers = [(i, layer) for i, layer in enumerate(self.cache.layers) if hasattr(layer, "positions")]
        for index, layer in layers:
            kept = layer.positions.shape[-1]
            self.rows.append(
                {
                    "step": self.steps,
                    "layer": index,
                    "tokens": fed,
                    "seen": self.cache.get_seq_length(),
                    "kept": kept,
                    "evicted": self.kept.get(index, 0) + fed - kept,
                    "nbytes": measured([layer]),
                }
            )
            self.kept[index] = kept
        self.steps += 1

    def cropped(self, columns: int) -> None:
        """A crop takes entries back without evicting them; the passes that brought them stay on record."""
        self.kept = {index: kept - columns for index, kept in self.kept.items()}

    def columns(self) -> dict[str, list[int]]:
        return {name: [row[name] for row in self.rows] for name in COLUMNS}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("policy", ["full", *POLICIES])
def test_the_trace_equals_a_recording_after_every_forward(policy, name) -> None:
    net = model(name)
    cache = make(net, policy)
    naive = NaiveTrace(cache)
    for ids in (
        tokens(1, 2, 30),
        *tokens(2, 2, 15).split(1, 1),
        tokens(3, 2, 5),
        tokens(4, 2, 5),
        *tokens(5, 2, 9).split(1, 1),
    ):
        forward(net, ids, cache)
        naive.record(ids.shape[1])
    expected = naive.columns()
    assert cache.trace.to_dict() == expected
    assert len(cache.trace) == naive.steps
    assert cache.trace.mean_length == pytest.approx(sum(expected["kept"]) / len(expected["kept"]))
    assert cache.trace.peak_length == max(expected["kept"])
    assert cache.trace.peak_attended == max(k + e for k, e in zip(expected["kept"], expected["evicted"], strict=True))
    by_step = [sum(row["nbytes"] for row in naive.rows if row["step"] == step) for step in range(naive.steps)]
    assert cache.trace.peak_nbytes == max(by_step)
    assert cache.trace.evictions == len({row["step"] for row in naive.rows if row["evicted"]})
    assert cache.trace.evicted == sum(expected["evicted"]) // len(retained(cache))


def test_the_trace_of_a_padded_ratio_run_counts_stored_entries(llama) -> None:
    cache = make(llama, "snapkv", budget=None, ratio=0.5)
    naive = NaiveTrace(cache)
    ids, mask = left_padded([tokens(1, 24), tokens(2, 9)])
    forward(llama, ids, cache, mask=mask)
    naive.record(24)
    for index, token in enumerate(tokens(3, 2, 14).split(1, 1), start=1):
        forward(llama, token, cache, mask=torch.cat([mask, torch.ones(2, index, dtype=torch.long)], 1))
        naive.record(1)
    assert cache.trace.to_dict() == naive.columns()


def test_the_trace_exports_to_arrow(llama) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    cache = make(llama)
    play(llama, cache, [Turn(tokens(1, 1, 20), decode=10)])
    table = cache.trace.to_arrow()
    assert isinstance(table, pyarrow.Table)
    assert table.to_pydict() == cache.trace.to_dict()


# --- random call orders ---------------------------------------------------------------------------

OPERATIONS = st.one_of(
    st.tuples(st.just("feed"), st.integers(2, 18)),
    st.tuples(st.just("padded"), st.integers(2, 9)),
    st.tuples(st.just("decode"), st.integers(1, 9)),
    st.tuples(st.just("reorder"), st.permutations([0, 1, 2])),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 2), min_size=3, max_size=3)),
    st.tuples(st.just("deepcopy"), st.none()),
    st.tuples(st.just("reset"), st.none()),
    st.tuples(st.just("crop"), st.integers(1, 3)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    policy=st.sampled_from(POLICIES),
    name=st.sampled_from(["llama", "llama", "gemma3"]),
    options=st.sampled_from(
        [
            {"budget": 7, "every": 3},
            {"budget": 9, "every": 1},
            {"budget": 8, "every": 5, "trigger": "periodic"},
            {"ratio": 0.6, "budget": None, "every": 3},
        ]
    ),
    operations=st.lists(OPERATIONS, min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_integrity_in_any_order_of_calls(policy, name, options, operations, seed) -> None:
    """After every call: the cache's own check, sizes against tensors, trace against recording, order of positions."""
    net = model(name)
    cache = make(net, policy, **options)
    naive = NaiveTrace(cache)
    mask = torch.zeros(3, 0, dtype=torch.long)
    for number, (operation, argument) in enumerate(operations):
        if operation in ("feed", "padded", "decode"):
            size = argument if operation != "decode" else 1
            for repeat in range(argument if operation == "decode" else 1):
                new = torch.ones(3, size, dtype=torch.long)
                if operation == "padded":
                    new[0, : size // 2] = 0
                    new[2, : size - 1] = 0
                mask = torch.cat([mask, new], 1)
                ids = tokens(seed + 31 * number + repeat, 3, size)
                try:
                    logits = forward(net, ids, cache, mask=mask)
                except ValueError as error:
                    assert "window" in str(error), error  # a context too short for the scorer's window
                    mask = mask[:, :-size]
                    break
                assert bool(logits[new.bool()].isfinite().all())
                naive.record(size)
                check(cache, mask, naive)
        elif operation == "reorder" and mask.shape[1]:
            order = torch.tensor(argument)
            cache.reorder_cache(order)
            mask = mask[order]
        elif operation == "deepcopy":
            cache = copy.deepcopy(cache)
            naive.cache = cache
        elif operation == "reset":
            cache.reset()
            mask = mask[:, :0]
            naive = NaiveTrace(cache)
        elif operation == "crop" and mask.shape[1] > argument:
            before = held(cache)
            try:
                cache.crop(-argument)
            except ValueError:
                assert all(torch.equal(before[layer], positions) for layer, positions in held(cache).items())
            else:
                mask = mask[:, :-argument]
                naive.cropped(argument)
        check(cache, mask, naive)


def check(cache, mask: torch.Tensor, naive: NaiveTrace) -> None:
    cache.check_integrity()
    assert cache.get_seq_length() == mask.shape[1]
    real = mask.sum(-1)
    for layer in retained(cache):
        if not mask.shape[1]:
            assert layer.positions.numel() == 0
            continue
        positions = layer.positions
        assert positions.shape[:2] == layer.keys.shape[:2] and positions.shape[2] == layer.keys.shape[2]
        for row, row_positions in enumerate(positions):
            for head in row_positions.tolist():
                kept = [p for p in head if p >= 0]
                assert kept == sorted(set(kept))
                assert all(p < real[row] for p in kept)
                assert kept or not real[row], "an empty row"
    assert cache.nbytes == (
        measured([layer for layer in cache.layers if layer.keys is not None]) if mask.shape[1] else 0
    )
    assert cache.trace.to_dict() == naive.columns()
