"""The one door through which a model's attention reaches a cache.

Public hooks of transformers and torch, each taken away when the last cache of a model that needs it is gone:

- forward hooks on the decoder tell a cache when one of its passes begins (with the attention mask) and ends;
- policies that need hidden states put one forward pre-hook on the attention modules; the cache is among the call's
  arguments there;
- policies that need queries switch the decoder to an attention function registered with ``AttentionInterface`` (and its
  mask twin), which calls the one that was set before and then hands the queries to the layer.

Within a thread the layer updated last is the one whose attention runs next; that ties queries to a cache, for any
number of caches on a model.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..policy import Policy
from . import support

if TYPE_CHECKING:
    from .layer import RetentionLayer
    from .replay import Replaying

PREFIX = "kvretain_"

HIDDEN = frozenset({"hidden", "norms"})
"""Needs that the hidden states which enter attention serve."""

_lock = threading.RLock()
_attached: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()


class _Next(threading.local):
    """What the next attention of a thread is for."""

    layer: Any = None  # a RetentionLayer
    keys: Tensor | None = None
    observer: Replaying | None = None


_next = _Next()


def expect(layer: RetentionLayer, keys: Tensor) -> None:
    """The next attention in this thread belongs to ``layer`` if it is given exactly ``keys``."""
    _next.layer, _next.keys = layer, keys


def observe_by(observer: Replaying | None) -> None:
    """Attention in this thread is observed by ``observer`` until further notice; None: by its own layer."""
    _next.observer = observer


def forget() -> bool:
    """Drops an expectation that no attention met; tells whether there was one."""
    missed = _next.layer is not None
    _next.layer = _next.keys = None
    return missed


def _registered(base: str) -> str:
    """Registers the tapped twin of the attention implementation ``base`` and returns its name."""
    name = PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, _tapped(base))
        if base in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _tapped(base: str) -> Callable[..., Any]:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        layer = _next.layer if _next.keys is key else None
        scaling, softcap, sinks = (kwargs.get(name) for name in ("scaling", "softcap", "s_aux"))
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if layer is not None and layer.frozen:
            output = layer.attend(query, mask, scaling, softcap, sinks), None
        else:
            # Eager attention is not registered: each modelling file has its own, under this name.
            default: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
            output = ALL_ATTENTION_FUNCTIONS.get_interface(base, default)(module, query, key, value, mask, **kwargs)
        if layer is not None:
            observer = _next.observer
            forget()
            if observer is None:
                layer.observe(query, scaling, softcap, sinks)
            else:
                with torch.autocast(query.device.type, enabled=False):
                    observer.score(layer, query.detach())
        return output

    return attention


class Follower(ABC):
    """A cache that is told when a pass of its model's decoder begins and ends."""

    @abstractmethod
    def begin_pass(self, decoder: Any, inputs: Tensor, mask: Any, position_ids: Tensor | None) -> Any:
        """The decoder is about to run on ``inputs (B, n, ...)``; returns the attention mask it must use."""

    @abstractmethod
    def enter_attention(self, index: int, hidden: Tensor) -> None:
        """Layer ``index`` is about to attend, with its input ``hidden (B, n, E)``, i.e. after its input norm."""

    @abstractmethod
    def end_pass(self) -> None:
        """The decoder has run."""


