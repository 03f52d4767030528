"""The units of work of a study, what each records, and where records are kept.

A unit is one run of one arm on one problem. Its key is a hash of everything that its result depends on, so that doing
it twice changes nothing, and results stay where they are when a plan gains arms, budgets or models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plan import Cache, Candidate, Plan
from .store import write_whole
from .workloads import Problem


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Unit:
    """One run.

    Attributes:
        key: 24 hexadecimal digits that depend on everything below and on the study's settings.
        model: its name.
        policy: in its canonical text; ``budget``: entries per head; ``cache``: the other arguments.
        problem, sample: which run of which problem.
    """

    key: str
    model: str
    policy: str
    budget: int
    cache: Cache
    problem: Problem
    sample: int


def units_of(
    plan: Plan, base: str, model: str, candidate: Candidate, budget: int, problems: Iterable[Problem]
) -> list[Unit]:
    """The runs of a candidate at a budget.

    Args:
        plan: the study's.
        base: hash of what all runs of the study share.
        model, candidate, budget: what runs.
        problems: on what.
    """
    about = [base, model, candidate.policy, budget, dataclasses.asdict(candidate.cache)]
    return [
        Unit(digest_of([*about, problem.id, sample])[:24], model, candidate.policy, budget, candidate.cache, problem,
             sample)
        for problem in problems
        for sample in range(plan.samples)
    ]  # fmt: skip


@dataclass(frozen=True)
class Record:
    """What a unit found.

    Attributes:
        key, model, policy, budget, problem, sample: of the unit.
        verdict: of :class:`~kvretain.evidence.Verdict`; recall knows ``right`` and ``wrong`` only.
        exact: the verdict by exact string.
        nll: a proxy, nats per token: of the right reply under the budget (recall), or of the model's own reply under a
            full cache (maths); None if it was not measured.
        mean_cache, peak_cache: entries per KV head over the run, see :class:`~kvretain.cache.trace.Trace`.
        prefill_cache: entries after the prompt or context.
        tokens: written.
        reply: what the model wrote.
        seconds: it took; ``finished``: when, in seconds since 1970.
        weights: fingerprint of the model.
        artefact: digest of the calibration or gate that the cache used, see :func:`kvretain.artefacts.digest`; empty if
            it used none. None in records that were made before it was kept.
    """

    key: str
    model: str
    policy: str
    budget: int
    problem: str
    sample: int
    verdict: str
    exact: str
    nll: float | None
    mean_cache: float
    peak_cache: float
    prefill_cache: float
    tokens: int
    reply: str
    seconds: float
    finished: float
    weights: str
    artefact: str | None = None

    @property
    def right(self) -> float:
        """1 for a right answer, 0 otherwise."""
        return float(self.verdict == "right")

    @property
    def right_exact(self) -> float:
        """The same, graded by exact string."""
        return float(self.exact == "right")


class Results:
    """A folder of records, one JSON file each, written whole or not at all, with a checksum inside.

    Raises:
        ValueError: a file is damaged; it is named, and nothing is changed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._records: dict[str, Record] = {}
        for path in sorted(folder.glob("*.json")):
            record = self._read(path)
            self._records[record.key] = record

    @staticmethod
    def _read(path: Path) -> Record:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            whole = content.pop("checksum") == digest_of(content)
            record = Record(**content)
        except (ValueError, TypeError, KeyError, AttributeError):
            whole = False
        if not whole or record.key != path.stem:
            raise ValueError(
                f"the result {path} is damaged (its checksum does not fit): delete this file, and the same command "
                "repeats this one run; all others are kept"
            )
        return record

    def add(self, record: Record) -> None:
        """Keeps a record, durably."""
        content = dataclasses.asdict(record)
        text = json.dumps({**content, "checksum": digest_of(content)}, ensure_ascii=False, indent=1)
        write_whole(self.folder / f"{record.key}.json", text.encode() + b"\n")
        self._records[record.key] = record

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """Those that are still to be done, each once."""
        return list({unit.key: unit for unit in units if unit.key not in self._records}.values())

    def of(self, units: Sequence[Unit]) -> list[Record]:
        """The records of ``units``, in their order.

        Raises:
            KeyError: one is not done.
        """
        return [self._records[unit.key] for unit in units]

    def all(self) -> list[Record]:
        """Every record."""
        return list(self._records.values())

    def __len__(self) -> int:
        return len(self._records)
