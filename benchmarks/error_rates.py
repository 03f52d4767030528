"""How often the statistics of a study find what is not there, and what is: the tables of docs/evidence.md.

python benchmarks/error_rates.py
"""

import argparse
import time

import torch

from kvretain.evidence.power import Design, draw_differences, minimum_detectable, power, simulated_power
from kvretain.evidence.significance import sign_p_values


def naive_p_values(differences: torch.Tensor, resamples: int, generator: torch.Generator) -> torch.Tensor:
    """Two-sided p-values by counting how often resamples of the percentile bootstrap cross 0."""
    problems = differences.shape[1]
    drawn = torch.randint(problems, (resamples, problems), generator=generator)
    weights = torch.zeros(resamples, problems, dtype=torch.float64).scatter_add_(
        1, drawn, torch.ones(drawn.shape, dtype=torch.float64)
    )
    means = weights @ differences.T
    return (2 * torch.minimum((means <= 1e-9).double().mean(0), (means >= -1e-9).double().mean(0))).clamp(max=1)


def coverage(differences: torch.Tensor, truth: float, resamples: int, generator: torch.Generator) -> float:
    """Share of 95 % percentile intervals that hold the true difference of sums."""
    problems = differences.shape[1]
    weights = torch.zeros(resamples, problems, dtype=torch.float64)
    drawn = torch.randint(problems, (resamples, problems), generator=generator)
    weights.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
    means = weights @ differences.T / problems
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return ((low <= truth) & (truth <= high)).double().mean().item()


def no_effect(problems: int, runs: int, cells: int, studies: int, draw: torch.Generator) -> torch.Tensor:
    """Sums of differences ``(studies * cells, problems)`` of two equal arms, problems of all difficulties."""
    easy = torch.rand(studies, 1, problems, 1, generator=draw) ** 2
    shape = (studies, cells, problems, runs)
    arms = [(torch.rand(shape, generator=draw) < easy).double().sum(3) for _ in range(2)]
    return (arms[1] - arms[0]).flatten(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--studies", type=int, default=2000, help="simulated studies per row")
    parser.add_argument("--resamples", type=int, default=4000, help="of each p-value")
    options = parser.parse_args()
    part = 200
    began = time.time()

    print("No effect: share of studies with any significant cell (target: at most 5 %)\n")
    print("| problems | runs | cells | p_value | percentile crossing | interval coverage |")
    print("|---|---|---|---|---|---|")
    for problems, runs, cells in [(40, 1, 1), (40, 1, 4), (40, 3, 6), (100, 1, 4), (299, 1, 4), (299, 3, 4)]:
        draw = torch.Generator().manual_seed(problems + runs + cells)
        found, naive, covered = 0, 0, 0.0
        for _ in range(options.studies // part):
            differences = no_effect(problems, runs, cells, part, draw)
            p = sign_p_values(differences, resamples=options.resamples, generator=draw).view(part, cells)
            found += int((p.amin(1) <= 0.05 / cells).sum())
            p = naive_p_values(differences, options.resamples, draw).view(part, cells)
            naive += int((p.amin(1) <= 0.05 / cells).sum())
            covered += part * coverage(differences, 0.0, 1000, draw)
        shares = [f"{100 * count / options.studies:.1f} %" for count in (found, naive, covered)]
        print(f"| {problems} | {runs} | {cells} | {' | '.join(shares)} |", flush=True)

    print("\nPlanted effects: how often the smallest detectable one is found\n")
    print("| problems | runs | cells | discordant | correlation | promised | difference | found |")
    print("|---|---|---|---|---|---|---|---|")
    for design in (
        Design(299, runs=3, discordant=200 / 897, cells=4),
        Design(299, runs=3, discordant=200 / 897, correlation=0.3, cells=4),
        Design(299, runs=3, discordant=50 / 897, cells=4),
        Design(299, runs=1, discordant=0.2, cells=4),
        Design(40, runs=1, discordant=0.5),
        Design(40, runs=4, discordant=0.4, correlation=0.3),
    ):
        for target in (0.5, 0.8, 0.95):
            difference = minimum_detectable(design, target)
            found = simulated_power(design, difference, studies=options.studies, resamples=options.resamples)
            print(
                f"| {design.problems} | {design.runs} | {design.cells} | {100 * design.discordant:.0f} % "
                f"| {design.correlation:g} | {100 * power(design, difference):.0f} % "
                f"| {100 * difference:.1f} points | {100 * found:.1f} % |",
                flush=True,
            )

    draw = torch.Generator().manual_seed(0)
    drawn = draw_differences(Design(299, runs=3, discordant=0.2), 0.05, 1000, draw) / 3
    covered = coverage(drawn, 0.05, 1000, draw)
    print(f"\nInterval coverage at a true difference of 5 points, 299 problems x 3 runs: {100 * covered:.1f} %")
    print(f"{time.time() - began:.0f} s, {options.studies} studies a row, torch {torch.__version__}")


if __name__ == "__main__":
    main()
