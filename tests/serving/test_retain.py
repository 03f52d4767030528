"""``retain`` makes the choice of a RetentionCache, from transformers' own keys, values, queries and weights."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch
from cache.models import cache_argument, distinct, forward, left_padded, model, positions_of, tokens
from cache.oracle import held
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvretain import Policy, RetentionCache, artefacts, hub_refine, retain, select_topk
from kvretain.cache import support
from kvretain.calibrate import calibrate, load
from kvretain.rope import Rope

MODELS = ("llama", "qwen3", "gemma3")
LIMITS = ({"budget": 13}, {"ratio": 0.6}, {"budget": 14, "sinks": 2, "recent": 3})
PLAIN = (
    "random", "random(seed=3)@layer", "streaming", "knorm", "value-norm(order='l1')", "keydiff", "lagkv(lag=4)",
    "keydiff+hub", "keydiff+hub@layer", "knorm+smd", "keydiff@model", "keydiff@aligned", "keydiff/diverse",
    "keydiff/diverse@layer", "keydiff/diverse@model(combine='max')", "keydiff@shared(floor=0.2)",
    "keydiff+hub@model-heads", "knorm@head(layers='pyramid', beta=4)", "keydiff@layer(layers='pyramid')",
)  # fmt: skip
"""Policies of keys and values alone."""
OBSERVING = (
    "tova", "snapkv", "snapkv(window=4)+hub@model", "snapkv/diverse", "adakv", "pyramidkv", "rkv", "h2o", "h2o@layer",
    "expected", "expected(future=8)@layer", "triattention", "alpha", "routing", "key-diversity", "value-weighting",
)  # fmt: skip
"""Policies that need queries, weights, moments or a calibration."""


@pytest.fixture(autouse=True, scope="module")
def calibrations(tmp_path_factory):
    """One for every model, where policies look by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRETAIN_CACHE", str(tmp_path_factory.mktemp("calibrations")))
        for name in MODELS:
            calibrate(model(name), tokens(77, 200)).save(artefacts.own_path("calibration", model(name)))
        yield


@dataclass
class Prefill:
    """What transformers computed for a batch of prompts, by full-attention layer."""

    keys: list[Tensor]
    values: list[Tensor]
    positions: Tensor
    queries: list[Tensor]
    weights: list[Tensor]
    layers: list[int]
    ropes: list[Rope] = field(default_factory=list)

    def moments(self, first: int = 4) -> list[tuple[Tensor, Tensor]]:
        """Mean and covariance of the queries before RoPE, row by row."""
        found = []
        for queries, rope in zip(self.queries, self.ropes, strict=True):
            means, covariances = [], []
            for row, at in zip(queries, self.positions, strict=True):
                cos, sin = rope.cos_sin(at[at >= first][None])
                plain = rope.unrotate(row[:, at >= first], cos, sin)
                means.append(plain.mean(1))
                covariances.append(torch.stack([head.T.cov(correction=0) for head in plain]))
            found.append((torch.stack(means), torch.stack(covariances)))
        return found

    def attention(self) -> list[Tensor]:
        """Weight received by each entry."""
        real = (self.positions >= 0)[:, None, :, None]
        return [(w * real).sum(2).unflatten(1, (2, -1)).sum(2) for w in self.weights]

    def given(self, policy: Policy, name: str) -> dict:
        """The arguments of ``retain`` for what ``policy`` needs, and no other."""
        found: dict = {}
        if "queries" in policy.needs:
            found["queries"] = [q[:, :, -max(policy.scorer.window, 8) :] for q in self.queries]
        if "attention" in policy.needs:
            found["attention"] = self.attention()
        if "moments" in policy.needs:
            found |= {"moments": self.moments(), "rope": self.ropes}
        if "calibration" in policy.needs:
            path = artefacts.own_path("calibration", model(name))
            found |= {"calibration": load(path), "rope": self.ropes}
        return found


