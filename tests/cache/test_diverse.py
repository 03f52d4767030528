"""α in the cache: the oracle, the kept set against a plain prefill, and signatures computed once per token."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from transformers import DynamicCache

from kvretain import Policy, RetentionCache, artefacts, select_diverse, value_signatures
from kvretain.calibrate import calibrate
from kvretain.select import Diverse
from kvretain.select.signatures import mean_values

from .models import distinct, forward, left_padded, model, tokens
from .oracle import compare, held, play
from .test_oracle import SCRIPTS, Cell, agrees, oracle, run

POLICIES = (
    "keydiff/diverse@model(combine='max')",
    "keydiff/diverse(centre=True, standardise=True)@layer",
    "snapkv+hub/diverse",
    "keydiff/diverse(weight=2.0, redundancy='mean')@aligned(combine='mean')",
    "snapkv@aligned",
)
SITUATIONS = ("chunked prefill", "turns left-padded ratio", "left-padded short row", "beams")
MODEL = "keydiff/diverse@model"


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_oracle_agrees(policy, name, situation):
    steps = run(Cell(policy, name, situation))
    assert compare(oracle(name, torch.float32), steps, atol=1e-4).evictions >= 2
    for step in steps:
        layers = list(step.after.values())
        if policy.partition("@")[2].startswith(("model", "aligned")):
            assert all(torch.equal(layers[0], other) for other in layers[1:]), "layers keep different sets"
    if "aligned" in policy:
        assert any(not torch.equal(p[:, 0], p[:, 1]) for step in steps for p in step.after.values())


@pytest.mark.parametrize("policy", ["knorm/diverse(weight=1.5)@head(layers='pyramid', beta=4)"])
def test_layers_with_budgets_of_their_own(policy):
    agrees(policy, "llama", "turns left-padded")


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_kept_set_is_that_of_the_values_of_a_plain_prefill(name):
    """Whole model, from transformers' own keys and values; sliding layers have no say."""
    net, ids, mask = model(name), *left_padded([distinct(1, 29), distinct(2, 25)])
    plain = DynamicCache(config=net.config)
    forward(net, ids, plain, mask=mask)
    full = [layer for layer in plain.layers if not layer.is_sliding]
    cache = RetentionCache.for_model(
        net, "knorm/diverse(weight=0.8)@model(combine='max')", budget=14, sinks=1, recent=2
    )
    forward(net, ids, cache, mask=mask)
    changed = False
    for row, real in enumerate(mask.bool()):
        scores = torch.stack([-layer.keys[row][:, real].norm(dim=-1) for layer in full]).amax((0, 1))
        signatures = value_signatures([layer.values[row : row + 1][:, :, real] for layer in full])[0]
        place = torch.arange(len(scores))
        protected = (place < 1) | (place >= len(scores) - 2)
        expected = select_diverse(scores, signatures, 14, weight=0.8, protected=protected)
        changed |= not torch.equal(expected, select_diverse(scores, signatures, 14, weight=0, protected=protected))
        for positions in held(cache).values():
            assert positions[row].tolist() == [expected.tolist()] * 2
    assert changed, "the penalty changes nothing here"


def picked(scores: list[float], vectors: list[list[float]], keep: int, weight: float, protected: set[int]) -> list[int]:
    """α's pick by a plain loop over cosines of ``vectors``."""

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))

    kept = sorted(protected)
    while len(kept) < keep:
        worth = {
            i: scores[i] - weight * max(cosine(vectors[i], vectors[j]) for j in kept)
            for i in range(len(scores))
            if i not in kept
        }
        kept.append(max(worth, key=worth.__getitem__))
    return sorted(kept)


@pytest.mark.parametrize("scope", ["head", "model(combine='max')"])
def test_the_space_of_keys_compares_keys_where_values_say_otherwise(scope):
    net, ids = model("llama"), distinct(1, 29)
    plain = DynamicCache(config=net.config)
    forward(net, ids[None], plain)
    cache = RetentionCache.for_model(
        net, f"knorm/diverse(weight=4.0, space='keys')@{scope}", budget=12, sinks=1, recent=2
    )
    forward(net, ids[None], cache)
    norms = torch.stack([-layer.keys[0].norm(dim=-1) for layer in plain.layers])  # (layers, H, N)
    states = {name: torch.stack([getattr(layer, name)[0] for layer in plain.layers]) for name in ("keys", "values")}
    if scope == "head":
        cells = [(layer, head) for layer in range(2) for head in range(2)]
        scores = {cell: norms[cell] for cell in cells}
        vectors = {name: {cell: state[cell] for cell in cells} for name, state in states.items()}
    else:
        cells = [(0, 0)]
        scores = {(0, 0): norms.amax((0, 1))}
        vectors = {name: {(0, 0): state.mean((0, 1))} for name, state in states.items()}
    for layer, head in cells:
        given = scores[layer, head].tolist()
        by_keys, by_values = (
            picked(given, vectors[name][layer, head].double().tolist(), 12, 4.0, {0, 27, 28}) for name in states
        )
        assert held(cache)[layer][0, head].tolist() == by_keys
        assert by_keys != by_values and by_keys != picked(
            given, vectors["keys"][layer, head].tolist(), 12, 0.0, {0, 27, 28}
        )


