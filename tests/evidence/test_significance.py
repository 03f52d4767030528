import dataclasses
import doctest
import importlib
import itertools
import math
import time

import pytest
import torch

from kvretain.evidence import Cell, bonferroni, branch, paired_cluster_bootstrap
from kvretain.evidence.significance import sign_p_values


def outcomes(seed, problems, runs, gain=0.1):
    """0 and 1 of two arms on problems of different difficulty, and the problems' names."""
    draw = torch.Generator().manual_seed(seed)
    easy = torch.rand(problems, 1, generator=draw)
    baseline = (torch.rand(problems, runs, generator=draw) < easy).long().flatten().tolist()
    treatment = (torch.rand(problems, runs, generator=draw) < easy + gain).long().flatten().tolist()
    return baseline, treatment, [f"problem {i // runs}" for i in range(problems * runs)]


@pytest.mark.parametrize(("problems", "runs"), [(40, 1), (60, 3), (299, 3)])
def test_intervals_agree_with_scipy(problems, runs):
    stats, numpy = pytest.importorskip("scipy.stats"), pytest.importorskip("numpy")
    baseline, treatment, clusters = outcomes(problems, problems, runs)
    found = paired_cluster_bootstrap(baseline, treatment, clusters)
    means = (numpy.array(treatment) - numpy.array(baseline)).reshape(problems, runs).mean(1)
    theirs = stats.bootstrap((means,), numpy.mean, method="percentile", n_resamples=10_000, rng=1).confidence_interval
    assert found.difference == pytest.approx(means.mean())
    assert tuple(found.interval) == pytest.approx((theirs.low, theirs.high), abs=0.04 * (theirs.high - theirs.low))
    assert (found.clusters, found.runs) == (problems, problems * runs)


