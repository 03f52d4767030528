"""A press of kvpress as a scorer of kvretain, by duck typing: kvpress itself is not imported."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ...cache.view import CacheView
from ...scores import Scorer
from ...scores.attention import attend, last_queries
from ._marks import lifted

OWN = {
    "AdaKVPress": "adakv",
    "ExpectedAttentionPress": "expected",
    "FastKVzipPress": "fastkvzip",
    "KVzipPress": "kvzip",
    "ObservedAttentionPress": "h2o",
    "PyramidKVPress": "pyramidkv",
    "TOVAPress": "tova",
}
"""kvretain's own policies for presses that :func:`from_press` cannot take, or not whole."""


class _Refusal(ValueError):
    """A press asked for what a cache view does not hold."""


class _Absent:
    """Stands for an argument of ``score`` that a cache view cannot give, except for the attributes ``given``; any
    other use is refused."""

    def __init__(self, press: Any, what: str, **given: Any) -> None:
        self.__dict__.update(given, _press=type(press).__name__, _what=what)

    def _refuse(self, use: str = "") -> NoReturn:
        own = OWN.get(self._press)
        raise _Refusal(
            f"{self._press} reads {self._what}{use}, which a cache does not keep; from_press takes presses that read "
            "keys and values, and with window= the attention of the last queries"
            + (f". kvretain's own policy for it is {own!r}" if own else "")
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # protocols such as copying ask, and a press does not
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse(f"[{key!r}]" if isinstance(key, str) else "")

    def __len__(self) -> int:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        values = [*args, *(kwargs or {}).values()]
        flat = [v for value in values for v in (value if isinstance(value, list | tuple) else [value])]
        next(v for v in flat if isinstance(v, cls))._refuse()


@dataclass(frozen=True, eq=False)
class PressScorer(Scorer):
    """The ``score`` method of a kvpress press; make it with :func:`from_press`.

    Each row is valued alone and without its padding, so that a press needs to know of neither; heads that hold
    different numbers of entries are valued one by one. A press sees entries in position order, as if no token had been
    evicted between them. Scores are lifted to >= 0 for refiners in heads that have negative ones.

    By default the press' own sinks (``n_sink``) and window (``window_size``) are protected, and nothing else. During
    the call ``compression_ratio`` is the fraction that goes now, whatever the press was made with (StreamingLLM's
    scores depend on it); the press itself is never changed.

    Not in the text form of policies: pass ``Policy(from_press(press))``.

    Args:
        press: has ``score(module, hidden_states, keys, values, attentions, kwargs)``.
        window: how many of the last queries' attention the press reads.
    """

    press: Any
    window: int = 0

    signed: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The last queries if the press reads their attention."""
        return frozenset({"queries"}) if self.window else frozenset()

    @property
    def sinks(self) -> int:  # type: ignore[override]
        """The press' ``n_sink``."""
        return int(getattr(self.press, "n_sink", 0))

    def recent(self, budget: int) -> int:
        """The press' window."""
        return self.window

    @torch.no_grad()
    def score(self, view: CacheView) -> Tensor:
        """The press' scores ``(B, H, N)`` float32; 0 for padding.

        Raises:
            ValueError: the press fails, asks for what the view does not hold, or returns another shape.
        """
        scores = torch.zeros(view.positions.shape, dtype=torch.float32, device=view.keys.device)
        for row, valid in enumerate(view.valid):
            counts = valid.sum(-1).tolist()
            heads = range(len(counts))
            groups = [slice(0, len(counts))] if len(set(counts)) == 1 else [slice(h, h + 1) for h in heads]
            for group in groups:
                if counts[group.start]:
                    real = valid[group].nonzero()[:, 1].unflatten(0, (-1, counts[group.start]))
                    scores[row, group].scatter_(-1, real, self._score(view, row, group, real))
        return scores

    def _score(self, view: CacheView, row: int, heads: slice, real: Tensor) -> Tensor:
        """Scores ``(h, n)`` of a row's entries at ``real (h, n)`` in its heads ``heads``."""

        def entries(tensor: Tensor) -> Tensor:
            return tensor[row, heads].gather(1, real[..., None].expand(-1, -1, tensor.shape[-1]))[None]

        keys, values = entries(view.keys), entries(view.values)
        attention = None
        if self.window:
            queries, known = last_queries(view, type(self.press).__name__, self.window)
            queries = queries[row].unflatten(0, (view.keys.shape[1], -1))[heads][:, :, known[row]]
            logits = dataclasses.replace(view, keys=keys).logits(queries.flatten(0, 1)[None])
            asked = torch.arange(-queries.shape[2], 0, device=real.device) + view.seen[row]
            before = view.positions[row, heads].gather(1, real)[:, None, None] <= asked[:, None]
            attention = attend(logits, before.expand(logits.shape)).flatten(1, 2)
        keep = min((view.budgets or (view.budget,) * len(view.seen))[row], keys.shape[2])
        try:
            scores = _call(self.press, keys, values, attention, view.layer, view.num_layers, keep)
        except _Refusal:
            raise
        except Exception as error:
            raise ValueError(
                f"{type(self.press).__name__} failed on {keys.shape[2]} entries of layer {view.layer}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(scores, Tensor) or scores.shape != keys.shape[:3]:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"{type(self.press).__name__} returned {shape} at layer {view.layer}; expected {tuple(keys.shape[:3])}"
            )
        return scores[0].to(torch.float32)

    def nonnegative(self, scores: Tensor, candidates: Tensor) -> Tensor:
        """As in :class:`~kvretain.Scorer`, for heads that have a negative candidate; other heads stay as they are."""
        return lifted(scores, candidates)


def _call(
    press: Any, keys: Tensor, values: Tensor, attention: Tensor | None, layer: int, layers: int, keep: int
) -> Tensor:
    """``press.score`` on ``keys`` and ``values (1, H, n, D)`` and the ``attention (1, Hq, W, n)`` of the last queries,
    of which ``keep`` entries will stay. The press is copied first: some keep state, and the ratio is set."""
    press = copy.deepcopy(press)
    size = keys.shape[2]
    if hasattr(press, "compression_ratio"):
        # Half an entry more, so that int() of a product with 1 - ratio is `keep` whatever the rounding.
        press.compression_ratio = max(0.0, 1 - (keep + 0.5) / size)
    heads = {} if attention is None else {"num_attention_heads": attention.shape[1]}
    config = _Absent(
        press,
        "module.config",
        num_key_value_heads=keys.shape[1],
        num_hidden_layers=layers,
        head_dim=keys.shape[3],
        **heads,
    )
    module = _Absent(press, "module", layer_idx=layer, head_dim=keys.shape[3], config=config)
    hidden = _Absent(press, "hidden_states", shape=torch.Size((1, size, 0)), device=keys.device, dtype=keys.dtype)
    if attention is None:
        attention = _Absent(press, "attentions")  # type: ignore[assignment]
    return press.score(module, hidden, keys, values, attention, _Absent(press, "kwargs"))


def from_press(press: Any, *, window: int | None = None) -> PressScorer:
    """A scorer that values entries as ``press`` does, for :class:`~kvretain.Policy`.

    Any object with kvpress' ``score(module, hidden_states, keys, values, attentions, kwargs)`` will do. It gets keys
    and values ``(1, H, n, D)`` as cached and, with a window, the attention weights ``(1, Hq, window, n)`` of the last
    queries as ``attentions``; of ``module`` and ``hidden_states`` only the sizes. A press that reads more is refused
    here, by a try on small random tensors: hidden states are larger than the cache, and a layer's weights are no part
    of it. What a press does in ``compress`` (PyramidKV's budgets per layer) is not used: layers, heads and budgets are
    the policy's.

    Of kvpress 0.5.5 that serves ``KnormPress``, ``KeyDiffPress``, ``LagKVPress``, ``CURPress``, ``QFilterPress`` (after
    its ``post_init_from_model``), ``StreamingLLMPress``, ``RandomPress``, ``SnapKVPress``, and ``TOVAPress`` with
    ``window=1``.

    Args:
        press: the press; it is copied for each call and never changed. What it learns from a model
            (``post_init_from_model``) must be there.
        window: last queries whose attention it reads; default: its ``window_size``, else 0.

    Raises:
        ValueError: ``press`` has no such method, reads what a cache does not keep, or reads the attention of more
            queries than ``window``.

    Example:
        >>> policy = Policy(from_press(KeyDiffPress()), refiner=refiners["hub"]())      # doctest: +SKIP
        >>> cache = RetentionCache.for_model(model, policy, budget=256)                # doctest: +SKIP
    """
    name = type(press).__name__
    if not callable(getattr(press, "score", None)):
        own = f"; kvretain's own policy for it is {OWN[name]!r}" if name in OWN else ""
        raise ValueError(f"from_press takes a press that scores entries, and {name} has no score method{own}")
    if window is None:
        window = getattr(press, "window_size", 0)
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ValueError(f"from_press: window is a whole number of at least 0, not {window!r}")
    _try(press, window)
    return PressScorer(press, window)


def _try(press: Any, window: int) -> None:
    """Refuses a press that reads more than it will get; other failures may be due to the sizes of the trial."""
    rng = torch.Generator().manual_seed(0)
    size = window + 40
    keys, values = torch.randn(2, 1, 2, size, 8, generator=rng)
    rows = torch.rand(1, 4, window + 1, size, generator=rng)
    seen = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for attention in (rows[:, :, 1:], rows) if window else (None,):
            try:
                seen.append(_call(press, keys, values, attention, 0, 1, size // 2))
            except _Refusal:
                raise
            except Exception:
                return
    if window and not torch.equal(*seen):
        name = type(press).__name__
        raise ValueError(
            f"{name} reads the attention of more than the last {window} queries, and a cache keeps no more: give a "
            "larger window=" + (f", or use kvretain's own policy {OWN[name]!r}" if name in OWN else "")
        )