@pytest.mark.parametrize("scope", ["head", "layer", "model", "aligned"])
def test_weight_0_is_top_k(scope):
    net, kept = model("llama"), []
    for policy in (f"keydiff/diverse(weight=0.0)@{scope}", f"keydiff@{scope}", f"keydiff/diverse@{scope}"):
        options, script = SCRIPTS["turns left-padded"]
        cache = RetentionCache.for_model(net, policy, **options)
        steps = play(net, cache, script)
        kept.append([torch.cat([p.flatten() for p in step.after.values()]) for step in steps])
    assert all(torch.equal(a, b) for a, b in zip(kept[0], kept[1], strict=True))
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(kept[0], kept[2], strict=True))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A calibration for each model, where policies look by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRETAIN_CACHE", str(tmp_path_factory.mktemp("calibrations")))
        for name in ("llama", "qwen3", "gemma3"):
            calibrate(model(name), tokens(77, 200)).save(artefacts.own_path("calibration", model(name)))
        yield


@pytest.mark.parametrize("situation", ["turns left-padded ratio", "beams", "single"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("policy", ["alpha", "trig+hub/diverse", "trig/diverse@aligned(combine='mean')"])
@pytest.mark.usefixtures("calibrated")
def test_on_top_of_triattention(policy, name, situation):
    steps = run(Cell(policy, name, situation))
    assert compare(oracle(name, torch.float32), steps, atol=1e-4).evictions >= 2


@pytest.mark.usefixtures("calibrated")
def test_alpha_without_a_penalty_is_triattentions_union():
    options, script = SCRIPTS["turns left-padded"]
    kept = []
    for policy in ("alpha", "trig/diverse(weight=0.0)@model(combine='max')", "triattention-union"):
        steps = play(model("llama"), RetentionCache.for_model(model("llama"), policy, **options), script)
        kept.append([next(iter(step.after.values())) for step in steps])
    assert all(torch.equal(a, b) for a, b in zip(kept[1], kept[2], strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(kept[0], kept[1], strict=True))
    assert Policy.parse("alpha").selector == Diverse(weight=0.5)


# --- signatures are carried -----------------------------------------------------------------------


def check_carried(cache: RetentionCache, selector: Diverse) -> None:
    """What is carried for the surviving entries is bitwise what their cached values give."""
    session = cache._session
    owner, carried = session.values
    assert owner == selector and carried.dtype == torch.float32 and carried.shape[1] == session.evicted_to
    layers = [layer for layer in cache.layers if isinstance(getattr(layer, "positions", None), torch.Tensor)]
    fresh = mean_values([v.values[:, :, : session.evicted_to] for v in layers], normalise_heads=owner.normalise_heads)
    real = layers[0].positions[:, 0, : session.evicted_to] >= 0
    assert torch.equal(carried[real], fresh[real])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("situation", ["turns left-padded", "turns left-padded ratio", "chunked prefill"])
def test_carried_signatures_equal_computed_ones(situation, dtype):
    options, script = SCRIPTS[situation]
    net = model("gemma3", dtype=dtype)
    selector = Diverse(normalise_heads=situation == "chunked prefill")
    policy = f"keydiff/diverse(normalise_heads={selector.normalise_heads})@model"
    cache = RetentionCache.for_model(net, policy, **options)
    seen = torch.zeros(len(script[0].ids), 0, dtype=torch.long)
    for turn in script:
        passes = [(turn.ids, torch.ones_like(turn.ids) if turn.mask is None else turn.mask)]
        one = torch.ones(len(turn.ids), 1, dtype=torch.long)
        passes += [(tokens(n, len(one), 1), one) for n in range(turn.decode)]
        for ids, mask in passes:
            seen = torch.cat([seen, mask.long()], 1)
            forward(net, ids, cache, mask=seen)
            if cache._session.values is not None:
                check_carried(cache, selector)
    assert cache.trace.evictions >= 3


def test_an_eviction_reads_the_new_tokens_only(monkeypatch):
    net, read = model("llama"), []
    mean = Diverse.mean_values

    def spy(self, values):
        read.append(values[0].shape[2])
        return mean(self, values)

    monkeypatch.setattr(Diverse, "mean_values", spy)
    cache = RetentionCache.for_model(net, MODEL, budget=14, every=4)
    read.clear()  # a self-test may have come first
    forward(net, tokens(0, 2, 30), cache)
    for n in range(12):
        forward(net, tokens(n, 2, 1), cache)
    forward(net, tokens(1, 2, 7), cache)
    assert cache.trace.evictions == 5
    assert read == [30, 4, 4, 4, 7]


def started(policy: str = MODEL, **options) -> RetentionCache:
    cache = RetentionCache.for_model(model("llama"), policy, **({"budget": 14, "every": 4} | options))
    ids, mask = left_padded([tokens(0, 30), tokens(1, 24), tokens(2, 9)])
    forward(model("llama"), ids, cache, mask=mask)
    return cache


def go_on(cache: RetentionCache, rows: list[int], count: int = 9) -> list:
    """Decodes ``count`` fixed tokens for the rows that are left; what each layer then holds."""
    net, mask = model("llama"), cache._session.mask.long()
    for n in range(count):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        forward(net, tokens(50 + n, 3, 1)[rows], cache, mask=mask)
    return [layer.positions for layer in cache.layers]


@pytest.mark.parametrize("rows", [[2, 0], [1, 1, 0], [1]])
def test_rows_take_their_signatures_along(rows):
    expected = go_on(started(), [0, 1, 2])
    for move in ("reorder_cache", "batch_select_indices"):
        cache = started()
        getattr(cache, move)(torch.tensor(rows))
        check_carried(cache, Diverse())
        for got, whole in zip(go_on(cache, rows), expected, strict=True):
            assert torch.equal(got, whole[rows])
        check_carried(cache, Diverse())


def test_a_copy_goes_its_own_way():
    cache = started()
    other = copy.deepcopy(cache)
    before = cache._session.values[1].clone()
    go_on(other, [0, 1, 2])
    assert torch.equal(cache._session.values[1], before)
    check_carried(cache, Diverse())
    check_carried(other, Diverse())


def test_reset_forgets_them():
    cache = started()
    cache.reset()
    assert cache._session.values is None
    forward(model("llama"), tokens(4, 1, 30), cache)
    check_carried(cache, Diverse())


def test_taking_tokens_back_leaves_them():
    cache, straight = started(), started()
    go_on(cache, [0, 1, 2], 2)
    cache.crop(-2)
    check_carried(cache, Diverse())
    for got, expected in zip(go_on(cache, [0, 1, 2]), go_on(straight, [0, 1, 2]), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("between", ["keydiff@model", "keydiff/diverse(normalise_heads=True)@model"])
def test_another_policy_between_two_passes_leaves_nothing_stale(between):
    cache = started(budget=16)
    cache.compress(between, budget=12)
    if between == "keydiff@model":
        assert cache._session.values is None
    else:
        check_carried(cache, Diverse(normalise_heads=True))
    go_on(cache, [0, 1, 2])
    check_carried(cache, Diverse())


def test_other_scopes_carry_nothing():
    for policy in ("keydiff/diverse", "keydiff/diverse@layer", "keydiff/diverse@aligned", "keydiff@model"):
        assert started(policy)._session.values is None


def test_what_is_carried_is_forgotten_when_heads_compete():
    """Unequal heads carry nothing, so what an earlier choice carried is of other entries by the next one."""
    net = model("llama")
    wide, uneven = "knorm/diverse@model", "streaming@shared(floor=1.0)"
    cache = RetentionCache.for_model(net, uneven, ratio=0)
    forward(net, tokens(0, 1, 40), cache)
    cache.compress(wide, budget=20)
    assert cache._session.values is not None
    forward(net, tokens(1, 1, 8), cache)
    cache.compress(uneven, budget=22)  # by recency and with every head sure of its share: all keep the same
    fresh = copy.deepcopy(cache)
    fresh._session.values = None
    for each in (cache, fresh):
        each.compress(wide, budget=10)
    assert torch.equal(cache.layers[0].positions, fresh.layers[0].positions)
    assert torch.equal(cache._session.values[1], fresh._session.values[1])