def _find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Follower | None:
    """The follower among a forward call's arguments (its name differs between transformers releases), or None."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, Follower)), None)


class _Hooks:
    """What is called around the passes of one decoder.

    A model that is copied or pickled takes its hooks along. The copy is another model, which no cache was made for: its
    hooks are idle, and a cache made for it puts its own beside them.
    """

    def __init__(self) -> None:
        self.idle = False
        self.warned = False
        self.base = ""  # the attention implementation that is tapped

    def __reduce__(self) -> tuple[Callable[[str], _Hooks], tuple[str]]:
        return _copied, (self.base,)

    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.idle:
            return None
        inputs = next(
            (kwargs[k] for k in ("input_ids", "inputs_embeds") if kwargs.get(k) is not None), args[0] if args else None
        )
        if inputs is None:
            return None  # the model's own error is the clear one
        cache = _find(args, kwargs)
        if cache is None:
            if not self.warned and kwargs.get("use_cache") is not False and inputs.ndim > 1:
                words = support.dropping(decoder, inputs.shape[1])
                if words is not None:
                    self.warned = True
                    warnings.warn(words, stacklevel=2)
            return None
        positional = "attention_mask" not in kwargs and len(args) > 1
        given = args[1] if positional else kwargs.get("attention_mask")
        mask = cache.begin_pass(decoder, inputs, given, kwargs.get("position_ids"))
        if mask is given:
            return None
        if positional:
            return (args[0], mask, *args[2:]), kwargs
        return args, {**kwargs, "attention_mask": mask}

    def after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = None if self.idle else _find(args, kwargs)
        if cache is not None:
            cache.end_pass()

    def entering(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = None if self.idle else _find(args, kwargs)
        if cache is not None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            cache.enter_attention(module.layer_idx, hidden.detach())  # type: ignore[arg-type]


def _copied(base: str) -> _Hooks:
    """The hooks of a copy, in this process or in another one, where the tapped attention must be made known."""
    if base:
        _registered(base)
    hooks = _Hooks()
    hooks.idle = True
    return hooks


class Attachment:
    """The hooks on one decoder, shared by its caches."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.caches = 0
        self.tapped = 0
        self.hidden = 0
        self._entering: list[Any] = []
        self._hooks = _Hooks()
        self._handles = (
            decoder.register_forward_pre_hook(self._hooks.before, with_kwargs=True),
            decoder.register_forward_hook(self._hooks.after, with_kwargs=True),
        )

    def acquire(self, policy: Policy) -> None:
        """Counts one more cache, of ``policy``."""
        tapped, hidden = policy.tapped, bool(policy.needs & HIDDEN)
        with _lock:
            if hidden and not self.hidden:
                modules = support.attentions_of(self.decoder).values()
                entering = self._hooks.entering
                self._entering = [m.register_forward_pre_hook(entering, with_kwargs=True) for m in modules]
            self.hidden += hidden
            self.caches += 1
            current = str(self.decoder.config._attn_implementation)
            # Tapped already: a copy, or one of several models of one configuration object.
            if tapped and not self.tapped and current.startswith(PREFIX):
                self._hooks.base = current.removeprefix(PREFIX)
                _registered(self._hooks.base)
            # Not tapped yet, or changed by the user since.
            elif tapped and not current.startswith(PREFIX):
                self._hooks.base = current
                self.decoder.set_attn_implementation(_registered(current))
            self.tapped += tapped

    def release(self, policy: Policy) -> None:
        """Counts one cache less, of ``policy``; the last one takes the hooks away."""
        tapped, hidden = policy.tapped, bool(policy.needs & HIDDEN)
        with _lock:
            self.caches -= 1
            self.tapped -= tapped
            self.hidden -= hidden
            if hidden and not self.hidden:
                for handle in self._entering:
                    handle.remove()
            config, base = self.decoder.config, self._hooks.base
            # Models made from one configuration object share its setting.
            shared = any(other.tapped and other.decoder.config is config for other in _attached.values())
            if tapped and self.tapped == 0 and not shared and config._attn_implementation == PREFIX + base:
                self.decoder.set_attn_implementation(base)
            if self.caches == 0:
                for handle in self._handles:
                    handle.remove()
                _attached.pop(self.decoder, None)


def attach(decoder: nn.Module, policy: Policy) -> Attachment:
    """Counts one more cache of ``decoder``, of ``policy``."""
    with _lock:
        if decoder not in _attached:
            _attached[decoder] = Attachment(decoder)
        _attached[decoder].acquire(policy)
        return _attached[decoder]


def attachment_of(decoder: nn.Module) -> Attachment | None:
    """The attachment of ``decoder``, or None if no cache was made for it."""
    return _attached.get(decoder)
