"""The command ``kvretain``."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; without the extra ``cli`` it says in one line how to install it."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f'kvretain: {error.name} is not installed; run: pip install "kvretain[cli]"')
    from .commands import app

    app(prog_name="kvretain")


if __name__ == "__main__":
    main()
