"""Text that ships with the package; `NOTICE.md` beside it names the source and the licence."""

from importlib.resources import files


def chapter() -> str:
    """*A Mad Tea-Party*, chapter VII of *Alice's Adventures in Wonderland* (public domain)."""
    return files(__name__).joinpath("alice_chapter_7.txt").read_text(encoding="utf-8")
