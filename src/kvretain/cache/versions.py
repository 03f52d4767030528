"""Which transformers the cache runs on, checked before anything is imported from it: names come and go."""

from __future__ import annotations

OLDEST = (5, 17)


def check_transformers() -> None:
    """Raises ImportError below transformers 5.17, the oldest release that the cache is tested with."""
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2] if part.isdigit())
    if version < OLDEST:
        raise ImportError(
            f"RetentionCache needs transformers>=5.17, found {transformers.__version__}: pip install -U transformers "
            "(what works on tensors alone, such as kvretain.hub_refine, runs without it)",
            name="transformers",
        )
