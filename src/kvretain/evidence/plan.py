"""The plan of a study: a TOML file that says everything before anything is measured.

::

    title = "Does a diverse set recall more than top-k?"
    models = ["smollm2-135m"]
    budgets = [128]
    baseline = "topk"

    [arms]
    topk = "keydiff@layer"
    diverse = "keydiff/diverse(weight={weight})@layer"

    [grid]
    weight = [0.25, 0.5, 1.0]

    [workload]
    kind = "recall"
    problems = 40

Every key that a table takes is a field of the class of the same name here.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import string
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ..cache.budget import Budget
from ..lab import vocabulary
from ..models import check_model_name, kv_heads, load_config, load_tokenizer, parse_dtype
from ..policy import Policy
from .splitting import split
from .summaries import least_budget
from .workloads import WORKLOADS, Chains, Problem, Recall, Workload, at_least, one_of

T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """How problems are split, see :func:`kvretain.evidence.split`.

    Attributes:
        buckets: how many there are.
        development: those to tune on.
        heldout: those to confirm on; by default all others.
    """

    buckets: int = 5
    development: tuple[int, ...] = (0, 1)
    heldout: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if shared := sorted(set(self.development) & set(self.heldout or ())):
            raise ValueError(f"the split overlaps: buckets {shared} are both for development and held out")
        if unknown := [n for n in self.heldout or () if not 0 <= n < self.buckets]:
            raise ValueError(f"held-out buckets {unknown} do not exist: there are 0 to {self.buckets - 1}")

    def sides(self, problems: Iterable[Problem]) -> tuple[list[str], list[str]]:
        """Development and held-out ids.

        Raises:
            ValueError: a side is empty, or a question stands on both.
        """
        problems = list(problems)
        development, heldout = split([p.id for p in problems], buckets=self.buckets, development=self.development)
        if self.heldout is not None:
            _, other = split(heldout, buckets=self.buckets, development=_others(self.buckets, self.heldout))
            heldout = other
        chosen, asked = set(development), {}
        for problem in problems:
            if problem.id in chosen and problem.question:
                asked[" ".join(problem.question.split())] = problem.id
        for problem in problems:
            twin = asked.get(" ".join(problem.question.split())) if problem.question else None
            if twin and problem.id not in chosen:
                raise ValueError(
                    f"the split overlaps: {problem.id!r} asks the same question as {twin!r}, and one is for "
                    "development, the other held out; remove one"
                )
        return development, heldout


def _others(buckets: int, chosen: Iterable[int]) -> list[int]:
    return [number for number in range(buckets) if number not in set(chosen)]


@dataclass(frozen=True)
class Cache:
    """Arguments of :meth:`kvretain.RetentionCache.for_model` for all arms; an arm's own come first.

    Streamed recall takes ``every`` and ``summary`` alone.

    Attributes:
        summary: of an arm ``full`` of streamed recall: the model writes summaries of so many tokens to stay within the
            budget, see :func:`~kvretain.evidence.summaries.read_summarising`; 0 writes none.
    """

    every: int = 128
    trigger: str = "slack"
    sinks: int | None = None
    recent: int | None = None
    protect_prompt: bool = False
    summary: int = 0

    def budget(self, tokens: int) -> Budget:
        """What the cache makes of them.

        Raises:
            ValueError: ``tokens`` do not fit.
        """
        given = dataclasses.asdict(self)
        del given["summary"]
        return Budget(tokens, None, **given)


@dataclass(frozen=True)
class Arm:
    """What is compared: a policy text with fields of the grid in braces, and what differs from ``[cache]``."""

    policy: str
    every: int | None = None
    trigger: str | None = None
    sinks: int | None = None
    recent: int | None = None
    protect_prompt: bool | None = None
    summary: int | None = None

    @property
    def fields(self) -> list[str]:
        """Names in braces, in their order."""
        try:
            names = [name for _, name, *_ in string.Formatter().parse(self.policy) if name is not None]
        except ValueError as error:
            raise ValueError(f"policy {self.policy!r}: {error}; fields of the grid stand in braces") from None
        return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Statistics:
    """How arms are compared.

    Attributes:
        level: of intervals; 1 - level is the family-wise error.
        resamples, seed: of the bootstrap.
        correction: for several cells; ``bonferroni`` is the one there is.
        power: with which a difference should be found.
        discordant: shares of discordant pairs to plan with before anything is measured.
        correlation: of two runs of a problem, likewise.
    """

    level: float = 0.95
    resamples: int = 10_000
    seed: int = 0
    correction: str = "bonferroni"
    power: float = 0.8
    discordant: tuple[float, ...] = (0.1, 0.2, 0.4)
    correlation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("level", "power"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"statistics.{name} lies in (0, 1), not {getattr(self, name)}")
        at_least("statistics.resamples", self.resamples, 1)
        one_of("statistics.correction", self.correction, ["bonferroni"])
        if any(not 0 < share <= 1 for share in self.discordant):
            raise ValueError(f"statistics.discordant holds shares in (0, 1], not {list(self.discordant)}")
        if not 0 <= self.correlation <= 1:
            raise ValueError(f"statistics.correlation lies in [0, 1], not {self.correlation}")

    @property
    def alpha(self) -> float:
        """The family-wise error."""
        return 1 - self.level


@dataclass(frozen=True)
class Branches:
    """What each outcome will mean, written down beforehand; :func:`kvretain.evidence.branch` decides which it is."""

    A: str = "confirmed: significantly better somewhere on each required model and significantly worse nowhere"
    B: str = "not confirmed: no cell is significantly worse, but not each required model has a better one"
    C: str = "harmful: some cell is significantly worse"


@dataclass(frozen=True)
class Candidate:
    """An arm with its fields filled in.

    Attributes:
        arm: its name.
        values: of the fields, as (name, value).
        policy: in its canonical text.
        cache: with the arm's own arguments.
    """

    arm: str
    values: tuple[tuple[str, Any], ...]
    policy: str
    cache: Cache

    @property
    def label(self) -> str:
        """For tables."""
        return ", ".join(f"{name}={value}" for name, value in self.values) or "–"


@dataclass(frozen=True)
class Plan:
    """A study.

    Attributes:
        title: what it asks.
        models: names for :func:`kvretain.load_model`.
        budgets: entries per head of the baseline; the other arms' are solved for.
        baseline: the arm that the others are compared with; it has no fields.
        arms: policies by name.
        workload: what is asked.
        grid: values of the arms' fields.
        required: models on which an effect must show; by default all.
        samples: runs per problem and arm.
        tolerance: of the ratio of mean caches.
        dtype, device: of the models.
        split, cache, statistics, branches: see their classes.
    """

    title: str
    models: tuple[str, ...]
    budgets: tuple[int, ...]
    baseline: str
    arms: dict[str, Arm]
    workload: Workload
    grid: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    samples: int = 1
    tolerance: float = 0.01
    dtype: str | None = None
    device: str | None = None
    split: Split = Split()
    cache: Cache = Cache()
    statistics: Statistics = Statistics()
    branches: Branches = Branches()

    def __post_init__(self) -> None:
        for name in ("models", "budgets"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must name at least one, and none twice: {list(values)}")
        at_least("samples", self.samples, 1)
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance is a share such as 0.01, not {self.tolerance}")
        if self.dtype is not None:
            parse_dtype(self.dtype)
        if unknown := set(self.required) - set(self.models):
            raise ValueError(f"required models {sorted(unknown)} are not among models {list(self.models)}")
        one_of("baseline", self.baseline, self.arms)
        if len(self.arms) < 2:
            raise ValueError("arms has only the baseline: name at least one arm to compare it with")
        if self.arms[self.baseline].fields:
            raise ValueError(f"the baseline {self.baseline!r} is not tuned: fill in its fields {{...}}")
        used = {name for arm in self.arms.values() for name in arm.fields}
        for name in used - self.grid.keys():
            raise ValueError(f"an arm has the field {{{name}}}, but grid has no values for it")
        for name in self.grid.keys() - used:
            raise ValueError(f"grid.{name} has values, but no arm has the field {{{name}}}")
        for candidate in (c for arm in self.arms for c in self.candidates(arm)):
            scorer = Policy.parse(candidate.policy).scorer
            for budget in self.budgets if scorer is not None else ():
                try:
                    candidate.cache.budget(budget)
                except ValueError as error:
                    raise ValueError(f"arm {candidate.arm!r} at budget {budget}: {error}") from None
            streamed = self.workload.kind == "recall"
            if streamed and dataclasses.replace(candidate.cache, every=128, summary=0) != Cache():
                raise ValueError(
                    f"arm {candidate.arm!r}: streamed recall takes no argument of the cache but every and summary"
                )
            at_least("cache.summary", candidate.cache.summary, 0)
            if candidate.cache.summary and (not streamed or scorer is not None):
                raise ValueError(
                    f"arm {candidate.arm!r}: summaries keep a full cache within the budget of streamed recall, so they "
                    "go with the policy 'full' and the workload recall"
                )
        if self.workload.kind == "recall" and self.samples > 1:
            raise ValueError("streamed recall draws nothing, so samples above 1 would repeat the same run: set it to 1")
        if self.statistics.alpha / self.cells < 2 / (self.statistics.resamples + 1):
            raise ValueError(
                f"{self.statistics.resamples} resamples cannot give a p-value below {self.statistics.alpha:g}/"
                f"{self.cells} (cells): raise statistics.resamples"
            )

    @property
    def treatments(self) -> list[str]:
        """The arms but the baseline."""
        return [name for name in self.arms if name != self.baseline]

    @property
    def cells(self) -> int:
        """How many comparisons there are."""
        return len(self.models) * len(self.budgets) * len(self.treatments)

    def candidates(self, arm: str) -> list[Candidate]:
        """What an arm may become: one for each combination of its fields' values, in the grid's order.

        Raises:
            ValueError: a policy that does not parse.
        """
        about, found = self.arms[arm], []
        own = {n.name: v for n in dataclasses.fields(Cache) if (v := getattr(about, n.name)) is not None}
        for values in itertools.product(*(self.grid[name] for name in about.fields)):
            chosen = dict(zip(about.fields, values, strict=True))
            try:
                text = str(Policy.parse(about.policy.format(**{n: repr(v) for n, v in chosen.items()})))
            except ValueError as error:
                raise ValueError(f"arms.{arm}: {error}") from None
            found.append(Candidate(arm, tuple(chosen.items()), text, dataclasses.replace(self.cache, **own)))
        return found

    @cached_property
    def files(self) -> list[str]:
        """All files that the study reads: the workload's, and calibrations and gates that policies name."""
        named = []
        for policy in {c.policy for arm in self.arms for c in self.candidates(arm)}:
            scorer = Policy.parse(policy).scorer
            named += [getattr(scorer, name, "") for name in ("calibration", "gate")]
        return [*self.workload.files, *sorted({name for name in named if name})]

    def least(self) -> dict[str, dict[int, int]]:
        """The smallest budgets that summaries fit into, by model and tokens of a summary; loads the tokenizers of a
        plan with summaries.

        Raises:
            FileNotFoundError, RuntimeError, ImportError: as :func:`kvretain.models.load_tokenizer`.
        """
        every = {candidate.cache.summary for arm in self.arms for candidate in self.candidates(arm)} - {0}
        if not every:
            return {}
        tokenizers = {model: load_tokenizer(model) for model in self.models}
        return {model: {size: least_budget(tokenizers[model], size) for size in every} for model in self.models}

    def check(self) -> None:
        """Checks what lies outside the plan.

        Raises:
            FileNotFoundError: a file or a model folder is not there.
            ValueError: a model of other words than the chains have or with fewer heads than an arm needs, or a budget
                that does not hold an arm's summaries.
            RuntimeError, ImportError: the tokenizer or the configuration of a model, where they must be known, does not
                load.
        """
        for model in self.models:
            check_model_name(model)
            for scorer in {Policy.parse(c.policy).scorer for arm in self.arms for c in self.candidates(arm)}:
                if scorer is not None and scorer.least_heads > 1:  # else nothing need be loaded
                    scorer.check_heads(kv_heads(load_config(model)), model)
            if isinstance(self.workload, Chains):
                vocabulary.check(load_tokenizer(model), load_config(model).vocab_size, model)
        for name in self.files:
            if not Path(name).expanduser().is_file():
                raise FileNotFoundError(f"the plan names the file {name!r}, which is not there")
        for model, sizes in self.least().items():
            for summary, least in sizes.items():
                if min(self.budgets) < least:
                    raise ValueError(
                        f"a summary of {summary} tokens needs a budget of at least {least} on {model}, "
                        f"not {min(self.budgets)}: give larger budgets or shorter summaries"
                    )

    def data_hash(self, problems: Iterable[Problem]) -> str:
        """Of the problems and of the content of all files."""
        digest = hashlib.sha256(json.dumps([dataclasses.astuple(p) for p in problems]).encode())
        if isinstance(self.workload, Recall):
            digest.update(self.workload.read_text().encode())
        for name in self.files:
            digest.update(hashlib.sha256(Path(name).expanduser().read_bytes()).digest())
        return digest.hexdigest()


