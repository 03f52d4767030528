"""Results on disk: one Parquet file per example, each version of it written in one piece or not at all.

::

    DIR/run.json                what was run: settings, versions, all commands
    DIR/parts/single-00007.parquet    the rows of one example (longbench.qasper-00007.parquet)
    DIR/rows.parquet            all of them, in order
    DIR/summary.json, summary.md

A run that is killed loses the examples under way (of streamed tasks, the policies under way) and nothing else; the
same command goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .measure import Case, Measurement


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError('evaluations are stored with pyarrow: pip install "kvretain[cli,arrow]"') from None
    return pyarrow, pyarrow.parquet


def _schema() -> Any:
    pyarrow, _ = _arrow()
    kinds = {
        "str": pyarrow.string(),
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "list[list[float]]": pyarrow.list_(pyarrow.list_(pyarrow.float32())),
    }
    fields = dataclasses.fields(Measurement)
    return pyarrow.schema([(field.name, kinds[str(field.type).partition(" ")[0]]) for field in fields])


def write_whole(path: Path, content: bytes) -> None:
    """Writes ``content`` so that ``path`` holds all of it or what it held before, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Store:
    """The folder of one evaluation.

    Args:
        folder: made if it is not there.
        identity: what all rows of the folder share; a folder with another identity is refused.

    Raises:
        ValueError: the folder holds an evaluation with other settings (names them), or something else.
        ImportError: pyarrow is not installed.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any]) -> None:
        _arrow()
        self.folder, self.identity = Path(folder), identity
        self.sources: dict[str, str] = {}
        self.earlier: list[str] = []  # commands that measured into this folder before
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{folder} is a file; --out is a folder")
        if (self.folder / "run.json").is_file() and any((self.folder / "parts").glob("*.parquet")):
            run = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
            known, self.sources = run["identity"], run.get("sources", {})
            self.earlier = [*run.get("earlier", []), *([run["command"]] if "command" in run else [])]
            wanted = json.loads(json.dumps(identity))
            changed = [
                f"{key} ({known.get(key)!r} there, {wanted.get(key)!r} now)"
                for key in sorted({*known, *wanted})
                if known.get(key) != wanted.get(key)
            ]
            if changed:
                raise ValueError(f"{folder} holds an evaluation with another {', '.join(changed)}: use another folder")
        elif self.folder.exists() and any(path.name not in ("run.json", "parts") for path in self.folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no evaluation: use another folder")

    @classmethod
    def existing(cls, folder: str | Path) -> tuple[Store, dict[str, Any]]:
        """The evaluation in ``folder``, and what :meth:`begin` wrote of its last run.

        Raises:
            ValueError: there is no evaluation in ``folder``, or one without any rows yet.
        """
        path = Path(folder) / "run.json"
        if not path.is_file():
            raise ValueError(f"{folder} holds no evaluation: give the --out folder of `kvretain eval`")
        if not any((Path(folder) / "parts").glob("*.parquet")):
            raise ValueError(f"the evaluation in {folder} has measured nothing yet")
        run = json.loads(path.read_text(encoding="utf-8"))
        store = cls(folder, run.pop("identity"))
        store.earlier = run.pop("earlier", [])
        run.pop("sources", None)
        return store, run

    def bind(self, sources: dict[str, str]) -> None:
        """Takes note of what tasks are read from; unlike the identity, more may come.

        Args:
            sources: by task, a digest of its content.

        Raises:
            ValueError: a task was measured on another content.
        """
        for task, source in sources.items():
            if self.sources.get(task, source) != source:
                raise ValueError(
                    f"{self.folder} holds results of {task} on other data ({self.sources[task]} there, {source} now): "
                    "use another folder"
                )
        self.sources |= sources

    def begin(self, run: dict[str, Any]) -> None:
        """Writes ``run.json``: the identity, the sources, and ``run``, what else there is to know."""
        self.earlier = [text for text in dict.fromkeys(self.earlier) if text != run.get("command")]
        notes = {"sources": self.sources, "earlier": self.earlier}
        known = {name: value for name, value in notes.items() if value}
        content = json.dumps({"identity": self.identity, **known, **run}, indent=2, ensure_ascii=False) + "\n"
        write_whole(self.folder / "run.json", content.encode())

    def _part(self, task: str, index: int) -> Path:
        return self.folder / "parts" / f"{task.replace(':', '.')}-{index:05d}.parquet"

    def read(self, task: str, index: int) -> list[Measurement]:
        """The rows of one example, none if there are none yet."""
        path = self._part(task, index)
        return self._rows(path) if path.is_file() else []

    def _rows(self, path: Path) -> list[Measurement]:
        pyarrow, parquet = _arrow()
        try:
            table = parquet.read_table(path, schema=_schema())
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} cannot be read ({error}); delete it and run the command again") from None
        return [Measurement(**row) for row in table.to_pylist()]

    def add(self, rows: Sequence[Measurement]) -> None:
        """Adds rows of one example, durably; the same cases are replaced."""
        task, index = rows[0].task, rows[0].index
        merged = {row.case: row for row in (*self.read(task, index), *rows)}
        write_whole(self._part(task, index), self._encode(merged.values(), {}))

    def _encode(self, rows: Iterable[Measurement], about: dict[str, Any]) -> bytes:
        pyarrow, parquet = _arrow()
        schema = _schema().with_metadata({"kvretain": json.dumps({"identity": self.identity, **about})})
        table = pyarrow.Table.from_pylist([dataclasses.asdict(row) for row in rows], schema=schema)
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink)
        return bytes(sink.getvalue().to_pybytes())

    def missing(self, task: str, index: int, cases: Sequence[Case]) -> list[Case]:
        """Those of ``cases`` that the example has no row for."""
        known = {row.case for row in self.read(task, index)}
        return [case for case in cases if case not in known]

    def rows(self) -> list[Measurement]:
        """All rows, by task and example."""
        parts = sorted((self.folder / "parts").glob("*.parquet"))
        return [row for part in parts for row in self._rows(part)]

    def finish(self, about: dict[str, Any], summary: dict[str, Any], markdown: str) -> list[Path]:
        """Writes ``rows.parquet`` and the summary; returns their paths."""
        files = {
            "rows.parquet": self._encode(self.rows(), about),
            "summary.json": (json.dumps(summary, indent=2, ensure_ascii=False) + "\n").encode(),
            "summary.md": markdown.encode(),
        }
        for name, content in files.items():
            write_whole(self.folder / name, content)
        return [self.folder / name for name in files]
