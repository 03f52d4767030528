"""Docstrings name things as :class:`~package.Thing`; the site shows that as the code `Thing`."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|mod|data):`(~?)([^`]+)`")


def plain(text: str) -> str:
    """``text`` with roles as code; a leading ``~`` leaves the last part of a dotted name."""
    return ROLE.sub(lambda match: f"`{match[2].rpartition('.')[2] if match[1] else match[2].lstrip('.')}`", text)


class Roles(griffe.Extension):
    """Rewrites every docstring as it is loaded."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
