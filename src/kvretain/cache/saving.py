"""A cache in a file: what it holds and what it knows, as tensors and plain JSON; reading it runs no code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from .. import artefacts
from ..policy import Policy
from .columns import _Run
from .layer import RetentionLayer
from .replay import Unscored
from .trace import Step, _Span

if TYPE_CHECKING:
    from .cache import RetentionCache

FORMAT = "kvretain cache 1"

_SHARED = ("policy", "budget", "num_layers", "retained", "columns", "values", "plan")
"""Of a session: what is written apart, and the plan, which there is only within a pass."""

_GIVEN = ("session", "index", "rank", "rope", "calibration", "gate", "device", "dtype", "storage_type")
_STORED = ("_keys", "_values", "_scales", "_types", "nbytes")
_OWN = (*_GIVEN, *_STORED)
"""Of a layer: what the model or the policy says, and the storage, which is written as long as it is filled."""

_TYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def save(cache: RetentionCache, path: str | Path) -> Path:
    """See :meth:`RetentionCache.save <kvretain.cache.cache.RetentionCache.save>`."""
    session = cache._session
    policy = _written(cache.policy)
    if session.plan is not None:
        raise ValueError("the last forward pass with this cache did not finish; call reset() before saving it")
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {"session": {}, "layers": []}
    for name, value in vars(session).items():
        if name not in _SHARED:
            state["session"][name] = _pack(value, f"session.{name}", tensors)
    state["values"] = None if session.values is None else _pack(session.values[1], "values", tensors)
    state["columns"] = {name: _pack(value, f"columns.{name}", tensors) for name, value in vars(session.columns).items()}
    state["unscored"] = _pack(cache._unscored.ids, "unscored", tensors)
    state["trace"] = [[span.steps, *dataclasses.astuple(span.first)] for span in cache.trace._spans]
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, RetentionLayer):
            own = {name: value for name, value in vars(layer).items() if name not in _OWN}
            parts = [part[:, :, : layer._filled] for part in layer._parts()] if layer.is_initialized else None
            own |= {"types": [str(dtype).removeprefix("torch.") for dtype in layer._types], "parts": parts}
        elif isinstance(layer, DynamicSlidingWindowLayer):
            own = {"cumulative_length": layer.cumulative_length, "is_initialized": layer.is_initialized}
            own["parts"] = [layer.keys, layer.values] if layer.is_initialized else None
        else:
            raise ValueError(f"layer {index} is a {type(layer).__name__}, whose state cannot be saved")
        state["layers"].append({name: _pack(value, f"layers.{index}.{name}", tensors) for name, value in own.items()})
    about = {
        "format": FORMAT,
        "weights": artefacts.fingerprint(cache._attachment.decoder),
        "dtype": _dtype(cache._attachment.decoder),
        "policy": policy,
        "storage": json.dumps(cache.storage),
        "budget": json.dumps(None if session.budget is None else dataclasses.asdict(session.budget)),
        "state": json.dumps(state),
    }
    return artefacts.write(path, tensors, about)


def load(cls: type[RetentionCache], path: str | Path, model: Any) -> RetentionCache:
    """See :meth:`RetentionCache.load <kvretain.cache.cache.RetentionCache.load>`."""
    tensors, about = artefacts.read(path)
    if about.get("format") != FORMAT:
        raise ValueError(f"{str(path)!r} is not a saved cache of this version of kvretain ({FORMAT!r})")
    found = artefacts.fingerprint(model)
    if about.get("weights") != found:
        raise ValueError(
            f"{str(path)!r} was saved with a model of other weights ({about['weights']}, this one's are {found}): "
            "keys and values of one model mean nothing to another"
        )
    budget = json.loads(about["budget"])
    limit = {} if budget is None else {"budget": budget.pop("tokens"), **budget}
    cache = cls.for_model(
        model, Policy.from_dict(json.loads(about["policy"])), storage=json.loads(about["storage"]), **limit
    )
    own = _dtype(cache._attachment.decoder)
    if (saved := about.get("dtype", own)) != own:
        raise ValueError(
            f"{str(path)!r} was saved with a model in {saved}, and this one is in {own}, so that it cannot go on from "
            f"those entries: load the model with dtype={saved!r}"
        )
    state, session = json.loads(about["state"]), cache._session
    where = model.device
    try:
        _fill(session, state["session"], tensors, where, _SHARED)
        _fill(session.columns, state["columns"], tensors, where)
        if state["values"] is not None:
            session.values = cache.policy.selector, _unpack(state["values"], tensors, where)
        cache._unscored = Unscored(_unpack(state["unscored"], tensors, where))
        for steps, step, tokens, seen, kept, evicted, nbytes in state["trace"]:
            first = Step(step, tokens, seen, tuple(kept), tuple(evicted), tuple(nbytes))
            cache.trace._spans.append(_Span(first, steps))
        layers: list[Any] = cache.layers
        for layer, own in zip(layers, state["layers"], strict=True):
            parts = _unpack(own.pop("parts"), tensors, where)
            if isinstance(layer, RetentionLayer):
                types = [_TYPES[name] for name in _unpack(own.pop("types"), tensors, where)]
                if parts is not None:
                    empty = (part[:, :, :0].to(dtype) for part, dtype in zip(parts, types, strict=False))
                    layer.lazy_initialization(*empty)
                _fill(layer, own, tensors, where, _OWN)
                if parts is not None:
                    layer._store(*parts)
            else:
                assert isinstance(layer, DynamicSlidingWindowLayer)
                if parts is not None:
                    layer.lazy_initialization(*parts)
                    layer.keys, layer.values = parts
                _fill(layer, own, tensors, where)
        cache.check_integrity()
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError, IndexError) as error:
        raise ValueError(f"the saved cache {str(path)!r} is damaged: {type(error).__name__} {error}") from error
    return cache


def _written(policy: Policy) -> str:
    """``policy`` as JSON, from which the same one can be read."""
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(policy.to_dict())
        if Policy.from_dict(json.loads(text)) == policy:
            return text
    raise ValueError(
        f"the policy {str(policy)!r} cannot be written as text and read back, so its cache cannot be saved: each part "
        "must be registered, as in @scorers.register('name'), and its arguments plain values"
    )


def _dtype(decoder: Any) -> str:
    return str(decoder.dtype).removeprefix("torch.")


def _fill(target: Any, state: dict[str, Any], tensors: dict[str, Tensor], where: Any, skipped: tuple = ()) -> None:
    """Sets the attributes of ``target``, which has them all."""
    names = set(vars(target)) - set(skipped)
    if isinstance(target, DynamicSlidingWindowLayer):
        names = {"cumulative_length", "is_initialized"}
    if set(state) != names:
        raise KeyError(f"expected {sorted(names)}, found {sorted(state)}")
    for name, value in state.items():
        setattr(target, name, _unpack(value, tensors, where))


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` as JSON, its tensors under ``name`` in ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().clone()  # the format refuses tensors that share memory
        return {"tensor": name}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_pack(part, f"{name}.{at}", tensors) for at, part in enumerate(value)]}
    if isinstance(value, _Run):
        return {"run": [_pack(getattr(value, f.name), f"{name}.{f.name}", tensors) for f in dataclasses.fields(_Run)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{name} is a {type(value).__name__}, which cannot be saved")


def _unpack(value: Any, tensors: dict[str, Tensor], where: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner].to(where)
    parts = [_unpack(part, tensors, where) for part in inner]
    if kind == "run":
        return _Run(*parts)
    return {"tuple": tuple, "list": list}[kind](parts)
