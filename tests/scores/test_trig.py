"""TriAttention's score against its definition: keys with their rotation taken back, one loop over offsets, float64."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from views import random_view

import kvretain
from kvretain import trig_scores
from kvretain.rope import Rope
from kvretain.scores.trig import OFFSETS, Trig, group_max

FLAGS = [
    {},
    {"norm": False},
    {"distance": False},
    {"concentration": False},
    {"aggregate": "max"},
    {"aggregate": "max", "concentration": False},
    {"offsets": (3,)},
]


def random_case(seed: int, batch: int, heads: int, group: int, count: int, pairs: int, last: int, scaling: float):
    """Keys before and after rotation at random positions below ``last``, statistics and frequencies."""
    rng = torch.Generator().manual_seed(seed)
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    positions = torch.randint(0, last, (batch, heads, count), generator=rng)
    plain = torch.complex(*torch.randn(2, batch, heads, count, pairs, generator=rng, dtype=torch.float64))
    turned = scaling * plain * torch.exp(1j * positions[..., None] * frequencies)
    keys = torch.cat([turned.real, turned.imag], -1).float()
    mean = torch.complex(*torch.randn(2, heads * group, pairs, generator=rng, dtype=torch.float64))
    absolute = mean.abs() + torch.rand(heads * group, pairs, generator=rng, dtype=torch.float64)
    return keys, positions, mean, absolute, frequencies


def by_definition(
    keys, positions, mean, absolute, frequencies, following, scaling, *,
    offsets=OFFSETS, distance=True, norm=True, concentration=True, aggregate="mean",
):  # fmt: skip
    """The score of each key in float64, un-rotating it first, offset by offset."""
    group = len(mean) // keys.shape[1]
    turned = torch.complex(*keys.double().chunk(2, -1)) / scaling
    plain = (turned * torch.exp(-1j * positions[..., None] * frequencies)).repeat_interleave(group, 1)
    where = positions.repeat_interleave(group, 1)
    strength, phase = mean.abs()[:, None] * plain.abs(), mean.angle()[:, None] - plain.angle()
    ahead = []
    for offset in offsets:
        gap = following.view(-1, 1, 1) - where + offset
        ahead.append((scaling**2 * strength * torch.cos(gap[..., None] * frequencies + phase)).sum(-1))
    stacked = torch.stack(ahead)
    scores = stacked.mean(0) if aggregate == "mean" else stacked.amax(0)
    weight = absolute - mean.abs() if concentration else absolute
    extra = (scaling**2 * weight[:, None] * plain.abs()).sum(-1)
    return (scores if distance else 0) + (extra if norm else 0)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    shape=st.tuples(*(st.integers(1, top) for top in (3, 3, 3, 5, 6))),
    last=st.sampled_from([1, 100, 5000, 200_000]),
    scaling=st.sampled_from([1.0, 1.35]),
    flags=st.sampled_from(FLAGS),
)
def test_collapsed_scores_are_the_definition(seed, shape, last, scaling, flags):
    keys, positions, mean, absolute, frequencies = random_case(seed, *shape, last, scaling)
    following = last + torch.arange(shape[0])  # a row each
    expected = by_definition(keys, positions, mean, absolute, frequencies, following, scaling, **flags)
    scores = trig_scores(
        keys, mean.to(torch.complex64), absolute.float(), frequencies, following, attention_scaling=scaling, **flags
    )
    assert scores.dtype == torch.float32 and scores.shape == (shape[0], len(mean), keys.shape[2])
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)


def test_one_position_for_all_rows_is_an_int():
    keys, _, mean, absolute, frequencies = random_case(0, 2, 2, 2, 9, 4, 500, 1.0)
    arguments = keys, mean.to(torch.complex64), absolute.float(), frequencies
    assert torch.equal(trig_scores(*arguments, 700), trig_scores(*arguments, torch.tensor([700, 700])))


def test_without_the_norm_term_it_is_the_mean_logit_of_a_query_ahead():
    """Averaged over the queries themselves, each rotated where it will stand."""
    keys, _, _, _, frequencies = random_case(3, 1, 1, 1, 7, 5, 300, 1.0)
    queries = torch.complex(*torch.randn(2, 50, 5, dtype=torch.float64)) + 1
    logits = []
    for offset in (1, 4, 64):
        ahead = queries * torch.exp(1j * (300 + offset) * frequencies)
        logits.append(torch.cat([ahead.real, ahead.imag], -1) @ keys[0, 0].double().T)
    scores = trig_scores(
        keys, queries.mean(0)[None], queries.abs().mean(0)[None], frequencies, 300, offsets=(1, 4, 64), norm=False
    )
    torch.testing.assert_close(scores[0, 0].double(), torch.stack(logits).mean((0, 1)), rtol=1e-4, atol=1e-4)


def test_queries_that_all_point_one_way_leave_nothing_to_the_norm_term():
    keys, _, mean, _, frequencies = random_case(5, 1, 2, 2, 6, 4, 50, 1.0)
    both, trig = (
        trig_scores(keys, mean.to(torch.complex64), mean.abs().float(), frequencies, 50, norm=norm)
        for norm in (True, False)
    )
    torch.testing.assert_close(both, trig, rtol=1e-4, atol=1e-4)


def test_far_positions_keep_their_phase():
    """After a million tokens a float32 angle would be wrong by a tenth of a radian."""
    keys, positions, mean, absolute, frequencies = random_case(1, 1, 2, 2, 40, 8, 1_000_000, 1.0)
    following = torch.tensor([1_000_000])
    expected = by_definition(keys, positions, mean, absolute, frequencies, following, 1.0)
    scores = trig_scores(keys, mean.to(torch.complex64), absolute.float(), frequencies, following)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(2, 5, 8)}, r"keys must be \(B, H, N, D\), .* D even, not \(2, 5, 8\)"),
        ({"keys": torch.zeros(1, 0, 5, 8)}, r"H at least 1 and D even, not \(1, 0, 5, 8\)"),
        ({"keys": torch.zeros(1, 2, 5, 7)}, r"keys must be .* not \(1, 2, 5, 7\)"),
        ({"query_mean": torch.zeros(4, 4)}, r"query_mean must be complex .* not torch.float32 \(4, 4\)"),
        ({"query_mean": torch.zeros(3, 4) + 0j}, r"multiple of 2 and D / 2 = 4, not torch.complex64 \(3, 4\)"),
        ({"query_mean": torch.zeros(0, 4) + 0j}, r"multiple of 2 .* not torch.complex64 \(0, 4\)"),
        ({"query_abs_mean": torch.zeros(4, 3)}, r"query_abs_mean must be real \(4, 4\), not torch.float32 \(4, 3\)"),
        ({"inv_freq": torch.zeros(8)}, r"inv_freq must be \(4,\), not \(8,\)"),
        ({"offsets": ()}, r"offsets must be one or more finite numbers, not \(\)"),
        ({"offsets": (1, float("nan"))}, r"offsets must be one or more finite numbers, not \(1, nan\)"),
        ({"next_position": torch.tensor([5, 5, 5])}, r"next_position must be an int or \(1,\), not \(3,\)"),
        ({"next_position": torch.tensor([[5]])}, r"next_position must be an int or \(1,\), not \(1, 1\)"),
        ({"attention_scaling": torch.ones(3)}, r"attention_scaling must be a number or \(4,\), not \(3,\)"),
        ({"attention_scaling": torch.ones(1, 4)}, r"attention_scaling must be a number or \(4,\), not \(1, 4\)"),
        ({"distance": False, "norm": False}, "nothing is left to score by"),
        ({"aggregate": "sum"}, "aggregate must be one of 'mean', 'max', not 'sum'"),
    ],
)
def test_bad_arguments(change, message):
    given = {
        "keys": torch.zeros(1, 2, 5, 8),
        "query_mean": torch.zeros(4, 4) + 0j,
        "query_abs_mean": torch.zeros(4, 4),
        "inv_freq": torch.zeros(4),
        "next_position": 5,
    }
    with pytest.raises(ValueError, match=message):
        trig_scores(**(given | change))


def test_example():
    assert doctest.testmod(importlib.import_module("kvretain.scores.trig")) == (0, 2)


# The scorer


def rope_of(kind: str, size: int) -> Rope:
    """``halves``: all 6 dimensions; ``partial``: 4 of 6 in halves; ``interleaved``: 4 of 6, in neighbours; ``scaled``:
    as YaRN scales."""
    rotated = 4 if kind in ("partial", "interleaved") else size
    frequencies = torch.tensor([1.0, 0.3, 0.01][: rotated // 2])

    def cos_sin(positions):
        angles = positions[..., None] * frequencies
        angles = angles.repeat_interleave(2, -1) if kind == "interleaved" else torch.cat([angles, angles], -1)
        factor = 1.2 if kind == "scaled" else 1.0
        return factor * angles.cos(), factor * angles.sin()

    return Rope.of(cos_sin)


@pytest.mark.parametrize("kind", ["halves", "partial", "interleaved", "scaled"])
def test_the_scorer_is_the_mean_logit_by_the_rotation_itself_standardised_then_the_largest_of_the_group(kind):
    """Queries and keys go through ``Rope.rotate``; nothing knows of pairs but the norm term."""
    view = random_view(11, seen=(29, 17), kept=14)
    rope, size = rope_of(kind, 6), 6
    heads, group, rng = 2, 2, torch.Generator().manual_seed(4)
    plain_keys = torch.randn(2, heads, 14, size, generator=rng)
    cos, sin = rope.cos_sin(view.positions.clamp_min(0).flatten(1))
    keys = rope.rotate(plain_keys, cos.unflatten(1, (heads, -1)), sin.unflatten(1, (heads, -1))).masked_fill(
        ~view.valid[..., None], torch.nan
    )
    queries = torch.randn(heads * group, 200, size, generator=rng) + torch.randn(heads * group, 1, size, generator=rng)
    pairs = torch.complex(*rope.halves(queries).chunk(2, -1))
    view = dataclasses.replace(view, keys=keys, rope=rope, calibration=(pairs.mean(1), pairs.abs().mean(1)))
    scores = Trig(offsets=(1, 5)).score(view)

    spread = pairs.abs().mean(1) - pairs.mean(1).abs()
    # The attention scaling is on cos and sin, so on the rotated keys and queries, and squared in their products.
    factor = torch.tensor([rope.scaling**2 if f < rope.size // 2 else 1.0 for f in range(3)])
    for row in range(2):
        for head in range(heads):
            candidates = view.candidates[row, head].nonzero()[:, 0].tolist()
            by_query_head = []
            for query in range(head * group, (head + 1) * group):
                raw = []
                for slot in candidates:
                    logit = 0.0
                    for offset in (1, 5):
                        at = torch.full((1, 1), int(view.seen[row]) + offset)
                        ahead = rope.rotate(queries[query], *(part[0] for part in rope.cos_sin(at)))
                        logit += float((ahead.double() @ keys[row, head, slot].double()).mean()) / 2
                    key = torch.complex(*rope.halves(plain_keys[row, head, slot]).chunk(2, -1)).abs()
                    raw.append(logit + float((factor * spread[query] * key).sum()))
                raw = torch.tensor(raw, dtype=torch.float64)
                by_query_head.append((raw - raw.mean()) / raw.std(correction=0))
            expected = torch.stack(by_query_head).amax(0)
            torch.testing.assert_close(scores[row, head, candidates].double(), expected, rtol=1e-3, atol=1e-3)
            others = [slot for slot in range(14) if slot not in candidates]
            assert bool((scores[row, head, others] == 0).all())


@pytest.mark.parametrize("flags", [f for f in FLAGS if f], ids=str)
def test_ablations_change_the_scores(flags):
    view = random_view(2)
    assert not torch.allclose(Trig(**flags).score(view), Trig().score(view))


def test_group_max():
    scores = torch.tensor([[[1.0, 5.0], [2.0, 0.0], [7.0, 1.0], [3.0, 4.0]]])
    assert group_max(scores, 2).tolist() == [[[2.0, 5.0], [7.0, 4.0]]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"calibration": None}, "calibration must be the path of a file, not None"),
        ({"norm": 1}, "norm must be True or False, not 1"),
        ({"distance": False, "norm": False}, "leave nothing to score by"),
        ({"aggregate": "sum"}, "aggregate must be one of 'mean', 'max'"),
        ({"offsets": ()}, "offsets must be one or more numbers"),
        ({"offsets": (1, -1)}, r"offsets must be .* not \(1, -1\)"),
        ({"offsets": (1, math.nan)}, "offsets must be"),
        ({"offsets": 4}, "offsets must be"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        Trig(**fields)


def test_a_view_without_a_calibration_is_an_error():
    with pytest.raises(ValueError, match="'trig' needs a calibration, but layer 3's view has none"):
        Trig().score(dataclasses.replace(random_view(0), calibration=None))


def test_policies_in_text_round_trip():
    text = "trig(calibration='a/b.pt', offsets=(1, 2), norm=False)@model(combine='max')"
    policy = kvretain.Policy.parse(text)
    assert str(policy) == text and kvretain.Policy.from_dict(policy.to_dict()) == policy
    assert policy.needs == {"calibration"} and not policy.tapped and not policy.collects
