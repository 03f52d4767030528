"""Rows of a benchmark: from a JSON or JSONL file, or from the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HUB = "hub"
"""In place of a path: load from the hub."""


def from_file(path: Path) -> list[tuple[str, Any]]:
    """The rows of a file with a JSON list, or with one JSON value a line, each with its place for error messages.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no UTF-8, or no JSON (names the line).
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
        if text.startswith("["):
            return [(f"{path}, row {number}", row) for number, row in enumerate(json.loads(text), 1)]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; give a JSON or JSONL file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    rows = []
    # Not splitlines: JSON strings may hold other line separators of Unicode as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append((f"{path}, line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
    return rows


def from_hub(dataset: str, config: str | None = None, **options: Any) -> list[tuple[str, Any]]:
    """The rows of ``datasets.load_dataset(dataset, config, **options)``, each with its place.

    Raises:
        ImportError: ``datasets`` is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError(
            'loading from the hub needs datasets: pip install "kvretain[hub]", or give a local file'
        ) from None
    rows = datasets.load_dataset(dataset, config, **options)
    return [(f"{dataset}, row {number}", row) for number, row in enumerate(rows, 1)]


def checked(rows: Iterable[tuple[str, Any]], columns: Sequence[str], what: str, source: str) -> list[dict[str, Any]]:
    """The rows without their places, if each is an object with ``columns``.

    Raises:
        ValueError: one is not (names its place and the field), or there are none.
    """
    found = []
    for place, row in rows:
        if not isinstance(row, Mapping):
            raise ValueError(f"{place}: a row must be an object with fields, not {type(row).__name__}")
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            raise ValueError(f"{place}: no {', '.join(missing)}; {what} needs {', '.join(columns)}")
        found.append({**row, "place": place})
    if not found:
        raise ValueError(f"{source} has no rows")
    return found


def texts(row: Mapping[str, Any], column: str) -> tuple[str, ...]:
    """The strings in a list column.

    Raises:
        ValueError: no list of at least one string that is not blank.
    """
    value = row[column]
    if not isinstance(value, list | tuple) or not value or not all(isinstance(v, str) and v.strip() for v in value):
        raise ValueError(f"{row['place']}: {column} is {str(value)[:80]!r}, not a list of texts")
    return tuple(value)


def text(row: Mapping[str, Any], column: str) -> str:
    """The string in a column.

    Raises:
        ValueError: something else.
    """
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"{row['place']}: {column} is {str(value)[:80]!r}, not text")
    return value


def digest(*values: Any) -> str:
    """16 hexadecimal digits that depend on the content of JSON values, wherever they were read from."""
    content = json.dumps(values, sort_keys=True, ensure_ascii=False, default=list)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def find(data: str, places: Sequence[str], what: str) -> Path:
    """The file ``data`` itself, or the first of ``places`` in the folder ``data``.

    Raises:
        ValueError: ``data`` is neither, or holds none of ``places`` (names them).
    """
    folder = Path(data)
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise ValueError(f"--data {data} is no file and no folder; {what} reads {' or '.join(places)} in a folder")
    for place in places:
        if (folder / place).is_file():
            return folder / place
    raise ValueError(f"the folder {data} holds no {' or '.join(places)}, which {what} reads")
