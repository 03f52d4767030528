import math
import random

import pytest

from kvretain.evidence.stats import bootstrap_mean, wilson

DRAW = random.Random(0)
SAMPLES = [[DRAW.gauss(1, 2) for _ in range(n)] for n in (20, 50, 100)]


@pytest.mark.parametrize("values", SAMPLES, ids=len)
def test_it_agrees_with_a_naive_bootstrap(values):
    draw = random.Random(1)
    means = sorted(sum(draw.choices(values, k=len(values))) / len(values) for _ in range(4000))
    got = bootstrap_mean(values)
    width = means[-1] - means[0]
    assert got.mean == pytest.approx(sum(values) / len(values))
    assert got.low == pytest.approx(means[100], abs=0.03 * width)
    assert got.high == pytest.approx(means[3900], abs=0.03 * width)
    assert got.n == len(values)


@pytest.mark.parametrize("values", SAMPLES, ids=len)
def test_it_agrees_with_scipy(values):
    stats, numpy = pytest.importorskip("scipy.stats"), pytest.importorskip("numpy")
    theirs = stats.bootstrap((values,), numpy.mean, method="percentile", n_resamples=10_000, rng=0).confidence_interval
    got = bootstrap_mean(values)
    assert (got.low, got.high) == pytest.approx((theirs.low, theirs.high), abs=0.05)


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    hits = 0
    for seed in range(300):
        draw = random.Random(seed)
        got = bootstrap_mean([draw.random() for _ in range(40)], resamples=500, seed=seed)
        hits += got.low <= 0.5 <= got.high
    assert 0.90 < hits / 300 < 0.98


def test_seeds_and_levels():
    values = SAMPLES[0]
    assert bootstrap_mean(values) == bootstrap_mean(values) != bootstrap_mean(values, seed=1)
    narrow, wide = bootstrap_mean(values, level=0.5), bootstrap_mean(values, level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_equal_values_have_no_width():
    got = bootstrap_mean([1.0] * 20)
    assert (got.mean, got.low, got.high) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("given", [([],), ([1.0, math.nan],), ([1.0, math.inf],)])
def test_bad_values(given):
    with pytest.raises(ValueError, match="at least one value, and finite"):
        bootstrap_mean(*given)


def test_a_bad_level():
    with pytest.raises(ValueError, match=r"level lies in \(0, 1\), not 1"):
        bootstrap_mean([1.0], level=1)


@pytest.mark.parametrize("hits, n", [(0, 7), (7, 7), (1, 1), (46, 50), (13, 200)])
def test_wilson_is_scipys(hits, n):
    stats = pytest.importorskip("scipy.stats")
    theirs, got = stats.binomtest(hits, n).proportion_ci(0.9, method="wilson"), wilson(hits, n, level=0.9)
    assert (got.mean, got.n) == (hits / n, n)
    assert (got.low, got.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@pytest.mark.parametrize("hits, n, level", [(1, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_wilson_refuses_what_is_no_share(hits, n, level):
    with pytest.raises(ValueError):
        wilson(hits, n, level=level)
