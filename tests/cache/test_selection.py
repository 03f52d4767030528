"""What the cache observes is what the model does: kept sets against scores taken from transformers' own outputs."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvretain import RetentionCache

from .models import cache_argument, distinct, forward, left_padded, model, positions_of
from .oracle import held

SINKS, RECENT, BUDGET = 1, 2, 21
EAGER = ["llama", "qwen3", "gemma2", "gpt_oss"]


def make(net, policy: str, **options) -> RetentionCache:
    return RetentionCache.for_model(net, policy, **({"budget": BUDGET, "sinks": SINKS, "recent": RECENT} | options))


@torch.no_grad()
def attentions(net, chunks: list[torch.Tensor], mask: torch.Tensor) -> list[torch.Tensor]:
    """Per layer, the attention weights (B, Hq, T, T) of an eager run over ``chunks`` with nothing evicted."""
    cache, rows, seen, total = DynamicCache(config=net.config), [], 0, mask.shape[1]
    for chunk in chunks:
        seen += chunk.shape[1]
        out = net(
            input_ids=chunk,
            attention_mask=mask[:, :seen],
            position_ids=positions_of(mask)[:, seen - chunk.shape[1] : seen],
            output_attentions=True,
            **{cache_argument(net): cache},
        )
        rows.append([torch.nn.functional.pad(weights, (0, total - weights.shape[-1])) for weights in out.attentions])
    return [torch.cat(layer, 2) for layer in zip(*rows, strict=True)]


def expected(scores: torch.Tensor, length: int) -> list[int]:
    """The protected positions and the best of the others, for ``scores (length,)`` of one row and head."""
    protected = {*range(SINKS), *range(length - RECENT, length)}
    others = sorted((p for p in range(length) if p not in protected), key=lambda p: (-scores[p].item(), p))
    return sorted(protected | set(others[: BUDGET - len(protected)]))


def check(cache, scores: dict[int, torch.Tensor], mask: torch.Tensor) -> None:
    """Kept positions of every layer, row and head against ``scores`` (B, H, T) by column."""
    assert held(cache).keys() == scores.keys()
    for layer, positions in held(cache).items():
        for row, columns in enumerate(mask.bool()):
            for head, kept in enumerate(positions[row]):
                wanted = expected(scores[layer][row, head, columns], int(columns.sum()))
                assert kept.tolist() == wanted, f"layer {layer}, row {row}, head {head}"


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return left_padded([distinct(1, 29), distinct(2, 25)])


def full_layers(net) -> list[int]:
    return [i for i, layer in enumerate(DynamicCache(config=net.config).layers) if not layer.is_sliding]


@pytest.mark.parametrize(
    "sizes", [(29,), (12, 9, 8), (10, *(1,) * 9, 10)], ids=["one shot", "chunks", "decode and turn"]
)
@pytest.mark.parametrize("name", EAGER)
def test_h2o_keeps_what_the_model_attended_to(name, sizes) -> None:
    """Accumulated over chunks, decoded tokens and turns; soft caps, learned sinks and padding queries included."""
    net = model(name, "eager")
    ids, mask = batch()
    chunks = list(ids.split(sizes, 1))
    scores = {}
    for layer, weights in enumerate(attentions(net, chunks, mask)):
        if layer in full_layers(net):
            scores[layer] = (weights * mask[:, None, :, None]).sum(2).unflatten(1, (2, -1)).sum(2)
    cache = make(net, "h2o", every=40)
    for chunk, seen in zip(chunks, torch.tensor(sizes).cumsum(0).tolist(), strict=True):
        forward(net, chunk, cache, mask=mask[:, :seen])
    assert cache.trace.evictions == 1  # in the last pass: what was observed before it counts in full
    check(cache, scores, mask)


@pytest.mark.parametrize("name", EAGER)
def test_tova_keeps_what_the_last_query_attended_to(name) -> None:
    net = model(name, "eager")
    ids, mask = batch()
    last = [weights[:, :, -1].mean(1, keepdim=True).expand(-1, 2, -1) for weights in attentions(net, [ids], mask)]
    cache = make(net, "tova")
    forward(net, ids, cache, mask=mask)
    check(cache, {layer: last[layer] for layer in full_layers(net)}, mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sdpa_and_eager_observe_the_same(attention) -> None:
    ids, mask = batch()
    kept = []
    for implementation in ("eager", attention):
        net = model("llama", implementation)
        for policy in ("h2o", "snapkv", "tova"):
            cache = make(net, policy)
            forward(net, ids, cache, mask=mask)
            kept.append(held(cache))
    for one, other in zip(kept[:3], kept[3:], strict=True):
        assert all(torch.equal(one[layer], other[layer]) for layer in one)


@pytest.mark.parametrize("name", [*EAGER, "gemma3", "phi3", "mistral", "qwen2"])
def test_knorm_keeps_the_shortest_keys(name) -> None:
    net = model(name)
    ids, mask = batch()
    plain = DynamicCache(config=net.config)
    forward(net, ids, plain, mask=mask)
    cache = make(net, "knorm")
    forward(net, ids, cache, mask=mask)
    check(cache, {layer: -plain.layers[layer].keys.norm(dim=-1) for layer in full_layers(net)}, mask)
    first = full_layers(net)[0]  # later layers see evicted states below them
    columns = (held(cache)[first] + (mask == 0).sum(-1)[:, None, None])[..., None]
    kept = cache.layers[first]
    for stored, whole in ((kept.keys, plain.layers[first].keys), (kept.values, plain.layers[first].values)):
        assert torch.equal(stored, whole.gather(2, columns.expand_as(stored))), "an entry is not that of its position"
