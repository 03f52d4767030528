"""HubKV's correction and α's selection as presses of kvpress. Imports kvpress."""

from __future__ import annotations

from typing import Any

import torch
from kvpress import BasePress, ScorerPress
from torch import Tensor, nn

from ...refine import Hub, Refiner
from ...select import Diverse, Selector
from ._marks import lifted, marked


class _Around:
    """A press around another that scores: the ratio is the inner one's."""

    press: Any

    def _hold(self, press: Any) -> None:
        name = type(self).__name__
        if not isinstance(press, ScorerPress):
            raise ValueError(
                f"{name} needs a press that scores (a ScorerPress such as SnapKVPress), not {type(press).__name__}"
                + (f"; put {name} inside it" if isinstance(press, BasePress) else "")
            )
        self.press = press

    @property
    def compression_ratio(self) -> float:
        """Fraction removed, in [0, 1)."""
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        self.press.compression_ratio = value

    def post_init_from_model(self, model: Any) -> None:
        """Lets the inner press prepare itself for ``model``."""
        self.press.post_init_from_model(model)

    def _scores(self, *call: Any) -> Tensor:
        """The inner press' scores ``(B, H, N)`` in float32.

        Raises:
            ValueError: they are not finite, or mark choices with their dtype's largest number.
        """
        scores = self.press.score(*call)
        inner, name = type(self.press).__name__, type(self).__name__
        if not scores.isfinite().all():
            raise ValueError(f"{inner} gave NaN or infinite scores to {name}; check the model's keys for NaN")
        if (scores.abs() >= torch.finfo(scores.dtype).max).any():
            raise ValueError(
                f"{inner} has chosen already (it marks its choices with the largest number of {scores.dtype}), so that "
                f"{name} finds no scores: put {name} inside it"
            )
        return scores.to(torch.float32)


class HubKVPress(_Around, ScorerPress):
    """A press whose scores are corrected by HubKV before kvpress takes the top-k of each head.

    A :class:`kvpress.ScorerPress`, so it goes wherever one goes: ``AdaKVPress(HubKVPress(SnapKVPress(0.5)))`` lets the
    corrected scores compete across heads, the setting in which head weights count.

    The gate is the press' ``compression_ratio``. Entries that the inner press protects (see
    :func:`~kvretain.integrations.kvpress._marks.marked`) are neither corrected nor counted; heads with negative scores
    are lifted to >= 0 by their minimum. Neighbours are neighbours in position, so the press must see tokens one after
    the other: prefill, also in the chunks of ``ChunkPress``. ``DecodingPress``, ``BlockPress`` and a second press of
    ``ComposedPress`` reorder or thin out the entries before they ask for scores and are refused.

    Args:
        press: the press whose scores are corrected.
        refiner: which correction; default :class:`kvretain.refine.Hub` as in :func:`kvretain.hub_refine`. Any other
            refiner of kvretain fits.

    Raises:
        ValueError: ``press`` does not score.

    Example:
        >>> press = HubKVPress(SnapKVPress(compression_ratio=0.75))         # doctest: +SKIP
        >>> with press(model):                                              # doctest: +SKIP
        ...     model.model(input_ids, past_key_values=cache)
    """

    def __init__(self, press: Any, refiner: Refiner | None = None) -> None:
        self._hold(press)
        self.refiner = Hub() if refiner is None else refiner

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Corrected scores ``(B, H, N)`` float32.

        Raises:
            ValueError: the entries are not consecutive tokens, or the inner press' scores do not serve.
        """
        self._check_order(hidden_states, keys, kwargs)
        scores = self._scores(module, hidden_states, keys, values, attentions, kwargs)
        protected = marked(scores)
        positions = torch.arange(scores.shape[-1], device=scores.device).expand(scores.shape)
        return self.refiner.refine(
            lifted(scores, ~protected), self.compression_ratio, positions=positions, protected=protected
        )

    @staticmethod
    def _check_order(hidden_states: Tensor, keys: Tensor, kwargs: dict[str, Any]) -> None:
        """A slice of the hidden states that entered attention stands for consecutive tokens; gathered ones do not."""
        entered = kwargs.get("hidden_states")
        sliced = entered is None or (
            hidden_states.untyped_storage().data_ptr() == entered.untyped_storage().data_ptr()
            and hidden_states.stride() == entered.stride()
        )
        if not sliced or hidden_states.shape[1] != keys.shape[2]:
            raise ValueError(
                "HubKVPress compares neighbours in position, but is asked about entries that are not consecutive "
                "tokens (DecodingPress, BlockPress and later presses of ComposedPress do so): use it during prefill, "
                "first in a chain; kvretain.RetentionCache knows positions while decoding"
            )

    def __repr__(self) -> str:
        return f"HubKVPress(press={self.press!r}, refiner={self.refiner!r})"


class DiversePress(_Around, BasePress):
    """A press that keeps, per head, large scores that do not repeat what is kept: α's selection for kvpress.

    Each pick loses ``weight`` times its largest cosine, in values, to the entries chosen before
    (:func:`kvretain.select_diverse`); as many entries stay per head as kvpress' top-k would keep. Entries that the
    inner press protects (see :func:`~kvretain.integrations.kvpress._marks.marked`) are chosen first.

    Deviations from α (arXiv 2605.14292), which keeps one set for the whole model on TriAttention's scores: a press sees
    one layer at a time, so each head keeps its own set by its own values; scores are standardised per head, since those
    of presses have no common scale.

    Args:
        press: the press whose scores are used; ``HubKVPress(...)`` is one.
        selector: which selection; default :class:`kvretain.select.Diverse` with ``standardise=True``. Any other
            selector of kvretain fits.

    Raises:
        ValueError: ``press`` does not score.
    """

    def __init__(self, press: Any, selector: Selector | None = None) -> None:
        self._hold(press)
        self.selector = Diverse(standardise=True) if selector is None else selector

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The keys and values ``(B, H, kept, D)`` that stay, in their order.

        Raises:
            ValueError: the inner press' scores do not serve, or it protects more entries than stay.
        """
        if self.compression_ratio == 0:
            return keys, values
        scores = self._scores(module, hidden_states, keys, values, attentions, kwargs)
        keep = max(1, int(keys.shape[2] * (1 - self.compression_ratio)))
        with torch.no_grad():  # a choice of entries has no gradient
            # Each head is a row of its own, with one head: its values are its own, whatever its neighbours hold.
            means = self.selector.mean_values([values.flatten(0, 1)[:, None]]).unflatten(0, values.shape[:2])
            index = self.selector.select(scores, keep, protected=marked(scores), values=means)[..., None]
        return (
            keys.gather(2, index.expand(-1, -1, -1, keys.shape[-1])),
            values.gather(2, index.expand(-1, -1, -1, values.shape[-1])),
        )

    def __repr__(self) -> str:
        return f"DiversePress(press={self.press!r}, selector={self.selector!r})"
