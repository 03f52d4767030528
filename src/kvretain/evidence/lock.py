"""The lock of a study: what was fixed before anything was measured, and what was chosen before anything was confirmed.

One JSON file in the study's folder. It is sealed by a checksum, so that an edited lock is noticed; that protects from
accidents and good intentions, not from fraud.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kvretain

from .plan import Plan
from .store import write_whole
from .units import digest_of
from .workloads import Problem

NAME = "lock.json"


class BrokenPromise(ValueError):
    """A command out of order; says which promise of the protocol it would break."""

    def __init__(self, command: str, why: str, promise: str) -> None:
        super().__init__(f"`kvretain study {command}` is refused: {why}. It would break the promise that {promise}.")


FIXED = "the split, the arms and the statistics are fixed before anything is measured"
ONE_CHOICE = "the held-out problems are run once, by one choice that was made without them"
SAME = "what is confirmed is what was tuned"
WHOLE = "the choice rests on the whole development split"


@functools.cache
def code_hash() -> str:
    """Of the package's version and source files, as they were at the first call: what this process runs."""
    root = Path(kvretain.__file__).parent
    digest = hashlib.sha256(kvretain.__version__.encode())
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}:".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def environment(plan: Plan) -> dict[str, str]:
    """The releases that results depend on."""
    names = ["torch", "transformers", *(["math-verify", "sympy"] if plan.workload.kind == "maths" else [])]
    found = {"kvretain": kvretain.__version__, "python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def facts(plan: Plan, text: str, problems: list[Problem]) -> dict[str, Any]:
    """What must not change during a study."""
    return {
        "plan": hashlib.sha256(text.encode()).hexdigest(),
        "data": plan.data_hash(problems),
        "code": code_hash(),
        "environment": environment(plan),
    }


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words, what differs between two :func:`facts`."""
    words = {
        "plan": "the plan file",
        "data": "the data (problems, or a file that the plan names)",
        "code": "kvretain's source code",
    }
    found = [word for name, word in words.items() if before[name] != now[name]]
    old, new = before["environment"], now["environment"]
    found += [
        f"{name} ({old.get(name, 'absent')} then, {new.get(name, 'absent')} now)"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    return found


class Lock:
    """The lock in a folder; ``content`` is empty before ``init``.

    Keys: ``facts``, ``least`` (:meth:`~kvretain.evidence.plan.Plan.least`), ``plan_text``, ``plan_path``, ``problems``,
    ``development``, ``heldout``, ``tuned`` (true once the plan as it is was, None before), ``frozen`` (None before),
    ``confirmed`` (when it was complete, None before), ``history``: ``command`` and ``at`` of each step; of an ``init``
    after a change also ``changed``, ``runs`` on the development split until then, and the earlier ``plan_text`` if
    that changed.

    Raises:
        ValueError: it is damaged or was edited.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.content: dict[str, Any] = {}
        if not self.path.is_file():
            return
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            sealed = content.pop("seal") == digest_of(content)
        except (ValueError, KeyError, AttributeError):
            sealed = False
        if not sealed:
            raise ValueError(
                f"the lock {self.path} was edited or is damaged: restore it from a copy, or begin a new study in "
                "another folder (--out)"
            )
        self.content = content

    def __bool__(self) -> bool:
        return bool(self.content)

    def save(self, event: str | None = None, about: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """Writes the lock with ``changes``, whole; ``event`` goes into its history, with what there is to say ``about``
        it."""
        content = {**self.content, **changes}
        if event:
            entry = {"command": event, "at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), **(about or {})}
            content["history"] = [*content.get("history", []), entry]
        self.content = json.loads(json.dumps(content))
        sealed = {**self.content, "seal": digest_of(self.content)}
        write_whole(self.path, (json.dumps(sealed, indent=1, ensure_ascii=False) + "\n").encode())


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds the folder for one process; it is free again however the process ends.

    Raises:
        ValueError: another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows, where it is up to the user
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".busy").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another command is at work in {folder}: wait for it, or stop it") from None
        yield
