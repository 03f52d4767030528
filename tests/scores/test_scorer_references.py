"""Each scorer against a slow reference: plain Python loops over one head, in double precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from views import random_view

from kvretain.scores import H2O, TOVA, KeyDiff, KNorm, Random, SnapKV, Streaming

M64 = (1 << 64) - 1


def softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values(), default=0.0)
    total = sum(math.exp(v - top) for v in logits.values())
    return {slot: math.exp(v - top) / total for slot, v in logits.items()}


def head_of(view, row: int, head: int):
    """What a reference needs of one head: real slots, positions, keys, and the queries of its group, as lists."""
    positions = view.positions[row, head].tolist()
    slots = [slot for slot, p in enumerate(positions) if p >= 0]
    group = view.queries.shape[1] // view.keys.shape[1]
    queries = view.queries[row, head * group : (head + 1) * group].double().tolist()
    return slots, positions, view.keys[row, head].double().tolist(), queries


def logit(view, query, key) -> float:
    raw = view.scaling * sum(a * b for a, b in zip(query, key, strict=True))
    return raw if view.softcap is None else view.softcap * math.tanh(raw / view.softcap)


def random_reference(scorer, view, row, head):
    def mix(state, value):
        state = (state + value + 0x9E3779B97F4A7C15) & M64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & M64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & M64
        return state ^ (state >> 31)

    slots, positions, _, _ = head_of(view, row, head)
    state = mix(mix(mix(scorer.seed & M64, 0), view.layer), head)
    return {slot: (mix(state, positions[slot]) >> 40) / 2**24 for slot in slots}


def streaming_reference(scorer, view, row, head):
    slots, positions, _, _ = head_of(view, row, head)
    return {slot: float(positions[slot]) for slot in slots}


def knorm_reference(scorer, view, row, head):
    slots, _, keys, _ = head_of(view, row, head)
    return {slot: -math.hypot(*keys[slot]) for slot in slots}


def keydiff_reference(scorer, view, row, head):
    slots, _, keys, _ = head_of(view, row, head)
    unit = {slot: [x / math.hypot(*keys[slot]) for x in keys[slot]] for slot in slots}
    anchor = [sum(column) / len(slots) for column in zip(*unit.values(), strict=True)]
    length = math.hypot(*anchor)
    return {slot: -sum(a * b for a, b in zip(unit[slot], anchor, strict=True)) / length for slot in slots}


def tova_reference(scorer, view, row, head):
    slots, _, keys, queries = head_of(view, row, head)
    weights = [softmax({slot: logit(view, q[-1], keys[slot]) for slot in slots}) for q in queries]
    return {slot: sum(w[slot] for w in weights) / len(weights) for slot in slots}


def snapkv_reference(scorer, view, row, head):
    slots, positions, keys, queries = head_of(view, row, head)
    seen = int(view.seen[row])
    before = [slot for slot in slots if positions[slot] < seen - scorer.window]
    real = [w for w in range(len(queries[0])) if view.query_valid[row, w]][-scorer.window :]
    sums = dict.fromkeys(before, 0.0)
    for w in real:
        if scorer.group == "max":
            weights = [softmax({s: max(logit(view, q[w], keys[s]) for q in queries) for s in before})]
        else:
            weights = [softmax({s: logit(view, q[w], keys[s]) for s in before}) for q in queries]
        for slot in before:
            sums[slot] += sum(weight[slot] for weight in weights) / len(weights)
    mean = {slot: value / len(real) for slot, value in sums.items()}
    lent = [0.0 if view.protected[row, head, slot] else mean[slot] for slot in before]
    scores = {slot: 1.0 for slot in slots if slot not in before}
    for index, slot in enumerate(before):
        near = lent[max(0, index - scorer.kernel // 2) : index + scorer.kernel // 2 + 1]
        if scorer.pooling == "none" or view.protected[row, head, slot]:
            scores[slot] = mean[slot]
        else:
            scores[slot] = max(near) if scorer.pooling == "max" else sum(near) / scorer.kernel
    return scores


def h2o_reference(scorer, view, row, head):
    slots, _, _, _ = head_of(view, row, head)
    return {slot: float(view.attention[row, head, slot]) for slot in slots}


TABLE = [
    (Random(), random_reference),
    (Random(seed=2**63 + 5), random_reference),
    (Streaming(), streaming_reference),
    (KNorm(), knorm_reference),
    (KeyDiff(), keydiff_reference),
    (TOVA(), tova_reference),
    (SnapKV(), snapkv_reference),
    (SnapKV(window=3, kernel=1), snapkv_reference),
    (SnapKV(window=5, kernel=3, pooling="mean"), snapkv_reference),
    (SnapKV(pooling="none", group="mean"), snapkv_reference),
    (SnapKV(window=12, kernel=5, group="mean"), snapkv_reference),
    (H2O(), h2o_reference),
]


@pytest.mark.parametrize(("scorer", "reference"), TABLE, ids=[str(scorer) for scorer, _ in TABLE])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("group", [1, 3])
def test_scorer_equals_its_reference(scorer, reference, softcap, group):
    # Rows: after evictions; nothing evicted; fewer tokens than the window, so no key to score and invalid queries; one.
    view = replace(random_view(7, seen=(40, 20, 5, 1), group=group, window=12), softcap=softcap)
    scores = scorer.score(view)
    assert scores.shape == view.positions.shape and scores.dtype == torch.float32 and scores.isfinite().all()
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            expected = reference(scorer, view, row, head)
            slots = list(expected)
            assert scores[row, head, slots].tolist() == pytest.approx([expected[s] for s in slots], rel=1e-4, abs=1e-6)
