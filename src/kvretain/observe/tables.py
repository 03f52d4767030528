"""From an observation to the numbers of each figure: what the CSV files hold and the plots draw."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import measures

if TYPE_CHECKING:
    from .collect import Observation

Row = dict[str, str | int | float]

RADIUS = 2
"""Positions up to this far from a kept entry count as covered: the reach of HubKV's window of 5."""

LAGS = 50
SEGMENTS = (16, 32)
SHARES = (0.02, 0.05, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75)
"""Budgets of the segment coverage, as shares of the entries that compete; the paper's seven ratios are among them."""

HEADLINE = 0.1
"""The budget at which the summary quotes coverages."""

CURVES, PERMUTATIONS, DRAWS = 20, 200, 10
"""Repetitions: of the shuffled coverage curve, of the permutation band, of the random choice."""


@dataclass(frozen=True)
class Table:
    """One figure in numbers.

    Attributes:
        name: of the files, without ending.
        title: what it is about.
        caption: how it was computed, from which model and text, with which n.
        rows: one mapping per line of the CSV file, all with the same keys.
    """

    name: str
    title: str
    caption: str
    rows: list[Row]

    def write(self, folder: Path) -> None:
        """Writes ``<name>.csv`` into ``folder``; numbers with 6 significant digits."""
        with (folder / f"{self.name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def tables(
    observation: Observation, source: str, seed: int, report: Callable[[int, int, str], None]
) -> Iterator[Table]:
    """The tables of all figures and, last, ``summary``: the headline numbers with their intervals.

    Args:
        observation: from :func:`~kvretain.observe.collect.collect`.
        source: model and text, for the captions.
        seed: of permutations, random choices and bootstrap.
        report: receives figures done, figures in all, and the name of the one that comes next.
    """
    layers, heads = observation.attention.shape[:2]
    basis = (
        f"{source}, {observation.tokens:,} tokens in one prefill; {layers} layers × {heads} KV heads = "
        f"{observation.heads} heads; {observation.candidates:,} entries per head compete (without the first "
        f"{observation.sinks} and the last {observation.window}). Seed {seed}."
    )
    summary: list[Row] = []
    for done, make in enumerate(_FIGURES):
        report(done, len(_FIGURES), make.__name__)
        yield make(observation, basis, seed, summary)
    yield Table(
        "summary", "Headline numbers", f"Means over heads with 95 % bootstrap intervals over layers. {basis}", summary
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _sum_up(summary: list[Row], seed: int, scorer: str, quantity: str, values: Tensor) -> None:
    mean, low, high = measures.mean_interval(values, generator=_generator(seed))
    summary.append(
        {"scorer": scorer, "quantity": quantity, "mean": mean, "low": low, "high": high, "heads": values.numel()}
    )


def _spread(values: Tensor) -> tuple[list[float], list[float], list[float]]:
    """Mean, 10th and 90th percentile over the rows of ``values (heads, x)``, a list over ``x`` each."""
    low, high = values.quantile(torch.tensor([0.1, 0.9], dtype=values.dtype), dim=0)
    return values.mean(0).tolist(), low.tolist(), high.tolist()


def marginal_gain(observation: Observation, basis: str, seed: int, summary: list[Row]) -> Table:
    """Figure 1a: what the next entries of the ranking add to the coverage, beside a shuffled control."""
    total = observation.candidates
    step = max(1, total // 50)
    headline = max(1, round(HEADLINE * total))
    rows: list[Row] = []
    for name, scores in observation.scores.items():
        generator = _generator(seed)
        curve = measures.coverage_curve(scores, RADIUS)
        controls = [measures.coverage_curve(measures.shuffled(scores, generator), RADIUS) for _ in range(CURVES)]
        for order, curves in (("top-k", [curve]), ("shuffled", controls)):
            stacked = torch.cat([c.flatten(0, 1) for c in curves])
            mean, low, high = _spread(measures.marginal_gains(stacked, step))
            reached = stacked.mean(0)
            for index, gains in enumerate(zip(mean, low, high, strict=True)):
                kept = index * step
                rows.append(
                    {
                        "scorer": name,
                        "order": order,
                        "kept": kept,
                        "kept_share": kept / total,
                        "step": step,
                        "coverage_mean": reached[kept].item(),
                        **dict(zip(("gain_mean", "gain_p10", "gain_p90"), gains, strict=True)),
                    }
                )
        at, control = curve[..., headline], torch.stack(controls).mean(0)[..., headline]
        where = f"coverage at {HEADLINE:.0%} kept"
        _sum_up(summary, seed, name, f"{where}: top-k", at)
        _sum_up(summary, seed, name, f"{where}: shuffled", control)
        _sum_up(summary, seed, name, f"{where}: top-k minus shuffled", at - control)
    caption = (
        f"Entries are taken by falling score. C(K) is the share of positions at most {RADIUS} away from one of the K "
        f"taken; drawn is C(K+{step}) − C(K), mean over heads, with the 10th to 90th percentile of heads as a band. "
        f"The control permutes the positions of the scores, the same way in all heads ({CURVES} permutations); its "
        f"mean and band are those of all heads of all permutations together. {basis}"
    )
    return Table("marginal_gain", "Coverage gained by the next entries of a ranking", caption, rows)


def autocorrelation(observation: Observation, basis: str, seed: int, summary: list[Row]) -> Table:
    """Figure 1b: autocorrelation of scores by lag, with a permutation band."""
    rows: list[Row] = []
    for name, scores in observation.scores.items():
        values = measures.autocorrelation(scores, LAGS)
        mean, low, high = _spread(values.flatten(0, 1))
        null_low, null_high = measures.permutation_band(
            scores, LAGS, permutations=PERMUTATIONS, generator=_generator(seed)
        )
        for index in range(LAGS):
            rows.append(
                {
                    "scorer": name,
                    "lag": index + 1,
                    "mean": mean[index],
                    "p10": low[index],
                    "p90": high[index],
                    "null_low": null_low[index].item(),
                    "null_high": null_high[index].item(),
                }
            )
        for lag in (1, 3, 10, 50):
            _sum_up(summary, seed, name, f"autocorrelation at lag {lag}", values[..., lag - 1])
    caption = (
        f"Autocorrelation of a head's scores at lags of 1 to {LAGS} tokens: mean over heads (line), 10th to 90th "
        "percentile of heads (band). Grey: where 95 % of the means lie when positions are permuted, the same way in "
        f"all heads ({PERMUTATIONS} permutations). A scorer that pools over neighbours, as snapkv does over 7, "
        f"correlates up to that reach by itself. {basis}"
    )
    return Table("autocorrelation", "Autocorrelation of scores along the text", caption, rows)


def segment_coverage(observation: Observation, basis: str, seed: int, summary: list[Row]) -> Table:
    """Figure 1c: share of segments with at least one kept entry, by rule and budget."""
    total = observation.candidates
    rows: list[Row] = []
    hubs = []
    for name, scores in observation.scores.items():
        found = (measures.refined_by("hard NMS", scores, 1) > 0).to(torch.float64).mean().item()
        hubs.append(f"{found:.0%} ({name})")
        generator = _generator(seed)
        for share in SHARES:
            keep = max(1, round(share * total))
            for size in SEGMENTS:
                covered = {
                    rule: torch.stack(
                        [
                            measures.segment_coverage(measures.kept_by(rule, scores, keep, generator), total, size)
                            for _ in range(DRAWS if rule == "random" else 1)
                        ]
                    ).mean(0)
                    for rule in measures.RULES
                }
                for rule, values in covered.items():
                    mean, low, high = measures.mean_interval(values, generator=_generator(seed))
                    rows.append(
                        {
                            "scorer": name,
                            "segment": size,
                            "kept": keep,
                            "kept_share": keep / total,
                            "rule": rule,
                            "mean": mean,
                            "low": low,
                            "high": high,
                        }
                    )
                if share == HEADLINE:
                    where = f"segments of {size} covered at {share:.0%} kept"
                    for rule, values in covered.items():
                        _sum_up(summary, seed, name, f"{where}: {rule}", values)
                    for rule in ("hard NMS", "SMD"):
                        _sum_up(summary, seed, name, f"{where}: {rule} minus top-k", covered[rule] - covered["top-k"])
    caption = (
        f"The stretch is cut into segments of {SEGMENTS[0]} or {SEGMENTS[1]} tokens; drawn is the share with at least "
        "one kept entry, mean over heads; bands are 95 % bootstrap intervals over layers. SMD is HubKV's discount "
        "without head weights, at the ratio that the budget implies; random is the mean of "
        f"{DRAWS} draws per head. Hard NMS keeps local peaks only, which are {', '.join(hubs)} of the entries, and is "
        f"filled up from the lowest positions beyond. {basis}"
    )
    return Table("segment_coverage", "Segments reached by each rule at the same budget", caption, rows)


def selectivity(observation: Observation, basis: str, seed: int, summary: list[Row]) -> Table:
    """Figure 2, the histogram: how sharp each head is, and the weight that HubKV would give it."""
    rows: list[Row] = []
    for name, scores in observation.scores.items():
        spread = measures.selectivity(scores)
        weights = measures.head_weights(spread)
        for at, layer in enumerate(observation.layers):
            for head in range(spread.shape[1]):
                rows.append(
                    {
                        "scorer": name,
                        "layer": layer,
                        "head": head,
                        "selectivity": spread[at, head].item(),
                        "weight": weights[at, head].item(),
                    }
                )
        _sum_up(summary, seed, name, "selectivity", spread)
        clipped = ((weights <= 0.8) | (weights >= 1.2)).to(torch.float64)
        _sum_up(summary, seed, name, "share of heads whose weight is clipped", clipped)
    caption = (
        "Selectivity of a head: standard deviation over mean of its scores, shifted to be at least 0 where a scorer is "
        "signed; one count per head, dashed line: median. HubKV weighs heads by selectivity relative to their layer's "
        f"mean. {basis}"
    )
    return Table("selectivity", "Selectivity of heads", caption, rows)


def attention(observation: Observation, basis: str, seed: int, summary: list[Row]) -> Table:
    """Figure 2, the heat maps: attention of the sharpest and of the flattest head by the first scorer's selectivity."""
    name, scores = next(iter(observation.scores.items()))
    spread = measures.selectivity(scores)
    rows: list[Row] = []
    found = []
    for kind, index in (("sharpest", int(spread.argmax())), ("flattest", int(spread.argmin()))):
        at, head = divmod(index, spread.shape[1])
        found.append(f"{kind} {spread[at, head].item():.2f}")
        shares = observation.attention[at, head]
        for query in range(shares.shape[0]):
            for key in range(query + 1):
                rows.append(
                    {
                        "kind": kind,
                        "layer": observation.layers[at],
                        "head": head,
                        "query": query * observation.block,
                        "key": key * observation.block,
                        "queries": min(observation.block, observation.tokens - query * observation.block),
                        "share": shares[query, key].item(),
                    }
                )
    caption = (
        f"Colour: share of a query's attention that goes to a block of {observation.block} keys, mean over the queries "
        f"of a block of {observation.block} and over the query heads of the KV head; rows sum to 1. Chosen among all "
        f"heads by the selectivity of {name} ({', '.join(found)}); below 0.0001 is drawn as 0.0001. Sinks and window "
        f"are shown here. {basis}"
    )
    return Table("attention", "Attention of the sharpest and the flattest head", caption, rows)


def value_cosines(observation: Observation, basis: str, seed: int, summary: list[Row]) -> Table:
    """How alike α's signatures are: the spread of their cosines, with and without the part that all share."""
    rows: list[Row] = []
    found = []
    percentiles = torch.arange(101)
    for name, vectors in observation.values.items():
        for centred in ("no", "yes"):
            pairs, nearest = measures.cosines(vectors, centre=centred == "yes")
            for quantity, sample in (("all pairs", pairs), ("nearest other", nearest)):
                precise = sample.to(torch.float64)
                mean, spread = precise.mean().item(), precise.std(correction=0).item()
                at = precise.quantile(percentiles.to(torch.float64) / 100).tolist()
                for percentile, cosine in zip(percentiles.tolist(), at, strict=True):
                    rows.append(
                        {
                            "signature": name,
                            "centred": centred,
                            "of": quantity,
                            "count": len(sample),
                            "mean": mean,
                            "sd": spread,
                            "percentile": percentile,
                            "cosine": cosine,
                        }
                    )
                if quantity == "all pairs":
                    label = f"{name}, centred" if centred == "yes" else name
                    numbers = [f"{round(number, 2) + 0.0:.2f}" for number in (mean, spread, at[5], at[95])]
                    found.append("{}: {} ± {} (5–95 %: {} to {})".format(label, *numbers))
    caption = (
        "Cosines between α's value signatures: value vectors averaged over layers and heads, normalised; centred: "
        "without their mean over the entries that compete. Left: all pairs of entries. Right: each entry's largest "
        f"cosine to any other. Mean ± standard deviation over pairs: {'; '.join(found)}. The narrower the curve, the "
        f"more alike the penalty of all entries and the less a weight means. {basis}"
    )
    return Table("value_cosines", "How alike the value signatures of tokens are", caption, rows)


_FIGURES = (marginal_gain, autocorrelation, segment_coverage, selectivity, attention, value_cosines)
