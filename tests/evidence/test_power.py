"""The procedure on studies whose truth is known: how often it finds what is not there, and what is."""

import doctest
import importlib
import math

import pytest
import torch

from kvretain.evidence import Design, minimum_detectable, paired_cluster_bootstrap, power
from kvretain.evidence.power import draw_differences, estimate_noise, simulated_power
from kvretain.evidence.significance import sign_p_values

PAPER = Design(299, runs=3, discordant=0.22, correlation=0.1, cells=4)
SMALL = Design(40, runs=1, discordant=0.3)


def family_wise_error(problems, runs, cells, studies, *, seed, resamples=2000):
    """The share of studies without any effect in which some cell turns out significant.

    Problems differ in difficulty, from never to always solved, and all cells of a study share them: what a real study
    without an effect looks like, and not how ``draw_differences`` draws.
    """
    draw = torch.Generator().manual_seed(seed)
    hits = 0
    for part in [100] * (studies // 100):
        easy = torch.rand(part, 1, problems, 1, generator=draw) ** 2
        shape = (part, cells, problems, runs)
        arms = [(torch.rand(shape, generator=draw) < easy).double().sum(3) for _ in range(2)]
        differences = (arms[1] - arms[0]).flatten(0, 1)
        p = sign_p_values(differences, resamples=resamples, generator=draw).view(part, cells)
        hits += int((p.amin(1) <= 0.05 / cells).sum())
    return hits / studies


def at_most(rate, count):
    """What a share of ``count`` draws stays below with probability 0.999 if the true one is ``rate``."""
    return rate + 3.1 * math.sqrt(rate * (1 - rate) / count)


@pytest.mark.parametrize(("problems", "runs", "cells"), [(40, 1, 1), (40, 1, 4), (60, 3, 4)])
def test_false_findings_are_as_rare_as_promised(problems, runs, cells):
    rate = family_wise_error(problems, runs, cells, 600, seed=problems + cells)
    assert rate <= at_most(0.05, 600)
    assert rate > 0.003  # the procedure is not deaf


@pytest.mark.slow
@pytest.mark.parametrize(("problems", "runs", "cells"), [(40, 1, 1), (40, 1, 4), (40, 3, 6), (299, 1, 4), (299, 3, 4)])
def test_false_findings_are_as_rare_as_promised_in_full(problems, runs, cells):
    rate = family_wise_error(problems, runs, cells, 4000, seed=problems + cells)
    assert 0.01 < rate <= at_most(0.05, 4000)


@pytest.mark.parametrize("design", [PAPER, SMALL, Design(299, discordant=0.06, cells=4)], ids=str)
def test_planted_effects_are_found_with_the_promised_power(design):
    difference = minimum_detectable(design, 0.8)
    found = simulated_power(design, difference, studies=800, resamples=1000)
    assert 0.8 - 3.1 * math.sqrt(0.16 / 800) <= found <= 0.93
    assert simulated_power(design, -difference, studies=800, resamples=1000) == pytest.approx(found, abs=0.08)
    assert simulated_power(design, 0, studies=800, resamples=1000) <= at_most(design.alpha / design.cells, 800)


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    "design",
    [
        PAPER,
        Design(299, runs=3, discordant=50 / 897, cells=4),
        Design(299, discordant=0.3, cells=4),
        Design(299, runs=3, discordant=0.2, correlation=1.0, cells=4),
        Design(100, discordant=0.3, cells=2),
        Design(40, discordant=0.5),
        Design(40, runs=4, discordant=0.4, correlation=0.3),
    ],
    ids=str,
)
def test_planted_effects_are_found_with_the_promised_power_in_full(design, target):
    found = simulated_power(design, minimum_detectable(design, target), studies=4000)
    noise = 3.1 * math.sqrt(target * (1 - target) / 4000)
    assert target - noise <= found <= target + 0.1


