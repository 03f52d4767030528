"""A page that shows what policies keep of a text: which tokens, in which heads, when they go, and with what score.

``collect`` runs a policy on a model and records it; ``page`` makes of the runs one HTML file that needs nothing else.
``kvretain view`` is all of it.
"""

from .collect import Eviction, Run, record
from .page import html_page

__all__ = ["Eviction", "Run", "html_page", "record"]