@torch.no_grad()
def prefill(name: str, ids: Tensor, mask: Tensor | None) -> Prefill:
    """Runs a copy of the model whose attention function writes down its queries; weights come from the eager one."""
    seen: dict[int, Tensor] = {}

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen[module.layer_idx] = query.clone()
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    net = copy.deepcopy(model(name))
    net.set_attn_implementation("spy")
    plain = DynamicCache(config=net.config)
    forward(net, ids, plain, mask=mask)
    layers = [index for index, layer in enumerate(plain.layers) if not layer.is_sliding]
    net.set_attn_implementation("eager")
    positions = None if mask is None else positions_of(mask)
    again = {cache_argument(net): DynamicCache(config=net.config)}
    out = net(input_ids=ids, attention_mask=mask, position_ids=positions, output_attentions=True, **again)
    real = torch.ones_like(ids) if mask is None else mask
    return Prefill(
        [plain.layers[i].keys for i in layers],
        [plain.layers[i].values for i in layers],
        (real.cumsum(-1) - 1).masked_fill(real == 0, -1),
        [seen[i] for i in layers],
        [out.attentions[i] for i in layers],
        layers,
        [support.rope_of(net.get_decoder(), i) for i in layers],
    )


def batch(rows: str) -> tuple[Tensor, Tensor | None]:
    if rows == "single":
        return distinct(3, 40)[None], None
    return left_padded([distinct(4, 40), distinct(5, 31)])


def kept(chosen: Tensor, positions: Tensor, heads: int = 2) -> list[list[list[int]]]:
    """Positions of the entries that ``retain`` chose, by row and head."""
    rows = zip(positions.expand(-1, heads, -1), chosen.expand(-1, heads, -1), strict=True)
    return [[p[c if c.dtype == torch.bool else c[c >= 0]].tolist() for p, c in zip(*row, strict=True)] for row in rows]


def agree(chosen: list[Tensor], places: list[Tensor], cache: RetentionCache) -> None:
    """``chosen`` of the entries at ``places (B, H or 1, N)`` are the positions that ``cache`` holds."""
    for own, place, (layer, positions) in zip(chosen, places, held(cache).items(), strict=True):
        expected = [[head[head >= 0].tolist() for head in row] for row in positions]
        assert kept(own, place) == expected, f"layer {layer}"


