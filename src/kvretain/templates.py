"""Pages from jinja2 templates that stand beside the code that fills them."""

from __future__ import annotations

from importlib.resources import files
from typing import Any


def render(package: str, template: str, content: dict[str, Any], *, extra: str) -> str:
    """The HTML that ``template``, a file in ``package``, makes of ``content``; values are escaped.

    Args:
        package: a dotted name, e.g. ``__package__``.
        template: the file's name.
        content: what the template names; a name that it lacks is an error.
        extra: the extra of kvretain that brings jinja2, for the message.

    Raises:
        ImportError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise ImportError(f'the page needs jinja2: pip install "kvretain[{extra}]"') from None
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    text = files(package).joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(**content)
