"""From a question to an answer under a retention policy, with timings and the size of the cache. No terminal here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .cache.support import keyword

if TYPE_CHECKING:
    from .cache import RetentionCache


@dataclass(frozen=True)
class Prompt:
    """Token ids ``(1, n)``, of which the first ``context`` come before the question (0 if there is no context)."""

    ids: Tensor
    context: int = 0

    def __len__(self) -> int:
        return self.ids.shape[1]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: greedily at ``temperature`` 0, else at random, reproducibly from ``seed``."""

    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is at least 0 (0 is greedy), not {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top-p lies in (0, 1], not {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k is at least 1, not {self.top_k}")

    def options(self) -> dict[str, Any]:
        """Arguments for ``model.generate``."""
        if self.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": 0 if self.top_k is None else self.top_k,
        }


@dataclass(frozen=True)
class Reply:
    """An answer and what it cost.

    Attributes:
        text: the answer, special tokens removed.
        prompt_tokens, new_tokens: tokens read and written (an end-of-text token counts).
        kept: entries per KV head, averaged over the compressed layers, right after the prefill.
        kept_at_end, mean_kept, peak_kept: the same after the last token, and the mean and the most over all passes.
        cache_bytes: bytes of key and value storage right after the prefill, measured from the tensors.
        cache_bytes_at_end: the same at the end; decoding reserves room for ``every`` more entries.
        prefill_seconds: until the first new token is there; ``decode_seconds``: from the first to the last.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    kept: float
    kept_at_end: float
    mean_kept: float
    peak_kept: int
    cache_bytes: int
    cache_bytes_at_end: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Decoding alone, prefill excluded; None if fewer than two tokens were written."""
        return (self.new_tokens - 1) / self.decode_seconds if self.new_tokens > 1 else None


def build_prompt(tokenizer: Any, question: str, *, context: str = "", opening: str = "", raw: bool = False) -> Prompt:
    """Context, then question, as one user message in the tokenizer's chat template if it has one.

    Args:
        tokenizer: a transformers tokenizer.
        question: what to ask, or the whole prompt if there is no context.
        context: the text to ask about.
        opening: how the reply begins; the model continues it.
        raw: no chat template and no words of our own around the texts.

    Raises:
        ValueError: an empty question.
    """
    question, context = question.strip(), context.strip()
    if not question:
        raise ValueError("the question (or prompt) is empty")
    chat = not raw and getattr(tokenizer, "chat_template", None) is not None
    if chat:
        message = {"role": "user", "content": f"{context}\n\n{question}" if context else question}
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        text += opening
    elif context and not raw:
        text = f"{context}\n\nQuestion: {question}\nAnswer:{' ' * bool(opening)}{opening}"
    else:
        text = (f"{context}\n\n" if context else "") + question + opening
    # Tokenized in two pieces, so that the tokens are the same whether or not the question is known at prefill.
    cut = max(text.rfind(question), 0) if context else 0
    head = tokenizer(text[:cut], add_special_tokens=not chat)["input_ids"] if cut else []
    tail = tokenizer(text[cut:], add_special_tokens=not chat and not cut)["input_ids"]
    return Prompt(torch.tensor([head + tail]), len(head))


def answer(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    cache: RetentionCache,
    *,
    max_new_tokens: int = 64,
    blind: bool = False,
    chunk: int | None = None,
    sampling: Sampling = Sampling(),
    on_prefill: Callable[[float], None] | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Reply:
    """Answers ``prompt`` with ``model.generate`` on an empty ``cache``.

    By default the prompt is prefilled in one pass, so that a policy which reads recent queries sees the question. The
    cache is compressed after each pass, so ``blind`` and ``chunk`` make it choose before the question is known.

    Args:
        model, tokenizer: from :func:`kvretain.models.load_model`.
        prompt: from :func:`build_prompt`.
        cache: an empty :class:`~kvretain.RetentionCache` made for ``model``.
        max_new_tokens: most tokens to write.
        blind: the context passes first; the question comes to a cache compressed without it.
        chunk: most tokens a pass, which bounds the peak memory; None is the whole prompt at once.
        sampling: greedy by default.
        on_prefill: receives the number of prompt tokens done so far, several times a pass.
        on_text: receives each new piece of the answer as it comes.
    """
    ids = prompt.ids.to(model.device)
    stops = _stops(len(prompt), prompt.context if blind else 0, chunk)
    if sampling.temperature:
        torch.manual_seed(sampling.seed)
    with ExitStack() as prefill, torch.inference_mode():
        if on_prefill:
            prefill.enter_context(watch(model, on_prefill))
        stream = _Stream(tokenizer, cache, on_text, prefill.close)
        decoder = model.get_decoder()
        for start, stop in zip([0, *stops], stops, strict=False):
            decoder(input_ids=ids[:, start:stop], **keyword(decoder, cache))
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            pad_token_id=padding,
            streamer=stream,
            **keyword(model, cache),
            **sampling.options(),
        )
    return Reply(
        text=tokenizer.decode(stream.tokens, skip_special_tokens=True),
        prompt_tokens=len(prompt),
        new_tokens=len(stream.tokens),
        kept=stream.kept,
        kept_at_end=_kept(cache),
        mean_kept=cache.trace.mean_length,
        peak_kept=cache.trace.peak_length,
        cache_bytes=stream.nbytes,
        cache_bytes_at_end=cache.nbytes,
        prefill_seconds=stream.first - stream.start,
        decode_seconds=stream.last - stream.first,
    )


def decode_speed(model: Any, cache: RetentionCache, *, steps: int = 16, warmup: int = 2) -> float:
    """Tokens a second of single-token passes on what ``cache`` holds now; it grows by ``steps + warmup`` tokens.

    Unlike the rate of an answer this does not depend on how long the answer is.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    given = keyword(model, cache)
    with torch.inference_mode():
        for step in range(steps + warmup):
            if step == warmup:
                start = time.perf_counter()
            logits = model(input_ids=token, **given).logits
            token = logits[:, -1:].argmax(-1)
            token.item()  # waits for an asynchronous device
    return steps / (time.perf_counter() - start)


def _stops(total: int, context: int, chunk: int | None) -> list[int]:
    """Where passes end before the last one, which belongs to ``generate``."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is at least 1 token, not {chunk}")
    stops = {context} if context else set()
    for start, stop in ((0, context), (context, total)):
        stops.update(range(start + chunk, stop, chunk) if chunk else ())
    return sorted(stops)


