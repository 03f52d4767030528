"""Our presses inside the released kvpress, and its presses as our scorers. `make test-kvpress` runs this."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from cache.models import build, tokens
from scores.views import random_view

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed: `make test-kvpress` runs this beside it")

import transformers  # noqa: E402

import kvretain  # noqa: E402
from kvretain import hub_refine, select_diverse, select_topk, value_signatures  # noqa: E402
from kvretain.integrations.kvpress import DiversePress, HubKVPress, from_press  # noqa: E402
from kvretain.refine import HardNMS, Hub  # noqa: E402
from kvretain.select import TopK  # noqa: E402
from kvretain.zscores import standardised  # noqa: E402

SIZE, RATIO = 40, 0.6
KEPT = 16

BASES = {
    "knorm": lambda: kvpress.KnormPress(RATIO),
    "keydiff": lambda: kvpress.KeyDiffPress(RATIO),
    "snapkv": lambda: kvpress.SnapKVPress(RATIO, window_size=4),
    "tova": lambda: kvpress.TOVAPress(RATIO),
    "expected": lambda: kvpress.ExpectedAttentionPress(RATIO),
    "lagkv": lambda: kvpress.LagKVPress(RATIO, lag_size=4),
    "streaming": lambda: kvpress.StreamingLLMPress(RATIO),
    "cur": lambda: kvpress.CURPress(),
    "leverage": lambda: kvpress.LeverageScorePress(RATIO),
}


def base(name: str):
    press = BASES[name]()
    press.compression_ratio = RATIO
    return press


def prefill(model, press=None, rows: int = 2):
    """The cache after a prefill of ``SIZE`` tokens under ``press``, and what ``press.score`` was called with."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        if press is None:
            model.model(tokens(0, rows, SIZE), past_key_values=cache)
        else:
            with press(model):
                model.model(tokens(0, rows, SIZE), past_key_values=cache)
    return cache


def spied(press):
    """``press``, and a list that receives the scores of each layer."""
    scores: list[torch.Tensor] = []
    score = press.score
    press.score = lambda *call: scores.append(score(*call)) or scores[-1]
    return press, scores


