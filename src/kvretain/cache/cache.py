"""RetentionCache: a transformers cache with a budget."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer
from transformers.masking_utils import create_masks_for_generate

from ..gate import LayerGate, gate_for
from ..policy import Policy
from ..select.scope import check_shared
from . import support, tap
from .budget import Budget
from .layer import RetentionLayer
from .quantised import STORAGES, QuantisedLayer
from .ragged import RaggedLayer
from .replay import Replaying, Unscored, replay
from .session import Session
from .trace import Trace

RAGGED = ("sdpa", "eager")
"""Attention implementations under which unequal heads are held against the oracle."""


class RetentionCache(Cache, tap.Follower):
    """A drop-in ``transformers`` cache that keeps a fixed budget of entries per KV head. Make it with
    :meth:`for_model`.

    Lossy: what is evicted is gone. While nothing has been evicted, outputs are bitwise those of ``DynamicCache``.

    When it evicts, always after the attention of the pass, so that a token sees everything cached before it:

    - a pass of several tokens (a prompt, a chunk of it, a new turn) ends with at most the budget;
    - a single-token pass (decoding) compresses when ``budget + every`` entries are stored, down to the budget; or, with
      ``trigger="periodic"``, whenever the columns seen are a multiple of ``every``.

    Two lengths: ``get_seq_length()`` is columns seen, evicted ones included; a layer's ``kept`` is what it stores. Keys
    keep their rotation, entries their order. In left-padded batches padding goes first, a row never attends to it, and
    a row equals its solo run whenever both evict at the same passes.

    Attributes:
        policy: how entries are chosen; ``storage`` what they are stored in, see :meth:`for_model`.
        layers: :class:`RetentionLayer` for full attention (with ``.positions``), transformers' own for sliding windows.
        trace: entries, bytes and evictions at every pass, see :class:`Trace`.
    """

    @classmethod
    def for_model(
        cls,
        model: Any,
        policy: str | Policy,
        *,
        budget: int | None = None,
        ratio: float | None = None,
        every: int = 128,
        sinks: int | None = None,
        recent: int | None = None,
        protect_prompt: bool = False,
        trigger: str = "slack",
        storage: str | None = None,
    ) -> RetentionCache:
        """An empty cache for ``model``.

        Args:
            model: a decoder-only transformers model, e.g. of ``AutoModelForCausalLM``.
            policy: a preset or policy text such as ``"snapkv+hub"`` (see :mod:`kvretain.policy`), or a :class:`Policy`.
            budget: entries kept per KV head, protected ones included.
            ratio: fraction *removed* of the tokens seen, in [0, 1): ``n`` tokens keep ``max(1, n - floor(ratio * n))``,
                counted for each row's real tokens. Give this or ``budget``; ``full`` needs neither and ignores both.
            every: decode cadence in tokens. Smaller follows the budget more closely, larger is faster.
            sinks: first tokens that are always kept; default: the scorer's, at most a quarter of the budget.
            recent: last tokens that are always kept; default: the scorer's, at most half of the budget.
            protect_prompt: always keep everything that came before the first single-token pass. It must be shorter than
                the budget.
            trigger: ``"slack"``: compress when ``budget + every`` entries are stored. ``"periodic"``: when the columns
                seen are a multiple of ``every``. On average a long run then holds ``budget + (every - 1) / 2`` entries
                either way; see :class:`~kvretain.cache.budget.Budget`.
            storage: ``"int8"`` or ``"fp8"`` (e4m3) keeps entries in 8 bits with one scale each, see
                :mod:`kvretain.cache.quantised`; by default they stay as the model computes them.

        Raises:
            ValueError: an unknown policy or argument, a number out of range, both or neither of ``budget`` and
                ``ratio``, more protected tokens than the budget holds, or a model that cannot be served (refused by
                name).
            FileNotFoundError: the policy names a calibration or gate file that is not there.
        """
        policy = Policy.parse(policy) if isinstance(policy, str) or not isinstance(policy, Policy) else policy
        limit = None if policy.scorer is None else Budget(budget, ratio, every, sinks, recent, protect_prompt, trigger)
        cache = cls._build(model, policy, limit, storage)
        if limit is not None:
            support.ensure_verified(model)
        return cache

    @classmethod
    def _build(cls, model: Any, policy: Policy, limit: Budget | None, storage: str | None = None) -> RetentionCache:
        decoder = support.decoder_of(model)
        layers = support.layers_of(decoder)
        support.check_fits(policy, decoder)
        attention = str(decoder.config._attn_implementation).removeprefix(tap.PREFIX)
        if policy.ragged and attention not in RAGGED:
            raise ValueError(
                f"the policy {str(policy)!r} keeps unequal numbers of entries, which is tested with "
                f'{" and ".join(RAGGED)} attention, not {attention}: model.set_attn_implementation("sdpa") first'
            )
        full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
        session = Session(policy, limit, len(layers), len(full))
        if storage is not None and storage not in STORAGES:
            raise ValueError(f"unknown storage {storage!r}; valid: {', '.join(STORAGES)}, or None")
        if storage is not None and policy.ragged:
            raise ValueError(
                f"the policy {str(policy)!r} keeps unequal numbers of entries, which storage={storage!r} cannot hold: "
                "choose the scope head, layer, model or aligned, with equal budgets for all layers"
            )
        kind: Any = RaggedLayer if policy.ragged else RetentionLayer
        if storage is not None:
            kind = functools.partial(QuantisedLayer, storage=storage)
        gates: Sequence[LayerGate] = ()
        if "hidden" in policy.needs:
            support.attentions_of(decoder)
            gates = gate_for(model, cls._gate_path(policy), len(full)).layers
        if "norms" in policy.needs:
            support.output_projections(decoder)  # refuses a model without them
        for rank, index in enumerate(full):
            layers[index] = kind(session, index, rank)
            layers[index].gate = gates[rank] if gates else None
        cache = cls(layers=layers)
        cache._equip(policy, decoder)
        cache.policy, cache.storage, cache._session = policy, storage, session
        cache._unscored, cache._replaying = Unscored(), None
        cache._argument = support.cache_argument(decoder)
        cache._new_trace()
        cache._attach(decoder)
        return cache

    # The public attributes, for type checkers
    policy: Policy
    storage: str | None
    trace: Trace
    _session: Session
    _attachment: tap.Attachment
    _unscored: Unscored
    _replaying: Replaying | None
    _argument: str

    def _equip(self, policy: Policy, decoder: Any) -> None:
        """Gives the layers what ``policy`` needs and no pass brings: their rotation, and their part of a calibration.

        Raises:
            ValueError: a rotation that is not tested, or a calibration that cannot be read or made or does not fit.
        """
        layers, scorer = self._retained, policy.scorer
        if policy.needs & {"moments", "pairs", "calibration"}:
            for layer in layers:
                layer.rope = layer.rope or support.rope_of(decoder, layer.index)
        if "calibration" in policy.needs:
            from ..calibrate import calibration_for  # it makes caches itself

            ropes = {layer.index: layer.rope for layer in layers if layer.rope is not None}
            calibration = calibration_for(decoder, scorer.calibration, ropes)  # type: ignore[union-attr]
            for layer in layers:
                layer.calibration = calibration.of(layer.index)

    def _new_trace(self) -> None:
        self.trace = Trace(tuple(layer.index for layer in self._retained))

    def _attach(self, decoder: nn.Module) -> None:
        self._attachment = tap.attach(decoder, self.policy)
        # The hooks find the cache in the call's arguments and hold no reference to it, so it can die.
        weakref.finalize(self, self._attachment.release, self.policy).atexit = False

    @staticmethod
    def _gate_path(policy: Policy) -> str:
        scorer: Any = policy.scorer
        return scorer.gate

    @property
    def _retained(self) -> list[RetentionLayer]:
        return [layer for layer in self.layers if isinstance(layer, RetentionLayer)]

    def __deepcopy__(self, memo: dict[int, Any]) -> RetentionCache:
        """An independent cache of the same model with the same content, e.g. to ask several questions of one
        context."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        memo[id(self._attachment)] = self._attachment
        for layer in self._retained:
            memo[id(layer.rope)] = layer.rope  # it reads the model's module, which is not copied
            memo[id(layer.calibration)] = layer.calibration
            memo[id(layer.gate)] = layer.gate  # weights that nothing changes
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        other._attach(self._attachment.decoder)
        return other

    # A forward pass: called by the decoder's hooks

    def begin_pass(self, decoder: Any, inputs: Tensor, mask: Any, position_ids: Tensor | None) -> Any:
        """Called before the decoder runs on ``inputs (B, n, ...)``; returns the attention mask it must use.

        Raises:
            ValueError: another model than the cache was made for, or what :meth:`Session.begin` refuses.
        """
        if tap.attachment_of(decoder) is not self._attachment:
            raise ValueError(
                f"this RetentionCache was made for another model than this {type(decoder).__name__}: "
                "call RetentionCache.for_model with the model that you run"
            )
        batch, columns = inputs.shape[:2]
        if self._replaying is not None:
            tap.observe_by(self._replaying)
            slots = mask if mask is None else self._session._slots(mask)
        else:
            replays = "replay" in self.policy.needs
            if replays:
                self._unscored.check(inputs)
                self._check_states(mask)
            slots = self._session.begin(columns, batch, mask)
            if replays:
                self._unscored.add(inputs)
        if slots is mask or len(self._retained) == len(self.layers):
            return slots
        # Sliding layers read the mask by columns and full layers by stored entries: each kind gets its own.
        config, embeds = decoder.config, torch.empty(batch, columns, 0, dtype=decoder.dtype, device=inputs.device)
        masks = create_masks_for_generate(config, embeds, mask, self, position_ids)
        masks["full_attention"] = create_masks_for_generate(config, embeds, slots, self, position_ids)["full_attention"]
        return masks

    def _check_states(self, mask: Any) -> None:
        """Refuses a replay where padding would stand amid the tokens that a layer's state reads."""
        states = [type(layer).__name__ for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        if states and isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
            raise ValueError(
                f"the policy {str(self.policy)!r} reads the text a second time, and with it the padding of this batch, "
                f"which would run through the state of each {states[0]}: give rows of one length, or one row"
            )

    def enter_attention(self, index: int, hidden: Tensor) -> None:
        """Called before the attention of layer ``index`` with its input ``(B, n, E)``, if hooks are there for that."""
        layer = self.layers[index]
        if not isinstance(layer, RetentionLayer):
            return
        if self._replaying is not None:
            self._replaying.enter(index, hidden)
        elif layer.gate is not None:
            layer.look(hidden)

    def end_pass(self) -> None:
        """Called after the decoder has run: evicts what is still due and records the pass."""
        session, layers = self._session, self._retained
        plan = session.plan
        if self._replaying is not None:
            tap.observe_by(None)
            return
        if plan is None:
            return
        missed = tap.forget() or (self.policy.tapped and any(layer._observed != layer.seen for layer in layers))
        if missed or any(layer.seen != session.columns.seen for layer in layers):
            if not missed:
                raise ValueError("not every layer of the model has updated the cache in this pass; call reset()")
            attention = str(self._attachment.decoder.config._attn_implementation)
            if not attention.startswith(tap.PREFIX):
                raise ValueError(
                    f"the attention implementation was changed to {attention} after this cache was made, and its "
                    f"policy {str(self.policy)!r} observes nothing now: make the cache after set_attn_implementation"
                )
            raise ValueError(
                f"{type(self._attachment.decoder).__name__} did not pass the cached keys of every layer to its "
                f"attention function, so the policy {str(self.policy)!r} cannot serve it; choose one without needs "
                "(`kvretain policies` lists them)"
            )
        if plan.evict:
            self._replay(self.policy)
            if self.policy.whole_model:
                session.evict(layers)
            else:
                for layer in layers:
                    if not layer.settled:
                        session.evict([layer])
        evicted = tuple(layer.evicted if plan.evict else 0 for layer in layers)
        kept, nbytes = tuple(layer.kept for layer in layers), tuple(layer.nbytes for layer in layers)
        self.trace.record(plan.columns, session.columns.seen, kept, evicted, nbytes)
        session.end()

    def _replay(self, policy: Policy) -> None:
        scorer: Any = policy.scorer
        if "replay" in policy.needs and self._unscored.ids:
            with torch.no_grad():
                replay(self, scorer)

    def compress(
        self,
        policy: str | Policy,
        *,
        budget: int | None = None,
        ratio: float | None = None,
        sinks: int | None = None,
        recent: int | None = None,
    ) -> None:
        """Evicts now, between two passes, by ``policy``; the cache's own policy and budget rule again afterwards.

        On a cache that has evicted nothing yet, the entries that stay are bitwise those that a cache of ``policy``
        keeps after the same pass. So one prefill serves many policies: record it in a cache that evicts nothing
        (``"full"``, or ``ratio=0`` of a policy that collects what the others need), ``copy.deepcopy`` it, compress the
        copy.

        In the trace an eviction is a step of its own, with 0 tokens.

        Args:
            policy: a policy text or :class:`Policy`; ``full`` evicts nothing.
            budget, ratio, sinks, recent: as in :meth:`for_model`. ``ratio`` counts all tokens seen, evicted ones
                included.

        Raises:
            ValueError: what :meth:`for_model` refuses; heads or layers that would keep different entries where the
                cache's own policy chooses one set for them later, or that hold different ones where ``policy`` chooses
                one set; queries or attention that ``policy`` needs and this
                cache's own policy does not collect; an unfinished pass. Nothing has changed then.

        Example:
            >>> cache = RetentionCache.for_model(model, "snapkv", ratio=0)      # doctest: +SKIP
            >>> model(prompt, past_key_values=cache)                            # doctest: +SKIP
            >>> short = copy.deepcopy(cache)                                    # doctest: +SKIP
            >>> short.compress("snapkv+hub@layer", ratio=0.9)                   # doctest: +SKIP
        """
        policy = Policy.parse(policy) if not isinstance(policy, Policy) else policy
        scorer, own = policy.scorer, self.policy.scorer
        if scorer is None:
            return
        if policy.ragged and not self.policy.ragged:
            raise ValueError(
                f"the policy {str(policy)!r} keeps unequal numbers of entries, for which a cache of the policy "
                f"{str(self.policy)!r} has no storage: make the cache with {str(policy)!r} and ratio=0"
            )
        evicts = self._session.budget is not None and self._session.budget.ratio != 0
        if evicts and not policy.shares_as_widely_as(self.policy):
            raise ValueError(
                f"the policy {str(policy)!r} lets heads or layers keep different entries, but later evictions of this "
                f"cache, by {str(self.policy)!r}, choose one set for all of them: compress with the scope "
                f"@{self.policy.scope}, or make the cache with ratio=0"
            )
        limit = Budget(budget, ratio, sinks=sinks, recent=recent)
        collected, window = self.policy.needs, own.window if own else 0
        if missing := sorted(policy.collects - collected):
            words = " and ".join("hidden states" if need == "hidden" else need for need in missing)
            raise ValueError(
                f"the policy {str(policy)!r} needs the {words} of earlier passes, which a cache of the "
                f"policy {str(self.policy)!r} does not collect: make the cache with {str(policy)!r} and ratio=0"
            )
        if "hidden" in policy.needs and self._gate_path(policy) != self._gate_path(self.policy):
            raise ValueError(
                f"the policy {str(policy)!r} needs another gate than that of the policy {str(self.policy)!r}, which "
                f"has scored the entries: make the cache with {str(policy)!r} and ratio=0"
            )
        if "replay" in policy.needs and scorer != own:
            raise ValueError(
                f"the entries of this cache are valued by the replay of its own policy {str(self.policy)!r}, and "
                f"{str(policy)!r} replays otherwise: make the cache with {str(policy)!r} and ratio=0"
            )
        if "queries" in policy.needs and scorer.window > window:
            raise ValueError(
                f"the policy {str(policy)!r} needs the last {scorer.window} queries; a cache of the policy "
                f"{str(self.policy)!r} collects {window}"
            )
        support.check_verified(self._attachment.decoder)
        support.check_fits(policy, self._attachment.decoder)
        layers = self._retained
        held = [layer.positions for layer in layers if layer.keys is not None]
        check_shared(f"the policy {str(policy)!r}", policy.scope, held)
        calibrations = [layer.calibration for layer in layers]
        self._equip(policy, self._attachment.decoder)
        try:
            self._replay(self.policy)
            if self._session.columns.seen and self._session.compress(layers, policy, limit):
                evicted, kept = tuple(layer.evicted for layer in layers), tuple(layer.kept for layer in layers)
                self.trace.record(0, self._session.columns.seen, kept, evicted, tuple(layer.nbytes for layer in layers))
        finally:
            for layer, calibration in zip(layers, calibrations, strict=True):
                layer.calibration = calibration

    # Size

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated key and value storage, measured from the tensors, sliding layers included.

        After a multi-token pass that is exactly what is kept; while decoding it is ``budget + every`` entries.
        Bookkeeping (positions, and for some policies a few queries or one number per entry) is not counted.
        """
        total, storages = 0, {}
        for layer in self.layers:
            if isinstance(layer, RetentionLayer):
                total += layer.nbytes
                continue
            for name in ("keys", "values"):
                tensor = getattr(layer, name, None)
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr(), tensor.device] = storage.nbytes()
        return total + sum(storages.values())

    def check_integrity(self) -> None:
        """Checks the invariants that tests and bug reports rely on; costs a look at every entry's position.

        Raises:
            AssertionError: names the layer and what is wrong.
        """
        session = self._session
        for layer in self._retained:
            where = f"layer {layer.index}"
            assert layer.seen == session.columns.seen, f"{where}: seen {layer.seen}, session {session.columns.seen}"
            if layer.keys is None:
                assert layer.kept == 0, f"{where}: nothing stored, kept {layer.kept}"
                continue
            keys, values = layer._all()
            positions = layer.positions
            assert keys.shape[:3] == values.shape[:3] == positions.shape, f"{where}: shapes differ"
            if not isinstance(layer, RaggedLayer):
                assert layer.kept == session.kept, f"{where}: kept {layer.kept}, session {session.kept}"
                assert keys.shape[2] == layer.kept, f"{where}: storage shorter than kept"
            real = session.columns.counts(positions.shape[0], positions.device)[:, None, None]
            assert bool(((positions >= -1) & (positions < real)).all()), f"{where}: position out of range"
            running = torch.where(positions < 0, -1, positions).cummax(-1).values
            later = (positions[..., 1:] > running[..., :-1]) | (positions[..., 1:] < 0)
            assert bool(later.all()), f"{where}: positions are not strictly ascending"
            counts = (positions >= 0).sum(-1)
            if isinstance(layer, RaggedLayer):
                continue
            stored = torch.tensor(session.stored or (layer.kept,) * positions.shape[0], device=positions.device)
            assert bool((counts == stored[:, None]).all()), f"{where}: real entries differ from the session's count"
            limit = session.budget.tokens if session.budget else None
            if limit is not None and session.evicted_at == layer.seen:
                assert layer.kept <= limit, f"{where}: kept {layer.kept} above the budget {limit}"

    # In a file

    def save(self, path: str | Path) -> Path:
        """Writes all that the cache holds and knows to a safetensors file, which appears complete or not at all.

        :meth:`load` gives a cache that continues exactly as this one would. The file holds the policy, the budget and
        the fingerprint of the weights, but neither weights nor calibrations and gates. Reading it runs no code.

        Raises:
            ValueError: a pass is unfinished, a layer's state cannot be saved (recurrent layers), or a policy that would
                not be read back, as one with an unregistered part.
            ImportError: safetensors is not installed.
        """
        from .saving import save

        return save(self, path)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> RetentionCache:
        """The cache that :meth:`save` wrote, for ``model`` with the same weights, on its device.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no saved cache, is damaged, or was saved with other weights or in another dtype; or what
                :meth:`for_model` refuses.
            ImportError: safetensors is not installed.
        """
        from .saving import load

        return load(cls, path, model)

    # What transformers calls

    def reset(self) -> None:
        """Empties the cache and its trace; any batch size may follow."""
        # Other layers are made anew: some releases of transformers keep a sliding window's tensors in `reset`.
        fresh = support.layers_of(self._attachment.decoder)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RetentionLayer):
                layer.reset()
            else:
                self.layers[index] = fresh[index]
        self._session.reset()
        self._unscored = Unscored()
        self._new_trace()

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` columns (a negative number, as in transformers; 0 does nothing).

        Raises:
            ValueError: a positive number; more than was seen since the last eviction (evicted entries cannot come
                back); or a policy that has observed the cropped tokens' queries.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to take back, not {tokens_to_remove}")
        if tokens_to_remove == 0:
            return
        for index, layer in enumerate(self.layers):
            window = getattr(layer, "sliding_window", None)
            # A layer without a window (linear attention) has no way back at all.
            if not isinstance(layer, RetentionLayer) and (
                window is None or layer.get_seq_length() >= window  # type: ignore[union-attr]
            ):
                raise ValueError(
                    f"cannot crop: layer {index}, a {type(layer).__name__}, has dropped what it would need; "
                    "copy.deepcopy the cache before the tokens that you want to take back"
                )
        self._session.crop(-tokens_to_remove)
        self._unscored.crop(-tokens_to_remove)
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorders the rows for beam search."""
        super().reorder_cache(beam_idx)
        self._session.select(beam_idx)
        self._unscored.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows at ``indices`` (int64, or a bool mask)."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().squeeze(-1)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row ``repeats`` times."""
        self._select(torch.arange(self._session.batch or 0).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        layer: Any
        for layer in self.layers:
            if isinstance(layer, RetentionLayer):
                layer.select(rows)
            elif hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(rows)
            else:  # a state, which is indexed with as many rows as it is given
                layer.reorder_cache(rows)
        self._session.select(rows)
        self._unscored.select(rows)

    def activate_past_recording(self) -> None:
        """Refused: called by assisted decoding, which rolls back rejected tokens after an eviction may have come.

        Raises:
            ValueError: always, unless the policy is ``full``.
        """
        if self.policy.scorer is None:
            super().activate_past_recording()
            return
        raise ValueError(
            "assisted decoding (assistant_model=, prompt_lookup_num_tokens=) needs to take rejected tokens back, but "
            "entries that they pushed out of a RetentionCache are gone: generate without an assistant, or use the "
            "policy 'full'"
        )

    def __repr__(self) -> str:
        return (
            f"RetentionCache({str(self.policy)!r}, kept {self._session.kept} of {self._session.columns.seen} seen, "
            f"{self.nbytes / 2**20:.1f} MiB)"
        )
