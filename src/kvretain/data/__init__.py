"""Text that ships with the package; `NOTICE.md` beside it names the source and the licence."""

from importlib.resources import files
from pathlib import Path


def chapter() -> str:
    """*A Mad Tea-Party*, chapter VII of *Alice's Adventures in Wonderland* (public domain)."""
    return files(__name__).joinpath("alice_chapter_7.txt").read_text(encoding="utf-8")


def read(path: str | None, option: str) -> str:
    """The text in the file ``path``, which ``option`` named; the chapter if it is None.

    Raises:
        ValueError: the file is not UTF-8 text.
    """
    if path is None:
        return chapter()
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path} is not UTF-8 text") from None