def _kept(cache: RetentionCache) -> float:
    *_, step = cache.trace
    return sum(step.kept) / len(step.kept)


@contextmanager
def watch(model: Any, report: Callable[[float], None]) -> Iterator[None]:
    """Reports tokens done while passes run: each layer that finishes is its share of the pass."""
    layers = getattr(model.get_decoder(), "layers", [])
    done = 0.0

    def after(module: Any, inputs: Any, output: Any) -> None:
        nonlocal done
        hidden = output[0] if isinstance(output, tuple) else output
        done += hidden.shape[1] / len(layers)
        report(done)

    handles = [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Stream:
    """What ``generate`` calls with the prompt and then with each new token."""

    def __init__(
        self, tokenizer: Any, cache: RetentionCache, on_text: Callable[[str], None] | None, on_first: Callable[[], None]
    ) -> None:
        self.tokenizer, self.cache, self.on_text, self.on_first = tokenizer, cache, on_text, on_first
        self.tokens: list[int] = []
        self.line = 0  # index of the first token of the line being written
        self.sent = ""  # what of that line is out
        self.prompt_seen = False
        self.kept = 0.0
        self.nbytes = 0
        self.start = self.first = self.last = time.perf_counter()

    def put(self, value: Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.last = time.perf_counter()
        if not self.tokens:
            self.first = self.last
            self.kept, self.nbytes = _kept(self.cache), self.cache.nbytes
            self.on_first()
        self.tokens.append(int(value))
        self._write()

    def end(self) -> None:
        self._write(last=True)

    def _write(self, last: bool = False) -> None:
        if self.on_text is None:
            return
        text = self.tokenizer.decode(self.tokens[self.line :], skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return  # the token ends inside a character
        if new := text[len(self.sent) :]:
            self.on_text(new)
        self.sent = text
        if text.endswith("\n"):  # decoding starts anew at each line, to stay linear in the length
            self.line, self.sent = len(self.tokens), ""