def read_plan(path: str | Path) -> tuple[Plan, str]:
    """The plan in a TOML file, and its text. Files that it names are looked for beside it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no TOML, an unknown key (the message lists the valid ones), or a value that makes no sense.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no plan at {str(path)!r}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    try:
        return parse_plan(text, path.parent), text
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_plan(text: str, folder: Path) -> Plan:
    """The plan in a TOML text; ``folder`` is where relative file names begin.

    Raises:
        ValueError: as :func:`read_plan`.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from None
    given: dict[str, Any] = dict(table)
    if "arms" in given:
        _table("arms", given["arms"])
        given["arms"] = {
            name: Arm(value) if isinstance(value, str) else _build(Arm, value, f"arms.{name}")
            for name, value in given["arms"].items()
        }
    if "grid" in given:
        _table("grid", given["grid"])
        for name, values in given["grid"].items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"grid.{name} must be a list of at least one value, not {values!r}")
        given["grid"] = {name: tuple(values) for name, values in given["grid"].items()}
    if "workload" in given:
        workload = dict(_table("workload", given["workload"]))
        kind = workload.pop("kind", None)
        one_of("workload.kind", kind, WORKLOADS)
        for name in ("file", "text"):
            if isinstance(workload.get(name), str):
                workload[name] = str(folder / Path(workload[name]).expanduser())
        given["workload"] = _build(WORKLOADS[kind], workload, "workload")
    sections: dict[str, type] = {"split": Split, "cache": Cache, "statistics": Statistics, "branches": Branches}
    for name, cls in sections.items():
        if name in given:
            given[name] = _build(cls, given[name], name)
    return _build(Plan, given, "")


def _build(cls: type[T], table: Any, where: str) -> T:
    """``cls`` from a table, its keys and types checked."""
    _table(where, table)
    dot = where and where + "."
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"unknown key {dot}{key}{hint}; valid: {', '.join(fields)}")
    missing = dataclasses.MISSING
    for name, about in fields.items():
        if name not in table and about.default is missing and about.default_factory is missing:
            raise ValueError(f"the key {dot}{name} is missing")
    hints = get_type_hints(cls)
    return cls(**{key: _typed(hints[key], value, dot + key) for key, value in table.items()})


def _typed(hint: Any, value: Any, name: str) -> Any:
    """``value`` as the type that ``hint`` says; what is built already passes."""
    if get_origin(hint) is types.UnionType:
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return value if len(kinds) > 1 else _typed(kinds[0], value, name)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, not {value!r}")
        return tuple(_typed(get_args(hint)[0], item, f"{name}[{at}]") for at, item in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    kinds_of = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    if hint in kinds_of and type(value) is not hint:
        raise ValueError(f"{name} must be {kinds_of[hint]}, not {value!r}")
    return value


def _table(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table, not {value!r}")
    return value