def test_the_simulated_procedure_is_the_real_one():
    drawn = draw_differences(PAPER, 0.05, 3, torch.Generator().manual_seed(0))
    for sums in drawn:
        # Three runs whose differences add up to what was drawn.
        parts = [[1] * int(s) if s > 0 else [-1] * int(-s) for s in sums]
        runs = [part + [0] * (3 - len(part)) for part in parts]
        treatment = [int(d > 0) for part in runs for d in part]
        baseline = [int(d < 0) for part in runs for d in part]
        found = paired_cluster_bootstrap(baseline, treatment, [i // 3 for i in range(897)])
        p = sign_p_values(sums[None], resamples=10_000, generator=torch.Generator().manual_seed(9)).item()
        assert found.p_value == pytest.approx(p, abs=0.01)


def test_drawn_differences_are_as_asked():
    design = Design(2000, runs=3, discordant=0.3, correlation=0.4)
    drawn = draw_differences(design, 0.1, 50, torch.Generator().manual_seed(0)) / 3
    assert drawn.mean().item() == pytest.approx(0.1, abs=0.005)
    assert drawn.std().item() / math.sqrt(2000) == pytest.approx(design.standard_error(0.1), rel=0.02)


def test_standard_errors_of_the_paper():
    # 4.79 points at p = 0.0024 and 2.23 at 0.0054 mean standard errors of about 1.6 and 0.8 points.
    assert Design(299, runs=3, discordant=200 / 897).standard_error() == pytest.approx(0.0158, abs=2e-4)
    assert Design(299, runs=3, discordant=50 / 897).standard_error() == pytest.approx(0.0079, abs=2e-4)


def test_power_moves_as_it_must():
    assert power(PAPER, 0) <= PAPER.alpha / PAPER.cells
    grid = [power(PAPER, d) for d in (0.0, 0.02, 0.04, 0.06, 0.1, -0.1)]
    assert grid[:5] == sorted(grid[:5]) and grid[4] == grid[5] > 0.99
    assert power(Design(600, runs=3, cells=4), 0.03) > power(Design(300, runs=3, cells=4), 0.03)
    assert power(Design(300, runs=3, correlation=0.5, cells=4), 0.03) < power(Design(300, runs=3, cells=4), 0.03)
    assert power(Design(300, cells=8), 0.05) < power(Design(300, cells=4), 0.05)
    assert power(Design(20, discordant=1.0), 1.0) == 1
    assert power(PAPER, minimum_detectable(PAPER, 0.9)) == pytest.approx(0.9, abs=1e-6)


def test_noise_is_estimated_from_runs():
    draw = torch.Generator().manual_seed(0)
    for correlation in (0.0, 0.5, 1.0):
        common, own = (torch.rand(4000, n, generator=draw) for n in (1, 3))
        repeat = torch.rand(4000, 3, generator=draw) < math.sqrt(correlation)
        chance = torch.where(repeat, common, own).flatten()
        baseline, treatment = (chance < 0.1).long().tolist(), (chance > 0.8).long().tolist()
        clusters = [i // 3 for i in range(12_000)]
        assert estimate_noise(baseline, treatment, clusters) == pytest.approx((0.3, correlation), abs=0.03)
    assert estimate_noise([0, 1, 1], [1, 1, 0], "abc") == (2 / 3, 0)
    assert estimate_noise([1, 1, 1], [1, 1, 1], "aab") == (0, 0)
    with pytest.raises(ValueError, match="outcomes that are 0 or 1"):
        estimate_noise([0.5, 1], [1, 1], "ab")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"problems": 1}, "problems must be a whole number of at least 2, not 1"),
        ({"problems": 40, "runs": 0}, "runs must be"),
        ({"problems": 40, "cells": 1.5}, "cells must be"),
        ({"problems": 40, "discordant": 0}, r"a share in \(0, 1\], not 0"),
        ({"problems": 40, "correlation": 1.1}, "correlation lies in"),
        ({"problems": 40, "alpha": 0}, "alpha lies in"),
    ],
)
def test_bad_designs(fields, message):
    with pytest.raises(ValueError, match=message):
        Design(**fields)


def test_impossible_questions():
    with pytest.raises(
        ValueError, match=r"a difference of 0\.4 needs at least that share of discordant pairs, not 0\.3"
    ):
        power(SMALL, 0.4)
    with pytest.raises(ValueError, match="plan more problems or runs"):
        minimum_detectable(Design(40, discordant=0.05), 0.8)
    with pytest.raises(ValueError, match=r"target lies between 0\.0125 and 1, not 0\.01"):
        minimum_detectable(PAPER, 0.01)


def test_the_examples():
    module = importlib.import_module("kvretain.evidence.power")
    assert doctest.testmod(module) == (0, 2)
