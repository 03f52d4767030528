"""Each scorer against a slow reference: plain Python loops over one head, in double precision."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from views import random_view

from kvretain.scores import H2O, RKV, TOVA, KeyDiff, KNorm, LagKV, Random, SnapKV, Streaming, Trig, ValueNorm

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


def rkv_reference(scorer, view, row, head):
    slots, _, keys, _ = head_of(view, row, head)
    importance = snapkv_reference(SnapKV(window=scorer.window, kernel=scorer.kernel), view, row, head)
    total = dict.fromkeys(slots, 0.0)
    for i in slots:
        cosines = {}
        for j in slots:
            product = sum(a * b for a, b in zip(keys[i], keys[j], strict=True))
            length = (math.hypot(*keys[i]) + 1e-8) * (math.hypot(*keys[j]) + 1e-8)
            cosines[j] = 0.0 if i == j else product / length
        near = [j for j in slots if cosines[j] > scorer.threshold]
        cosines[near[-1] if near else slots[0]] = 0.0
        for j in slots:
            total[j] += cosines[j]
    redundancy = softmax({j: total[j] / len(slots) for j in slots})
    window = int(view.seen[row]) - scorer.window
    mixed = {j: scorer.mix * importance[j] - (1 - scorer.mix) * redundancy[j] for j in slots}
    return {j: 1.0 if int(view.positions[row, head, j]) >= window else mixed[j] for j in slots}


def lagkv_reference(scorer, view, row, head):
    slots, _, keys, _ = head_of(view, row, head)
    values = view.values[row, head].double().tolist()
    budget = view.budget if view.budgets is None else view.budgets[row]
    size = max(2, min(scorer.lag, budget // 4))
    leading = []
    for slot in slots:
        if not view.protected[row, head, slot]:
            break
        leading.append(slot)
    body = slots[len(leading) :]
    scores = dict.fromkeys(leading, 0.0)
    full = [body[start : start + size] for start in range(0, len(body) - size + 1, size)]
    if len(full) < 2:
        return scores | {slot: index / len(body) for index, slot in enumerate(body)}
    scores |= dict.fromkeys(body, 1.0)
    for part, after in pairwise(full):
        worth = dict.fromkeys(part, 0.0)
        for states in (keys, values):
            spread = {}
            for slot in part:
                scaled = []
                for channel, x in enumerate(states[slot]):
                    column = [states[other][channel] for other in after]
                    scaled.append((x - min(column)) / max(max(column) - min(column), 1e-6))
                mean = sum(scaled) / len(scaled)
                spread[slot] = math.sqrt(sum((x - mean) ** 2 for x in scaled) / (len(scaled) - 1))
            for slot, share in softmax(spread).items():
                worth[slot] += share / 2
        ranked = sorted(part, key=lambda slot: (worth[slot], -slot))
        for rank, slot in enumerate(ranked):
            scores[slot] = worth[slot] if scorer.cross else rank / size
    return scores


def value_norm_reference(scorer, view, row, head):
    slots, _, _, _ = head_of(view, row, head)
    values = view.values[row, head].double().tolist()
    length = (lambda v: sum(map(abs, v))) if scorer.order == "l1" else (lambda v: math.hypot(*v))
    return {slot: length(values[slot]) for slot in slots}


def h2o_reference(scorer, view, row, head):
    slots, _, _, _ = head_of(view, row, head)
    return {slot: float(view.attention[row, head, slot]) for slot in slots}


@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_trig_adds_the_standardised_logarithm_of_the_values_lengths(weight):
    view = random_view(7, seen=(40, 25, 17))
    plain, scores = Trig().score(view), Trig(value_weight=weight).score(view)
    for row in range(plain.shape[0]):
        for head in range(plain.shape[1]):
            candidates = view.candidates[row, head].nonzero()[:, 0].tolist()
            logs = {slot: math.log(math.hypot(*view.values[row, head, slot].double().tolist())) for slot in candidates}
            mean = math.fsum(logs.values()) / len(logs)
            spread = math.sqrt(math.fsum((log - mean) ** 2 for log in logs.values()) / len(logs))
            expected = [plain[row, head, slot].item() + weight * (logs[slot] - mean) / spread for slot in candidates]
            assert scores[row, head, candidates].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert sorted(logs, key=logs.__getitem__) != sorted(
                candidates, key=lambda slot: plain[row, head, slot].item()
            )


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
    (RKV(), rkv_reference),
    (RKV(window=3, kernel=3, mix=0.5, threshold=0.2), rkv_reference),
    (RKV(mix=0, threshold=1.0), rkv_reference),
    (LagKV(), lagkv_reference),
    (LagKV(lag=3), lagkv_reference),
    (LagKV(lag=2, cross=True), lagkv_reference),
    (ValueNorm(), value_norm_reference),
    (ValueNorm(order="l1"), value_norm_reference),
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
