"""Reading a long text in a full cache of fixed size: when it fills, the model sums up what it holds and starts anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cache import RetentionCache
from .replay import forward, prefill

CUE = "\n\nTo sum up, the facts and numbers to remember are:"
"""What the model is given to make it write a summary."""

LEAD = 4
"""First tokens of the text that stand before every summary, as sinks."""


def least_budget(tokenizer: Any, summary: int) -> int:
    """The smallest budget that :func:`read_summarising` accepts: two summaries with their cues, and a token."""
    return LEAD + 2 * (len(tokenizer(CUE, add_special_tokens=False)["input_ids"]) + summary) + 1


@dataclass(frozen=True)
class Reading:
    """A text that was read.

    Attributes:
        cache: a full one that holds the first tokens, the last summary and what followed it.
        stored: entries per KV head after each forward pass, those that wrote summaries included.
        summaries: what the model wrote, in order.
        passes: forward passes that ``cache`` had seen when the text ended.
    """

    cache: RetentionCache
    stored: tuple[int, ...]
    summaries: tuple[str, ...]
    passes: int

    def lengths(self) -> tuple[float, float]:
        """Entries per KV head after each forward pass, mean and largest, those that followed the reading included: as
        of a :class:`~kvretain.cache.trace.Trace`."""
        later = [step.kept[0] for step in self.cache.trace][self.passes :]
        stored = [*self.stored, *later]
        return sum(stored) / len(stored), max(stored)


def read_summarising(
    model: Any, tokenizer: Any, ids: Sequence[int], *, budget: int, summary: int, chunk: int = 64
) -> Reading:
    """Feeds ``ids`` so that never more than ``budget`` entries are stored.

    Source: the family "Decoding" of α's design space (arXiv 2605.14292), whose members are not public; the definition
    is kvretain's. Before a pass that would leave no room for a summary, the model is given :data:`CUE` and writes up to
    ``summary`` greedy tokens, or until it ends a paragraph or the text; then the cache is emptied and reads the first
    :data:`LEAD` tokens, the cue and the summary. Nothing is evicted, so that no policy has a say.

    Args:
        model, tokenizer: from :func:`kvretain.load_model`.
        ids: of the text, at least one.
        budget: entries per KV head.
        summary: most tokens of a summary.
        chunk: most tokens of a pass.

    Raises:
        ValueError: ``budget`` does not hold two summaries with their cues, so that little else would ever fit.
    """
    cue = list(tokenizer(CUE, add_special_tokens=False)["input_ids"])
    if budget < (least := least_budget(tokenizer, summary)):
        raise ValueError(
            f"a summary of {summary} tokens needs a budget of at least {least} with this tokenizer, not {budget}: "
            "give a larger budget or a shorter summary"
        )
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends]) | {tokenizer.eos_token_id}
    ids, room = list(ids), budget - len(cue) - summary
    cache, held, fed = RetentionCache.for_model(model, "full"), 0, 0
    stored: list[int] = []
    summaries: list[str] = []

    def feed(tokens: list[int]) -> None:
        nonlocal held
        prefill(model, tokens, cache)
        held += len(tokens)
        stored.append(held)

    while fed < len(ids):
        part = ids[fed : fed + min(chunk, room - held)]
        if part:
            feed(part)
            fed += len(part)
            continue
        new, written = cue, list[int]()
        while len(written) < summary and not (written and written[-1] in ends):
            following = int(forward(model, new, cache, logits=1).argmax())
            held += len(new)
            stored.append(held)
            written.append(following)
            new = [following]
            if "\n\n" in tokenizer.decode(written).lstrip():
                break
        written = [token for token in written if token not in ends]
        summaries.append(tokenizer.decode(written, skip_special_tokens=True))
        cache, held = RetentionCache.for_model(model, "full"), 0
        feed([*ids[:LEAD], *cue, *written])
    return Reading(cache, tuple(stored), tuple(summaries), len(cache.trace))