def ranks(kept: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Where the rows of ``kept (B, H, K, D)`` stand in ``full (B, H, N, D)``, ascending."""
    same = (kept[:, :, :, None] == full[:, :, None]).all(-1)
    assert (same.sum(-1) == 1).all()
    return same.to(torch.int8).argmax(-1).sort(-1).values


@pytest.fixture(scope="module")
def net():
    return build("llama")


@pytest.mark.parametrize("name", BASES)
def test_hubkv_is_top_k_of_corrected_scores(net, name):
    inner, scores = spied(base(name))
    full, cache = prefill(net), prefill(net, HubKVPress(inner))
    for layer, raw in enumerate(scores):
        raw = raw.float()
        kept = ranks(cache.layers[layer].keys, full.layers[layer].keys)
        assert kept.shape == (2, 2, KEPT)
        protected = torch.zeros(raw.shape, dtype=torch.bool)
        protected[..., : {"expected": 4, "cur": 4, "lagkv": 4, "streaming": 4}.get(name, 0)] = True
        last = {"snapkv": 4, "tova": 1, "lagkv": 4, "streaming": KEPT - 4}.get(name, 0)
        protected[..., SIZE - last :] = True
        lowest = raw.masked_fill(protected, torch.inf).amin(-1, keepdim=True).clamp_max(0)
        corrected = hub_refine((raw - lowest).clamp_min(0), RATIO, protected=protected)
        least = corrected.topk(KEPT, -1).values[..., -1:]
        assert (corrected.gather(-1, kept) >= least).all(), "something better was dropped"
    if name in ("knorm", "keydiff", "snapkv", "expected"):
        plain = prefill(net, base(name))
        assert any(
            not torch.equal(ranks(a.keys, f.keys), ranks(b.keys, f.keys))
            for a, b, f in zip(cache.layers, plain.layers, full.layers, strict=True)
        ), "the correction changed nothing: the test is blind"


@pytest.mark.parametrize("name", BASES)
def test_diverse_is_the_selection_of_each_head_on_its_own(net, name):
    inner, scores = spied(base(name))
    full, cache = prefill(net), prefill(net, DiversePress(inner))
    marks = {"snapkv": (0, 4), "tova": (0, 1), "expected": (4, 0), "cur": (4, 0), "lagkv": (4, 4)}
    first, last = marks.get(name, (0, 0))
    for layer, raw in enumerate(scores):
        kept = ranks(cache.layers[layer].keys, full.layers[layer].keys)
        if name == "streaming":  # which protects all that stays
            assert torch.equal(kept[0, 0], torch.tensor([*range(4), *range(SIZE - KEPT + 4, SIZE)]))
            continue
        for row in range(2):
            for head in range(2):
                own = raw[row, head].float()
                protected = (torch.arange(SIZE) < first) | (torch.arange(SIZE) >= SIZE - last)
                values = full.layers[layer].values[row, head][None, None]
                chosen = select_diverse(
                    standardised(own.double(), ~protected).float(),
                    value_signatures([values])[0],
                    KEPT,
                    protected=protected,
                )
                assert len(set(chosen.tolist()) & set(kept[row, head].tolist())) >= KEPT - 1  # rounding of the scale
        values = full.layers[layer].values
        assert torch.equal(cache.layers[layer].values, values.gather(2, kept[..., None].expand(-1, -1, -1, 8)))


def test_diverse_chooses_where_gradients_are_recorded():
    states = [torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(2)]
    keys, _ = DiversePress(base("knorm")).compress(torch.nn.Identity(), torch.zeros(1, 40, 16), *states, None, {})
    assert 1 <= keys.shape[2] < 40 and keys.requires_grad


def test_without_effect_they_are_the_inner_press(net):
    full, plain = prefill(net), prefill(net, base("knorm"))
    wanted = [ranks(a.keys, f.keys) for a, f in zip(plain.layers, full.layers, strict=True)]
    neutral = Hub(discount=1.0, calibrate=False)
    for press in (HubKVPress(base("knorm"), neutral), DiversePress(base("knorm"), TopK())):
        cache = prefill(net, press)
        found = [ranks(a.keys, f.keys) for a, f in zip(cache.layers, full.layers, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    zero = kvpress.KnormPress(0.0)
    for press in (HubKVPress(zero), DiversePress(zero)):
        assert all(torch.equal(a.keys, f.keys) for a, f in zip(prefill(net, press).layers, full.layers, strict=True))


def test_other_refiners_and_both_presses_together(net):
    cache = prefill(net, DiversePress(HubKVPress(base("snapkv"), HardNMS())))
    assert all(layer.keys.shape[2] == KEPT for layer in cache.layers)
    assert "HardNMS" in repr(HubKVPress(base("knorm"), HardNMS())) and "KnormPress" in repr(DiversePress(base("knorm")))


def test_the_ratio_is_the_inner_press_s():
    inner = kvpress.KnormPress(0.25)
    for press in (HubKVPress(inner), DiversePress(inner)):
        press.compression_ratio = 0.75
        assert inner.compression_ratio == press.compression_ratio == 0.75


def test_heads_compete_by_corrected_scores(net):
    """AdaKV around HubKV masks the lowest corrected scores of the layer."""
    inner, scores = spied(base("snapkv"))
    hub = HubKVPress(inner)
    prefill(net, kvpress.AdaKVPress(hub, alpha_safeguard=0.0), rows=1)
    for layer, raw in enumerate(scores):
        protected = (torch.arange(SIZE) >= SIZE - 4).expand(raw.shape)
        corrected = hub_refine(raw.float(), RATIO, protected=protected).flatten()
        _, heads, columns = net.model.layers[layer].self_attn.masked_key_indices
        masked = torch.zeros(2 * SIZE, dtype=torch.bool)
        masked[heads * SIZE + columns] = True
        assert int(masked.sum()) == 2 * (SIZE - KEPT)
        assert corrected[masked].max() <= corrected[~masked].min()
        assert torch.equal((~masked).nonzero()[:, 0], select_topk(corrected[None], 2 * KEPT)[0])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda press: kvpress.ChunkPress(press, chunk_length=20),
        lambda press: kvpress.ChunkKVPress(press, chunk_length=4),
        lambda press: kvpress.KeyRerotationPress(press),
        lambda press: kvpress.ComposedPress([press, kvpress.KnormPress(0.5)]),
        lambda press: kvpress.CriticalKVPress(press),
    ],
    ids=["chunk", "chunkkv", "rerotation", "composed", "critical"],
)
def test_wrappers_take_hubkv_for_a_scorer(net, wrap):
    if not hasattr(net.config, "head_dim"):
        net.config.head_dim = 8
    cache = prefill(net, wrap(HubKVPress(base("snapkv"))), rows=1)
    assert 0 < cache.layers[0].keys.shape[2] < SIZE


def test_entries_out_of_order_are_refused(net):
    knorm = kvpress.KnormPress(0.5)
    for press in (
        kvpress.BlockPress(HubKVPress(knorm), block_size=8),
        kvpress.ComposedPress([kvpress.KnormPress(0.5), HubKVPress(knorm)]),
    ):
        with pytest.raises(ValueError, match="HubKVPress compares neighbours in position"):
            prefill(net, press)
    decoding = kvpress.DecodingPress(HubKVPress(kvpress.KnormPress()), compression_interval=2, target_size=8)
    cache = prefill(net)
    with decoding(net), torch.no_grad(), pytest.raises(ValueError, match="use it during prefill"):
        for _ in range(4):
            net(tokens(3, 2, 1), past_key_values=cache)


def test_what_does_not_score_is_refused(net):
    for cls in (HubKVPress, DiversePress):
        with pytest.raises(ValueError, match=f"{cls.__name__} needs a press that scores .* not AdaKVPress; put"):
            cls(kvpress.AdaKVPress(kvpress.KnormPress(0.5)))
        with pytest.raises(ValueError, match=f"{cls.__name__} needs a press that scores .* not str$"):
            cls("knorm")
        if not hasattr(net.config, "head_dim"):
            net.config.head_dim = 8
        with pytest.raises(ValueError, match=f"CriticalKVPress has chosen already .*put {cls.__name__} inside it"):
            prefill(net, cls(kvpress.CriticalKVPress(base("knorm"))))

    class Broken(kvpress.ScorerPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return keys[..., 0] * torch.nan

    with pytest.raises(ValueError, match="Broken gave NaN or infinite scores to HubKVPress"):
        prefill(net, HubKVPress(Broken(0.5)))


def test_the_documented_example_runs(net):
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(from kvpress .*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        exec(example, {"model": net, "input_ids": tokens(0, 1, 300), "cache": cache})
    assert cache.layers[0].keys.shape[2] == 75


# --- its presses as our scorers -------------------------------------------------------------------

SERVED = {"CURPress", "KeyDiffPress", "KnormPress", "LagKVPress", "RandomPress", "SnapKVPress", "StreamingLLMPress"}
REFUSED = {
    "CapPress": "module",
    "CompactorPress": "",
    "CriticalKVPress": "module",
    "ExpectedAttentionPress": "hidden_states",
    "LeverageScorePress": "module",
    "ObservedAttentionPress": "attentions",
    "TOVAPress": "attentions",
}


def scoring() -> list[str]:
    """The presses of kvpress that score by a rule, not by a file of weights, by name."""
    weights = {"ExpectedAttentionStatsPress", "KVzapPress", "QFilterPress", "NonCausalAttnPress", "PyramidKVPress"}
    found = {
        name
        for name, cls in vars(kvpress).items()
        if inspect.isclass(cls) and issubclass(cls, kvpress.ScorerPress) and cls is not kvpress.ScorerPress
    }
    return sorted(found - weights)


def made(name: str):
    options = {"SnapKVPress": {"window_size": 4}, "LagKVPress": {"lag_size": 4}, "RandomPress": {"seed": 3}}
    if name == "CriticalKVPress":
        return kvpress.CriticalKVPress(kvpress.KnormPress())
    return getattr(kvpress, name)(**options.get(name, {}))


@pytest.mark.parametrize("name", scoring())
def test_every_scorer_of_kvpress_is_served_or_refused_by_name(name):
    if name not in SERVED:
        with pytest.raises(ValueError, match=f"{name} reads {REFUSED[name]}.*, which a cache does not keep"):
            from_press(made(name))
        return
    view = random_view(0, seen=(24,), kept=24)
    scores = from_press(made(name)).score(view)
    assert scores.shape == (1, 2, 24) and scores.isfinite().all()
    if name not in ("SnapKVPress", "StreamingLLMPress"):  # these depend on queries and on the ratio
        direct = made(name).score(None, None, view.keys, view.values, None, None)
        torch.testing.assert_close(scores, direct.float())


def test_tova_and_qfilter_are_served_with_what_they_ask_for():
    view = random_view(0, seen=(24,), kept=24)
    scores = from_press(kvpress.TOVAPress(), window=1).score(view)
    assert torch.equal(scores[0, 0], scores[0, 1]) and scores[0, 0].argmax() == 23
    press = kvpress.QFilterPress()
    press.q_filters = torch.randn(4, 2, 6)
    scores = from_press(press).score(view)
    torch.testing.assert_close(scores.abs(), (press.q_filters[view.layer][None, :, None] * view.keys).sum(-1).abs())


def test_snapkv_scores_are_those_of_the_press_in_the_model(net):
    """The attention that a cache view yields is the attention that the press computes from hidden states."""
    inner, scores = spied(base("snapkv"))
    states: list[torch.Tensor] = []
    compress = inner.compress
    inner.compress = lambda module, hidden, keys, values, weights, kwargs: (
        states.append((keys, values, _queries(module, hidden, kwargs)))
        or compress(module, hidden, keys, values, weights, kwargs)
    )
    prefill(net, inner)
    for layer, (keys, values, queries) in enumerate(states):
        positions = torch.arange(SIZE).expand(2, 2, SIZE)
        view = kvretain.CacheView(
            keys, values, positions, torch.full((2,), SIZE), KEPT, positions < 0, queries=queries,
            scaling=net.config.head_dim**-0.5 if hasattr(net.config, "head_dim") else 8**-0.5, layer=layer,
        )  # fmt: skip
        ours = from_press(kvpress.SnapKVPress(window_size=4)).score(view)
        torch.testing.assert_close(ours[..., :-4], scores[layer][..., :-4], rtol=1e-4, atol=1e-6)


def _queries(module, hidden, kwargs) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    queries = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    return apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])[0][:, :, -4:]


def test_the_cache_says_which_transformers_it_needs():
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 17):
        pytest.skip(f"transformers {transformers.__version__} serves the cache")
    with pytest.raises(ImportError, match=rf"needs transformers>=5.17, found {transformers.__version__}: pip install"):
        _ = kvretain.RetentionCache