@pytest.mark.parametrize("rows", ["single", "left-padded"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("policy", [*PLAIN, *OBSERVING])
def test_it_chooses_as_the_cache_does(policy, limit, name, rows) -> None:
    ids, mask = batch(rows)
    cache = RetentionCache.for_model(model(name), policy, **limit)
    forward(model(name), ids, cache, mask=mask)
    run = memo(name, rows)
    chosen = retain(
        run.keys,
        run.values,
        policy=policy,
        positions=run.positions,
        layer=run.layers,
        **limit,
        **run.given(Policy.parse(policy), name),
    )
    agree(chosen, [run.positions[:, None]] * len(chosen), cache)
    assert all(positions.shape[2] < ids.shape[1] for positions in held(cache).values())


_runs: dict[tuple[str, str], Prefill] = {}


def memo(name: str, rows: str) -> Prefill:
    if (name, rows) not in _runs:
        _runs[name, rows] = prefill(name, *batch(rows))
    return _runs[name, rows]


# Later evictions

AGAIN = (
    "streaming", "keydiff+hub", "keydiff@layer", "keydiff@model", "keydiff@aligned", "keydiff@shared",
    "knorm+hub@model-heads", "knorm@head(layers='pyramid', beta=4)", "lagkv(lag=4)", "keydiff/diverse@model",
)  # fmt: skip


@pytest.mark.parametrize("rows", ["single", "left-padded"])
@pytest.mark.parametrize("limit", [{"budget": 11}, {"ratio": 0.75}], ids=str)
@pytest.mark.parametrize("policy", AGAIN)
def test_it_goes_on_from_what_an_earlier_eviction_left(policy, limit, rows) -> None:
    net, (ids, mask) = model("llama"), batch(rows)
    cache = RetentionCache.for_model(net, policy, budget=18, every=8)
    forward(net, ids, cache, mask=mask)
    for step in range(3):
        mask = None if mask is None else torch.cat([mask, torch.ones_like(ids[:, :1])], 1)
        forward(net, tokens(step, len(ids), 1), cache, mask=mask)
    layers = list(cache.layers)
    states = [layer._all() for layer in layers]
    places = [layer.positions.clone() for layer in layers]
    seen = ids.shape[1] + 3 if mask is None else mask.sum(-1)
    chosen = retain(*map(list, zip(*states, strict=True)), policy=policy, positions=places, seen=seen, **limit)
    cache.compress(policy, **limit)
    agree(chosen, places, cache)


def test_a_protected_prompt_stays() -> None:
    net, ids = model("llama"), distinct(6, 30)
    cache = RetentionCache.for_model(net, "knorm+hub", budget=16, every=1, protect_prompt=True)
    forward(net, ids[None, :10], cache)
    for at in range(10, 16):
        forward(net, ids[None, at : at + 1], cache)
    states = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    assert all(keys.shape[2] == 16 for keys, _ in states)
    run = prefill("llama", ids[None, :17], None)
    chosen = retain(run.keys, run.values, policy="knorm+hub", budget=16, prompt=10)
    forward(net, ids[None, 16:17], cache)
    agree(chosen, [run.positions[:, None]] * 2, cache)
    assert all(set(range(10)) < set(head) for row in kept(chosen[0], run.positions[:, None]) for head in row)


# Forms of the same thing


def random_states(seed: int, rows: int = 2, heads: int = 2, entries: int = 40, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, entries, 16, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("policy", ["keydiff", "snapkv+hub", "keydiff@layer", "keydiff@shared", "h2o"])
def test_one_layer_is_a_list_of_one(policy) -> None:
    keys, values = random_states(0)
    given = {"queries": torch.randn(2, 4, 8, 16), "attention": torch.rand(2, 2, 40)}
    given = {need: given[need] for need in Policy.parse(policy).needs}
    one = retain(keys, values, policy=policy, budget=9, **given)
    listed = {need: [value] for need, value in given.items()}
    (several,) = retain([keys], [values], policy=policy, budget=9, **listed)
    assert torch.equal(one, several)
    assert one.shape == {"keydiff@layer": (2, 1, 9), "keydiff@shared": (2, 2, 40)}.get(policy, (2, 2, 9))
    if one.dtype == torch.bool:
        assert one.sum((1, 2)).tolist() == [18, 18]


@pytest.mark.parametrize("policy", [*PLAIN, "snapkv+hub", "rkv", "tova"])
@pytest.mark.parametrize("limit", LIMITS[:2], ids=str)
def test_padding_anywhere_and_its_content_do_not_matter(policy, limit) -> None:
    """Right padding, left padding, gaps, and each row alone; what stands in padding is garbage."""
    sizes, generator = (40, 29), torch.Generator().manual_seed(3)
    alone = [[torch.randn(1, 2, n, 16, generator=generator) for _ in range(4)] for n in sizes]
    queries = [[torch.randn(1, 4, 8, 16, generator=generator)] * 2 for _ in sizes]
    needs = Policy.parse(policy).needs

    def go(states, **given):
        ask = {"queries": given.pop("queries")} if needs else {given.pop("queries") and "policy": policy}
        return retain(states[:2], states[2:], **({"policy": policy} | ask), **limit, **given)

    solo = [go(states, queries=q) for states, q in zip(alone, queries, strict=True)]
    both = [torch.cat(pair) for pair in zip(*queries, strict=True)]
    orders = {
        "right": torch.arange(40) % 40,
        "left": torch.cat([torch.arange(29, 40), torch.arange(29)]),
        "gaps": torch.arange(40).roll(5),
    }
    for order, source in orders.items():
        place = torch.where(source < 29, source, -1)
        if order == "gaps":  # the real entries must rise: spread them out
            place = torch.full((40,), -1).scatter(0, torch.arange(40)[torch.arange(40) % 4 != 1][:29], torch.arange(29))
        states = []
        for long, short in zip(*alone, strict=True):
            padded = torch.full_like(long, torch.nan)
            padded[:, :, place >= 0] = short
            states.append(torch.cat([long, padded]))
        where = {"positions": torch.stack([torch.arange(40), place])}
        if order == "right":
            where = {"lengths": sizes}
        for layer, chosen in enumerate(go(states, queries=both, **where)):
            positions = torch.stack([torch.arange(40), place])[:, None]
            for row, own in enumerate(solo):
                width = sizes[row]
                expected = kept(own[layer], torch.arange(width)[None, None])[0]
                assert kept(chosen, positions)[row] == expected, (order, layer, row)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize(
    "policy", ["knorm", "value-norm", "keydiff+hub", "lagkv(lag=4)", "snapkv", "keydiff/diverse@layer"]
)
def test_every_float_dtype_is_served(policy, dtype) -> None:
    """The choice is that of the same numbers in float32."""
    states = random_states(5, dtype=dtype)
    queries = torch.randn(2, 4, 8, 16) if "snapkv" in policy else None
    chosen = retain(*states, policy=policy, budget=12, queries=queries)
    as_float = [state.float() for state in states]
    assert torch.equal(chosen, retain(*as_float, policy=policy, budget=12, queries=queries))


def test_what_fits_stays_whole() -> None:
    keys, values = random_states(6)
    whole = torch.arange(40).expand(2, 2, -1)
    assert torch.equal(retain(keys, values, policy="full"), whole)
    assert torch.equal(retain(keys, values, policy="knorm", budget=40), whole)
    assert torch.equal(retain(keys, values, policy="knorm@layer", ratio=0), whole[:, :1])
    assert retain(keys, values, policy="knorm@shared", budget=50).all()
    left = retain(keys, values, policy="knorm", budget=40, lengths=[40, 3])
    assert left[1, 0].tolist() == [-1] * 37 + [0, 1, 2]
    assert retain(keys[:, :, :0], values[:, :, :0], policy="knorm", budget=4).shape == (2, 2, 0)


# Scores of one's own


@pytest.mark.parametrize("policy", ["kvzip", "kvzip+hub@model-heads", "fastkvzip@layer", "hubkv", "kvzip-plus"])
def test_policies_that_need_the_model_take_scores(policy) -> None:
    states = [random_states(seed) for seed in range(2)]
    keys, values = map(list, zip(*states, strict=True))
    with pytest.raises(ValueError, match="scores="):
        retain(keys, values, policy=policy, budget=9)
    scores = [torch.rand(2, 2, 40, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    chosen = retain(keys, values, policy=policy, budget=9, scores=scores, sinks=0, recent=0)
    if policy == "kvzip-plus":
        flat = torch.stack(scores, 1).flatten(1)
        best = torch.zeros_like(flat, dtype=torch.bool).scatter(1, flat.topk(36).indices, True)
        assert torch.equal(torch.stack(chosen, 1).flatten(1), best)
    if policy == "fastkvzip@layer":
        assert chosen[0].shape == (2, 1, 9)


def test_a_gate_read_elsewhere_is_the_same_as_the_replay_of_the_cache() -> None:
    """KVzip's own numbers, taken from a cache that recorded them, give KVzip's kept set."""
    net, ids = model("llama"), distinct(8, 40)[None]
    recorded = RetentionCache.for_model(net, "kvzip", ratio=0)
    cache = RetentionCache.for_model(net, "kvzip", budget=12)
    forward(net, ids, recorded)
    forward(net, ids, cache)
    recorded._replay(recorded.policy)
    scores = [layer._numbers() for layer in recorded.layers]
    states = [layer._all() for layer in recorded.layers]
    places = [layer.positions for layer in recorded.layers]
    chosen = retain(*map(list, zip(*states, strict=True)), policy="kvzip", budget=12, scores=scores)
    agree(chosen, places, cache)


def test_scores_are_refined_and_selected_by_the_policy() -> None:
    keys, values = random_states(9, rows=1)
    scores = torch.rand(1, 2, 40, generator=torch.Generator().manual_seed(1))
    plain = retain(keys, values, policy="knorm", budget=9, scores=scores, sinks=0, recent=0)
    assert torch.equal(plain, select_topk(scores, 9))
    refined = retain(keys, values, policy="kvzip+hub", ratio=0.8, scores=scores, sinks=0, recent=0)
    assert torch.equal(refined, select_topk(hub_refine(scores, 0.8), 8))
    assert not torch.equal(
        refined, retain(keys, values, policy="kvzip@head", ratio=0.8, scores=scores, sinks=0, recent=0)
    )
    shifted = retain(keys, values, policy="keydiff+hub", ratio=0.8, scores=scores - 5, sinks=0, recent=0)
    lowest = scores - scores.amin(-1, keepdim=True)
    assert torch.equal(shifted, select_topk(hub_refine(lowest, 0.8), 8))


# Errors

KEYS, VALUES = random_states(11)
ROPE = Rope.plain(10000.0 ** (-torch.arange(0, 16, 2) / 16))
MOMENTS = (torch.zeros(2, 4, 16), torch.zeros(2, 4, 16, 16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "snapkv"}, ["'snapkv'", "queries=", "last 8 queries", "scores="]),
        ({"policy": "snapkv(window=3)"}, ["queries=", "(B, Hq, 3, D)"]),
        ({"policy": "h2o"}, ["attention=", "(B, H, N)"]),
        ({"policy": "expected@head"}, ["moments="]),
        ({"policy": "expected@head", "moments": MOMENTS}, ["rope=", "Rope.plain"]),
        ({"policy": "trig"}, ["calibration=", "kvretain.calibrate.load"]),
        ({"policy": "trig", "calibration": 3}, ["rope="]),
        ({"policy": "trig", "calibration": 3, "rope": ROPE}, ["calibration of layer 0", "pair"]),
        ({"policy": "kvzip@head"}, ["'kvzip@head'", "reads the tokens a second time", "RetentionCache"]),
        ({"policy": "kvzip(normalise=True)@head"}, ["reads the tokens a second time"]),
        ({"policy": "fastkvzip@head"}, ["'fastkvzip@head'", "hidden states"]),
        ({"policy": "knorm~nearest"}, ["'~' part", "policy.merger.merge"]),
        ({"policy": "alpha"}, ["choose together", "lists"]),
        ({"policy": "knorm@head(layers='pyramid')"}, ["choose together", "lists"]),
        ({"policy": "nope"}, ["unknown scorer 'nope'"]),
        ({"ratio": 0.5}, ["either budget", "ratio"]),
        ({"budget": None}, ["either budget"]),
        ({"budget": 0}, ["budget is a whole number of at least 1"]),
        ({"sinks": 9, "recent": 9}, ["18 protected entries", "budget of 9"]),
        ({"prompt": 12}, ["12 protected entries", "budget of 9"]),
        ({"keys": KEYS[0]}, ["keys of layer 0", "(2, 40, 16)"]),
        ({"keys": KEYS.long()}, ["keys of layer 0", "torch.int64"]),
        ({"values": VALUES[:, :, :7]}, ["values of layer 0", "(2, 2, 40, Dv)", "(2, 2, 7, 16)"]),
        ({"values": [VALUES]}, ["values of layer 0", "list"]),
        ({"keys": [], "values": []}, ["at least one layer"]),
        ({"keys": [KEYS], "values": VALUES}, ["values must be a list", "1 layers"]),
        ({"positions": torch.arange(7)}, ["positions of layer 0", "(40,)", "(7,)"]),
        ({"positions": torch.arange(40.0)}, ["positions of layer 0", "int"]),
        ({"positions": torch.arange(40).flip(0)}, ["rise strictly"]),
        ({"positions": torch.arange(40) // 2}, ["rise strictly"]),
        ({"positions": torch.arange(40) - 5}, ["rise strictly", "-1 is padding"]),
        ({"lengths": [40, 41]}, ["41", "40 entries"]),
        ({"lengths": [40]}, ["lengths", "2 rows"]),
        ({"lengths": -1}, ["lengths", "at least 0"]),
        ({"seen": 12}, ["row 0", "position 39", "12"]),
        ({"seen": [40, 40, 40]}, ["seen", "2 rows"]),
        ({"policy": "snapkv", "queries": torch.randn(2, 4, 5, 16)}, ["last 8 queries", "not 5"]),
        ({"policy": "snapkv", "queries": torch.randn(2, 3, 8, 16)}, ["3 query heads", "2 key/value heads"]),
        ({"policy": "snapkv", "queries": torch.randn(2, 4, 8, 12)}, ["queries of layer 0", "(2, Hq, W, 16)"]),
        ({"policy": "snapkv", "queries": torch.randn(2, 4, 8, 16), "lengths": 8}, ["window of 8", "only 8"]),
        ({"policy": "h2o", "attention": torch.rand(2, 4, 40)}, ["attention of layer 0", "(2, 2, 40)"]),
        ({"policy": "expected@head", "moments": MOMENTS[:1], "rope": ROPE}, ["moments of layer 0", "pair"]),
        ({"policy": "expected@head", "moments": MOMENTS, "rope": 3}, ["kvretain.rope.Rope", "int"]),
        ({"scores": torch.rand(2, 2, 39)}, ["scores of layer 0", "(2, 2, 40)"]),
        ({"scores": torch.full((2, 2, 40), torch.nan)}, ["scores of layer 0", "NaN"]),
        ({"policy": "kvzip+hub", "scores": -torch.rand(2, 2, 40)}, ["egative"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value[0],
)  # fmt: skip
def test_errors_say_what_to_give(change, words) -> None:
    given = {"keys": KEYS, "values": VALUES, "policy": "knorm", "budget": 9} | change
    if given.get("policy") == "snapkv" and "lengths" in given:
        given["budget"] = 6
    with pytest.raises(ValueError) as error:
        retain(given.pop("keys"), given.pop("values"), **given)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_sets_that_are_shared_must_have_been_shared_before() -> None:
    apart = torch.stack([torch.arange(40), torch.arange(40) + 1]).expand(2, -1, -1)
    retain(KEYS, VALUES, policy="knorm", budget=9, positions=apart)
    with pytest.raises(ValueError, match="chooses one set for all heads"):
        retain(KEYS, VALUES, policy="knorm@layer", budget=9, positions=apart)
    several = {"positions": [torch.arange(40), torch.arange(40) + 1], "budget": 9}
    retain([KEYS] * 2, [VALUES] * 2, policy="knorm@layer", **several)
    with pytest.raises(ValueError, match="one set for all heads and layers"):
        retain([KEYS] * 2, [VALUES] * 2, policy="knorm@model", **several)
    with pytest.raises(ValueError, match="one set for all layers"):
        retain([KEYS] * 2, [VALUES] * 2, policy="knorm@aligned", **several)
    unequal = torch.stack([torch.arange(40), torch.arange(40).masked_fill(torch.arange(40) < 3, -1)]).expand(2, -1, -1)
    retain(KEYS, VALUES, policy="knorm@shared", budget=9, positions=unequal)
    with pytest.raises(ValueError, match="from unequal numbers"):
        retain(KEYS, VALUES, policy="knorm", budget=9, positions=unequal)


def test_transformers_is_not_imported() -> None:
    program = """
import sys, torch, kvretain, kvretain.serving, kvretain.integrations.lmcache
keys, values = torch.randn(2, 1, 2, 64, 16)
kvretain.retain(keys, values, policy="snapkv+hub", budget=20, queries=torch.randn(1, 4, 8, 16))
kvretain.retain([keys] * 2, [values] * 2, policy="knorm@model-heads", ratio=0.5)
heavy = {"transformers", "typer", "rich", "safetensors", "numpy", "lmcache"} & sys.modules.keys() - BEFORE
assert not heavy, heavy
""".replace("BEFORE", "{'numpy'}")  # torch itself imports numpy where it is installed
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