def test_clusters_of_unequal_size_agree_with_scipy():
    stats, numpy = pytest.importorskip("scipy.stats"), pytest.importorskip("numpy")
    baseline, treatment, clusters = outcomes(5, 80, 4)
    kept = [i for i in range(320) if i % 4 <= (i // 4) % 4]  # 1 to 4 runs
    baseline, treatment, clusters = ([values[i] for i in kept] for values in (baseline, treatment, clusters))
    found = paired_cluster_bootstrap(baseline, treatment, clusters, level=0.9)
    names = sorted(set(clusters))
    sums = numpy.array(
        [sum(t - b for b, t, c in zip(baseline, treatment, clusters, strict=True) if c == n) for n in names]
    )
    sizes = numpy.array([clusters.count(name) for name in names])
    theirs = stats.bootstrap(
        (sums, sizes), lambda s, n, axis: s.sum(axis) / n.sum(axis), paired=True, method="percentile",
        confidence_level=0.9, n_resamples=10_000, rng=1,
    ).confidence_interval  # fmt: skip
    assert found.difference == pytest.approx(sums.sum() / sizes.sum())
    assert tuple(found.interval) == pytest.approx((theirs.low, theirs.high), abs=0.004)


@pytest.mark.parametrize("seed", range(4))
def test_p_values_are_those_of_all_signs(seed):
    baseline, treatment, clusters = outcomes(seed, 12, 2, gain=0.3)
    sums = [sum(treatment[2 * i : 2 * i + 2]) - sum(baseline[2 * i : 2 * i + 2]) for i in range(12)]
    flips = [sum(s * d for s, d in zip(signs, sums, strict=True)) for signs in itertools.product((1, -1), repeat=12)]
    exact = sum(abs(flip) >= abs(sum(sums)) for flip in flips) / len(flips)
    found = paired_cluster_bootstrap(baseline, treatment, clusters)
    assert found.p_value == pytest.approx(exact, abs=0.02)


def test_p_values_agree_with_scipy_permutations():
    stats, numpy = pytest.importorskip("scipy.stats"), pytest.importorskip("numpy")
    baseline, treatment, clusters = outcomes(3, 100, 1, gain=0.08)
    theirs = stats.permutation_test(
        (numpy.array(treatment), numpy.array(baseline)), lambda a, b, axis: (a - b).mean(axis),
        permutation_type="samples", vectorized=True, n_resamples=10_000, rng=1,
    )  # fmt: skip
    assert paired_cluster_bootstrap(baseline, treatment, clusters).p_value == pytest.approx(theirs.pvalue, abs=0.02)


def test_fractions_that_differ_by_rounding_are_ties():
    # 0.1 + 0.2 - 0.3 is not 0 in floating point: without a tolerance, half of the ties would be missed.
    baseline, treatment = [0.0] * 6, [0.1, 0.2, -0.3, 0.1, 0.2, -0.3]
    assert paired_cluster_bootstrap(baseline, treatment, range(6)).p_value == 1


def test_order_names_and_containers_do_not_matter():
    numpy = pytest.importorskip("numpy")
    baseline, treatment, clusters = outcomes(1, 50, 2)
    found = paired_cluster_bootstrap(baseline, treatment, clusters)
    assert found == paired_cluster_bootstrap(numpy.array(baseline), torch.tensor(treatment), numpy.array(clusters))
    assert found == paired_cluster_bootstrap(baseline, treatment, torch.arange(100) // 2)
    assert found == paired_cluster_bootstrap([x == 1 for x in baseline], treatment, [(i // 2, "x") for i in range(100)])
    assert found != paired_cluster_bootstrap(baseline, treatment, clusters, seed=1)
    order = list(range(0, 100, 2)) + list(range(1, 100, 2))  # runs of a problem need not be neighbours
    shuffled = paired_cluster_bootstrap(*([values[i] for i in order] for values in (baseline, treatment, clusters)))
    assert shuffled == found
    swapped = paired_cluster_bootstrap(treatment, baseline, clusters)
    assert (swapped.difference, swapped.p_value) == (-found.difference, found.p_value)
    assert swapped.interval == pytest.approx((-found.interval.high, -found.interval.low))


def test_clusters_matter():
    # The same outcomes, as 100 problems or as 10 problems whose runs agree.
    treatment = ([1] * 10 + [0] * 10) * 5
    alone = paired_cluster_bootstrap([0.35] * 100, treatment, range(100))
    together = paired_cluster_bootstrap([0.35] * 100, treatment, [i // 10 for i in range(100)])
    assert alone.difference == pytest.approx(together.difference)
    assert together.interval.high - together.interval.low > 2 * (alone.interval.high - alone.interval.low)
    assert together.p_value > 10 * alone.p_value


def test_degenerate_differences():
    same = paired_cluster_bootstrap([1, 0, 1], [1, 0, 1], "abc")
    assert (same.difference, tuple(same.interval), same.p_value) == (0, (0, 0), 1)
    for problems in (2, 4, 8):  # all signs agree in 2 of 2^n cases
        all_up = paired_cluster_bootstrap([0] * problems, [1] * problems, range(problems))
        assert (all_up.difference, tuple(all_up.interval)) == (1, (1, 1))
        assert all_up.p_value == pytest.approx(2 / 2**problems, abs=0.02)
    surest = paired_cluster_bootstrap([0] * 50, [1] * 50, range(50), resamples=999)
    assert surest.p_value == 1 / 1000


def test_levels_are_nested():
    given = outcomes(2, 60, 1)
    narrow, wide = (paired_cluster_bootstrap(*given, level=level).interval for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_a_whole_study_is_fast():
    given = outcomes(0, 299, 3)
    began = time.process_time()
    paired_cluster_bootstrap(*given)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (([0, 1], [0, 1, 1], [1, 2]), {}, "one entry per run each, but have 2, 3 and 2"),
        (([0, 1], [0, 1], [1]), {}, "but have 2, 2 and 1"),
        (([], [], []), {}, "at least two clusters, not 0"),
        (([0, 1], [0, 1], [7, 7]), {}, "at least two clusters, not 1"),
        (([0, math.nan], [0, 1], [1, 2]), {}, "baseline has values that are not finite: 1 of 2"),
        (([0, 1], [0, math.inf], [1, 2]), {}, "treatment has values that are not finite"),
        (([0, 1], [0, 1], [1, None]), {}, "a cluster is None"),
        (([0, 1], [0, 1], [1, math.nan]), {}, "a cluster is nan"),
        ((torch.zeros(2, 2), [0, 1], [1, 2]), {}, r"one number per run, not an array of shape \(2, 2\)"),
        (([0, 1], [0, 1], [1, 2]), {"resamples": 0}, "resamples must be a whole number"),
        (([0, 1], [0, 1], [1, 2]), {"level": 1}, r"level lies in \(0, 1\), not 1"),
    ],
)
def test_bad_input(given, options, message):
    with pytest.raises(ValueError, match=message):
        paired_cluster_bootstrap(*given, **options)


def test_p_values_of_many_comparisons_are_those_of_each():
    draw = torch.Generator().manual_seed(0)
    differences = torch.randint(-3, 4, (20, 30), generator=draw).double()
    many = sign_p_values(differences, resamples=500, generator=torch.Generator().manual_seed(4))
    each = [
        sign_p_values(d[None], resamples=500, generator=torch.Generator().manual_seed(4)).item() for d in differences
    ]
    assert many.tolist() == each


def test_bonferroni():
    assert bonferroni([0.01, 0.02, 0.5]) == pytest.approx([0.03, 0.06, 1])
    assert bonferroni([0.0125], cells=4) == pytest.approx([0.05])
    with pytest.raises(ValueError, match="cells=1, but there are 2"):
        bonferroni([0.1, 0.2], cells=1)
    with pytest.raises(ValueError, match=r"a p-value lies in \[0, 1\], not nan"):
        bonferroni([math.nan])


BASE = paired_cluster_bootstrap([0, 1], [1, 1], [1, 2])


def cells(**p_values):
    """Cells by name, ``qwen_64=0.01``; a negative p-value stands for a negative difference, None for no verdict."""
    made = []
    for name, p in p_values.items():
        found = p if p is None else dataclasses.replace(BASE, difference=math.copysign(0.1, p), p_value=abs(p))
        made.append(Cell(*name.split("_"), found))
    return made


@pytest.mark.parametrize(
    ("p_values", "conclusion"),
    [
        # The paper's own table: two of four cells pass 0.0125.
        ({"qwen_128": 0.0024, "llama_64": 0.0054, "qwen_64": 0.6, "llama_128": 0.4}, "A"),
        ({"qwen_128": 0.0125, "llama_64": 0.0125, "qwen_64": 0.6, "llama_128": -0.4}, "A"),
        ({"qwen_128": 0.0024, "llama_64": 0.02, "qwen_64": 0.6, "llama_128": 0.4}, "B"),
        ({"qwen_128": 0.0024, "llama_64": 0.4, "qwen_64": 0.001, "llama_128": -0.4}, "B"),
        ({"qwen_128": 0.3, "llama_64": -0.4, "qwen_64": 0.6, "llama_128": 0.4}, "B"),
        ({"qwen_128": 0.0024, "llama_64": 0.0054, "qwen_64": -0.001, "llama_128": 0.4}, "C"),
        ({"qwen_128": 0.3, "llama_64": -0.0125}, "C"),
        ({"qwen_128": 0.02, "llama_64": 0.02}, "A"),
        ({"qwen_128": 0.02, "llama_64": 0.02, "llama_128": None}, "B"),
        ({"qwen_128": 0.01, "llama_64": None}, "B"),
    ],
)
def test_branches(p_values, conclusion):
    assert branch(cells(**p_values)) == conclusion


def test_branches_of_chosen_models():
    made = cells(qwen_128=0.001, llama_64=0.5)
    assert branch(made, models=["qwen"]) == "A"
    assert branch(made, models=["qwen", "llama"]) == branch(made) == "B"
    assert branch(made, models=["qwen"], alpha=0.001) == "B"
    for wrong, message in (([], "no conclusion"), (made + made[:1], "the cell qwen 128 comes more than once")):
        with pytest.raises(ValueError, match=message):
            branch(wrong)
    with pytest.raises(ValueError, match="required models without a cell: gemma"):
        branch(made, models=["qwen", "gemma"])
    with pytest.raises(ValueError, match="without a cell: none is named"):
        branch(made, models=[])
    with pytest.raises(ValueError, match=r"alpha lies in \(0, 1\), not 5"):
        branch(made, alpha=5)


def test_the_examples():
    module = importlib.import_module("kvretain.evidence.significance")
    assert doctest.testmod(module) == (0, 3)
