"""A retention policy: which scorer, refiner, selector and scope. Frozen, flat and serialisable.

In text a policy is ``scorer[+refiner][/selector][~merger][@scope]``, each part with optional named arguments::

    snapkv+hub                      SnapKV's scores, HubKV's correction, top-k per head
    keydiff@layer                   one set for all heads of a layer
    knorm~nearest                   evicted values are averaged into the most similar entry that stays
    snapkv(window=16)+hub(discount=0.25)@layer(combine="mean")

A bare preset name (:data:`presets`) stands for its text.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from dataclasses import dataclass
from typing import Any, TypeVar

from .checks import between
from .merge import Merger, mergers
from .refine import Refiner, refiners
from .registry import Registry, check_dataclass
from .scores import Scorer, scorers
from .scores.base import NEEDS
from .select import Selector, selectors
from .select.scope import COMBINE

SCOPES: dict[str, tuple[str, ...]] = {
    "head": ("layers", "beta"),
    "layer": ("combine", "layers", "beta"),
    "model": ("combine",),
    "aligned": ("combine",),
    "shared": ("floor", "layers", "beta"),
    "model-heads": ("floor",),
}
"""Who shares one budget or one set, and the arguments of each.

``head``: each KV head keeps its own set. ``layer``: one set for all heads of a layer. ``model``: one set for all layers
and heads, evicted when the last layer is done. ``aligned``: one set for each KV-head index, the same in all layers,
evicted when the last one is done (TriAttention's default). ``shared``: the heads of a layer compete for its budget, so
that their numbers of entries differ. ``model-heads``: all heads of all layers compete. A ``budget`` is then the mean
per head."""

LAYERS = ("equal", "pyramid")
"""How the budget is split between layers, see :func:`kvretain.select.allocate.layer_budgets`."""

PER_ENTRY = frozenset({"attention", "replay", "hidden"})
"""Needs for which the cache keeps a number with every entry."""

_FORM = "scorer[+refiner][/selector][~merger][@scope]"

_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""

_INNER = rf"""[^()'"]|{_QUOTED}"""

_PART = re.compile(rf"\s*([+/~@]?)\s*([A-Za-z_][\w-]*)\s*(\((?:{_INNER}|\((?:{_INNER})*\))*\))?\s*")

C = TypeVar("C")


@dataclass(frozen=True)
class Preset:
    """A named policy: ``text`` in the policy language, ``doc`` with every deviation from ``paper``."""

    name: str
    text: str
    paper: str
    doc: str


@dataclass(frozen=True)
class Policy:
    """How entries are valued and chosen; how many are kept is the cache's business (``budget`` or ``ratio``).

    Attributes:
        scorer: values each entry; None keeps everything (the policy ``full``).
        refiner: corrects the scores before selection, or None.
        selector: picks the entries to keep.
        merger: what these take over from the entries that go, or None: nothing, evicted is gone.
        scope: who shares one set, see :data:`SCOPES`.
        combine: for the scopes ``layer``, ``model`` and ``aligned``, how scores of heads and layers become one, see
            :func:`kvretain.select.scope.combine_heads` and :func:`kvretain.select.scope.combine_layers`.
        floor: for the scopes ``shared`` and ``model-heads``, the share of the mean budget that every head is sure of
            (AdaKV's safeguard, arXiv 2407.11550, which sets it to 0.2).
        layers: ``equal`` budgets for all layers, or a ``pyramid`` (PyramidKV, arXiv 2406.02069) of steepness ``beta``.

    Raises:
        ValueError: an unknown name, argument, scope or need, with the valid ones; parts that do not go together; a part
            that is no frozen dataclass; or a scorer that needs queries and does not say how many.
    """

    scorer: Scorer | None
    refiner: Refiner | None = None
    selector: Selector = dataclasses.field(default_factory=lambda: selectors["topk"]())
    merger: Merger | None = None
    scope: str = "head"
    combine: str = "zscore"
    floor: float = 0.0
    layers: str = "equal"
    beta: float = 20.0

    def __post_init__(self) -> None:
        self._check_parts()
        if self.scope not in SCOPES:
            raise ValueError(f"unknown scope {self.scope!r}; valid: {', '.join(SCOPES)}")
        if self.combine not in COMBINE:
            raise ValueError(f"unknown combine {self.combine!r}; valid: {', '.join(COMBINE)}")
        if self.layers not in LAYERS:
            raise ValueError(f"unknown layers {self.layers!r}; valid: {', '.join(LAYERS)}")
        if not between(0, self.floor, 1):
            raise ValueError(f"floor is a number from 0 to 1, not {self.floor!r}")
        if not between(1, self.beta, sys.float_info.max):
            raise ValueError(f"beta is a number from 1 up, and finite, not {self.beta!r}")
        for name in ("combine", "floor", "layers", "beta"):
            if name not in SCOPES[self.scope] and getattr(self, name) != getattr(type(self), name):
                valid = ", ".join(SCOPES[self.scope]) or "none"
                raise ValueError(f"scope {self.scope!r} takes no {name!r}; valid: {valid}")
        if self.competes and self.selector != selectors["topk"]():
            raise ValueError(f"with the scope {self.scope!r} heads compete by score: only the selector 'topk' fits")
        if self.scope != "head" and self.scorer is not None and not self.scorer.comparable:
            raise ValueError(
                f"the scorer {scorers.name_of(self.scorer)!r} values heads by different rules, so their scores cannot "
                f"be compared, as the scope {self.scope!r} does: only the scope 'head' fits"
            )
        if self.ragged and self.merger is not None:
            raise ValueError(
                f"mergers need equal numbers of entries, which the scope {self.scope!r}"
                f"{' with a pyramid' if self.layers != 'equal' else ''} does not give"
            )
        if len(numbers := sorted(self.needs & PER_ENTRY)) > 1:
            raise ValueError(f"one scorer cannot need {' and '.join(numbers)}: an entry carries one number")
        if self.ragged and "attention" in self.needs:
            raise ValueError(
                "a scorer that accumulates attention needs equal numbers of entries, which the scope "
                f"{self.scope!r}{' with a pyramid' if self.layers != 'equal' else ''} does not give"
            )

    def _check_parts(self) -> None:
        for kind, base in (("scorer", Scorer), ("refiner", Refiner), ("selector", Selector), ("merger", Merger)):
            part = getattr(self, kind)
            if part is None and kind != "selector":
                continue
            if not isinstance(part, base):
                raise ValueError(f"a policy's {kind} is a {base.__name__}, not {part!r}; Policy.parse reads texts")
            check_dataclass(kind, type(part))
        if self.scorer is None:
            return
        name, needs = scorers.name_of(self.scorer), self.needs
        if not isinstance(needs, frozenset | set):
            raise ValueError(f"scorer {name!r}: needs is a set, such as frozenset({{'queries'}}), not {needs!r}")
        if unknown := sorted(map(repr, needs - NEEDS)):
            raise ValueError(f"scorer {name!r} has an unknown need {unknown[0]}; valid: {', '.join(sorted(NEEDS))}")
        window = self.scorer.window
        if "queries" in needs and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ValueError(
                f"scorer {name!r} needs queries, and does not say how many: its window must be a whole number of at "
                f"least 1 (a field, or a property), not {window!r}"
            )

    @property
    def competes(self) -> bool:
        """Whether heads compete for one budget, so that their numbers of entries differ."""
        return self.scope in ("shared", "model-heads")

    @property
    def ragged(self) -> bool:
        """Whether heads or layers store different numbers of entries."""
        return self.competes or self.layers != "equal"

    @property
    def whole_model(self) -> bool:
        """Whether all layers choose together, when the last one is done."""
        return self.scope in ("model", "aligned", "model-heads")

    def shares_as_widely_as(self, other: Policy) -> bool:
        """Whether all heads and layers that hold the same entries under ``other`` do so under this policy, too."""
        wider = {"layer": ("layer", "model"), "aligned": ("aligned", "model"), "model": ("model",)}
        return self.scope in wider.get(other.scope, SCOPES)

    @property
    def deferred(self) -> bool:
        """Whether evictions wait for the end of the pass: all layers choose together, or the tokens are replayed."""
        return self.whole_model or "replay" in self.needs

    @property
    def tapped(self) -> bool:
        """Whether the model's attention must be reached: to observe queries, or to attend over unequal heads."""
        return bool(self.collects - {"hidden"}) or self.ragged

    @property
    def collects(self) -> frozenset[str]:
        """The needs that passes must serve: all but a calibration, which is measured beforehand."""
        return self.needs - {"calibration"}

    @property
    def needs(self) -> frozenset[str]:
        """What the cache must collect while the model runs, see :attr:`~kvretain.scores.Scorer.needs`."""
        return self.scorer.needs if self.scorer else frozenset()

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Reads a policy text or preset name.

        Raises:
            ValueError: it does not parse, or names something unknown; the message quotes ``text`` and lists what is
                valid.
        """
        if not isinstance(text, str):
            raise ValueError(f"a policy is a text such as 'snapkv+hub' or a Policy, not {type(text).__name__}")
        if text.strip() in presets:
            return cls._parse(presets[text.strip()].text)
        try:
            return cls._parse(text)
        except ValueError as error:
            raise ValueError(f"policy {text!r}: {error}") from None

    @classmethod
    def _parse(cls, text: str) -> Policy:
        parts: dict[str, tuple[str, dict[str, Any]]] = {}
        at = 0
        for mark in ("", "+", "/", "~", "@"):
            match = _PART.match(text, at)
            if match and match[1] == mark:
                parts[mark] = (match[2], _arguments(match[3] or "", match[2]))
                at = match.end()
        rest = re.sub(_QUOTED, "", text[at:])
        if rest.startswith("(") and rest.count("(") > rest.count(")"):
            raise ValueError(f"cannot read {text[at:]!r}: the ')' that closes it is missing")
        if at != len(text) or "" not in parts:
            raise ValueError(f"cannot read {text[at:]!r}; the form is {_FORM}")
        scorer_name, scorer_args = parts[""]
        if scorer_name == "full":
            if scorer_args or len(parts) > 1:
                raise ValueError("'full' keeps everything and takes no arguments, refiner, selector, merger or scope")
            return cls(None)
        if scorer_name not in scorers:
            if scorer_name in presets:
                whole = presets[scorer_name].text
                raise ValueError(f"{scorer_name!r} is a preset and stands alone; spell it out to change it: {whole}")
            raise ValueError(f"unknown scorer {scorer_name!r}; valid: {', '.join(sorted({*scorers, *presets}))}")
        given: dict[str, Any] = {"scorer": _build(scorers, scorer_name, scorer_args)}
        if "+" in parts:
            given["refiner"] = _build(refiners, *parts["+"])
        if "/" in parts:
            given["selector"] = _build(selectors, *parts["/"])
        if "~" in parts:
            given["merger"] = _build(mergers, *parts["~"])
        if "@" in parts:
            given["scope"], scope_args = parts["@"]
            valid = list(SCOPES.get(given["scope"], scope_args))  # an unknown scope is the error to report
            if unknown := [name for name in scope_args if name not in valid]:
                raise ValueError(
                    f"scope {given['scope']!r} takes no {unknown[0]!r}; valid: {', '.join(valid) or 'none'}"
                )
            given.update(scope_args)
        return cls(**given)

    def __str__(self) -> str:
        if self.scorer is None:
            return "full"
        text = _text(scorers, self.scorer)
        if self.refiner is not None:
            text += "+" + _text(refiners, self.refiner)
        if self.selector != selectors["topk"]():
            text += "/" + _text(selectors, self.selector)
        if self.merger is not None:
            text += "~" + _text(mergers, self.merger)
        changed = [n for n in SCOPES[self.scope] if getattr(self, n) != getattr(type(self), n)]
        arguments = ", ".join(f"{n}={getattr(self, n)!r}" for n in changed)
        # A preset may share its scorer's name and have another scope: then even the default scope is spelled out.
        if self.scope != "head" or arguments or (text in presets and presets[text].text != text):
            text += f"@{self.scope}" + (f"({arguments})" if arguments else "")
        return text

    def to_dict(self) -> dict[str, Any]:
        """A flat dict of plain values, e.g. ``{"scorer": "snapkv", "scorer.window": 8, ..., "scope": "head"}``."""
        flat: dict[str, Any] = {"scorer": "full"} if self.scorer is None else _flat("scorer", scorers, self.scorer)
        if self.refiner is not None:
            flat |= _flat("refiner", refiners, self.refiner)
        if self.merger is not None:
            flat |= _flat("merger", mergers, self.merger)
        scope = {name: getattr(self, name) for name in ("scope", *SCOPES[self.scope])}
        return flat | _flat("selector", selectors, self.selector) | scope

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> Policy:
        """The inverse of :meth:`to_dict`; arguments left out take their defaults.

        Raises:
            ValueError: an unknown key or value.
        """
        flat = dict(flat)
        given: dict[str, Any] = {}
        kinds: tuple[tuple[str, Registry[Any]], ...] = (
            ("scorer", scorers),
            ("refiner", refiners),
            ("selector", selectors),
            ("merger", mergers),
        )
        for kind, registry in kinds:
            arguments = {key.partition(".")[2]: flat.pop(key) for key in list(flat) if key.startswith(kind + ".")}
            name = flat.pop(kind, None)
            if name is None and (kind == "scorer" or arguments):
                raise ValueError(f"the policy dict has no {kind!r}")
            if kind == "scorer" and name == "full":
                given[kind] = None
            elif name is not None:
                given[kind] = _build(registry, name, arguments)
        if unknown := set(flat) - {"scope", "combine", "floor", "layers", "beta"}:
            raise ValueError(
                f"unknown policy keys {sorted(unknown)}; valid: scorer, refiner, selector, merger (and their "
                "dotted arguments), scope, combine, floor, layers, beta"
            )
        return cls(**given, **flat)


def _arguments(text: str, owner: str) -> dict[str, Any]:
    """The named literal arguments in ``"(window=8, kernel=7)"``."""
    if not text:
        return {}
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError(f"arguments of {owner!r} are named, e.g. {owner}(name=value)")
        names = [str(keyword.arg) for keyword in call.keywords]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{owner!r} takes {twice[0]} once, but it is given {names.count(twice[0])} times")
        return {str(keyword.arg): _literal(owner, keyword) for keyword in call.keywords}
    except SyntaxError:
        raise ValueError(
            f"cannot read the arguments {text!r} of {owner!r}; the form is {owner}(name=value, ...)"
        ) from None


def _literal(owner: str, keyword: ast.keyword) -> Any:
    value = keyword.value
    sign = -1.0 if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub) else 1.0
    bare = value.operand if isinstance(value, ast.UnaryOp) and sign < 0 else value
    if isinstance(bare, ast.Name) and bare.id in ("nan", "inf"):
        return sign * float(bare.id)  # no field takes them, and its own check says so
    try:
        return ast.literal_eval(value)
    except ValueError:
        given = ast.unparse(value)
        hint = f"; texts need quotes, as in {keyword.arg}='{given}'" if isinstance(value, ast.Name) else ""
        raise ValueError(f"{owner!r}: {keyword.arg} must be a plain value, not {given}{hint}") from None


def _build(registry: Registry[C], name: str, arguments: dict[str, Any]) -> C:
    cls = registry[name]
    valid = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    if unknown := [argument for argument in arguments if argument not in valid]:
        raise ValueError(f"{registry.kind} {name!r} takes no {unknown[0]!r}; valid: {', '.join(valid) or 'none'}")
    # JSON turns tuples into lists; components are hashable, so lists become tuples again.
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()})


def _text(registry: Registry[C], item: C) -> str:
    fields = dataclasses.fields(item)  # type: ignore[arg-type]
    changed = [f"{f.name}={getattr(item, f.name)!r}" for f in fields if getattr(item, f.name) != f.default]
    return registry.name_of(item) + (f"({', '.join(changed)})" if changed else "")


def _flat(kind: str, registry: Registry[C], item: C) -> dict[str, Any]:
    values = {f"{kind}.{f.name}": getattr(item, f.name) for f in dataclasses.fields(item)}  # type: ignore[arg-type]
    return {kind: registry.name_of(item)} | values


presets: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("full", "full", "", "Keeps everything; the reference for every comparison."),
        Preset(
            "random", "random", "", "A uniform sample of all tokens seen, plus 4 sinks; the floor any method must beat."
        ),
        Preset(
            "streaming",
            "streaming",
            "StreamingLLM, arXiv 2309.17453",
            "4 sinks and the most recent tokens. Deviation: keys keep their original rotation (the paper re-rotates to "
            "cache positions).",
        ),
        Preset(
            "knorm",
            "knorm",
            "arXiv 2406.11430",
            "Low key norm = keep. Deviations: 4 sinks are protected; the paper skips the first two layers.",
        ),
        Preset(
            "value-norm",
            "value-norm",
            "VATP's value factor, arXiv 2406.12335",
            "Large value norm = keep. No paper proposes it alone: it is the baseline that tells what values add.",
        ),
        Preset(
            "keydiff",
            "keydiff",
            "KeyDiff, arXiv 2504.15364",
            "Keys far from the mean direction stay. Deviation: 4 sinks are protected.",
        ),
        Preset(
            "lagkv",
            "lagkv",
            "LagKV, arXiv 2504.04704",
            "Keys and values that stand out from the next partition of tokens; ranked within partitions of 128. "
            "Deviations: partitions are cut anew at every eviction and shrink to a quarter of the budget.",
        ),
        Preset(
            "tova",
            "tova@layer(combine='mean')",
            "TOVA, arXiv 2401.06104",
            "The last query's attention, averaged over all heads of a layer, one set per layer. Deviation: evicts "
            "every `every` tokens, not at every token (set every=1 for the paper's cadence).",
        ),
        Preset(
            "snapkv",
            "snapkv",
            "SnapKV, arXiv 2404.14469",
            "Attention of the last 8 queries, max-pooled by 7; the window is kept. As R-KV and TriAttention run "
            "it at decode time. Deviations from the paper: window 8 (16 to 64 there), maximum over the query group, "
            "4 sinks protected.",
        ),
        Preset(
            "rkv",
            "rkv",
            "R-KV, arXiv 2505.24133",
            "SnapKV's importance (window 8, pooled by 7) minus how much a key repeats others, mixed 0.1 to 0.9 as in "
            "the paper (the code's 0.07 is rkv(mix=0.07)); no sinks. Deviation: float32 throughout.",
        ),
        Preset(
            "triattention",
            "trig@aligned(combine='mean')",
            "TriAttention, arXiv 2604.04921",
            "What a query of the calibrated mean direction is expected to attend to from ahead; one set per KV-head "
            "index, the same in all layers (the authors' default mode, per_head). Deviations: 4 sinks protected, the "
            "prompt competes (protect_prompt=True pins it), ties by position and not by noise, calibrated on a chapter "
            "of about 3,500 tokens unless a file is named.",
        ),
        Preset(
            "triattention-union",
            "trig@model(combine='max')",
            "TriAttention, arXiv 2604.04921",
            "The authors' mode union: one set for the whole model, by the largest score of any head in any layer, "
            "which is the same as their nomination by every head. Deviations: those of triattention.",
        ),
        Preset(
            "alpha",
            "trig/diverse(weight=0.5)@model(combine='max')",
            "α, arXiv 2605.14292",
            "TriAttention's union scores; each pick loses half of its largest cosine, in mean values, to what is "
            "chosen; one set for the whole model. The full text was not available. Readings: union as the base, "
            "scores not rescaled, maximum and not mean, no centring, protected entries count as chosen; arguments of "
            "`diverse` give the others. Deviations: those of triattention.",
        ),
        Preset(
            "merging",
            "trig~nearest@model(combine='max')",
            "α's family State",
            "TriAttention's union scores; an evicted value is averaged into the kept entry with the most similar key. "
            "Rejected by the paper; its definition is not public, this one is kvretain's.",
        ),
        Preset(
            "summary-entries",
            "trig/segments~segment@model(combine='max')",
            "α's family State",
            "TriAttention's union scores; a quarter of the budget goes to entries that stand for the evicted of 16 "
            "tokens each. Rejected by the paper; its definition is not public, this one is kvretain's.",
        ),
        Preset(
            "routing",
            "routed",
            "α's family Routing",
            "Half of each layer's heads keep by TriAttention's scores, the others the most recent. Rejected by the "
            "paper; its definition is not public, this one is kvretain's.",
        ),
        Preset(
            "key-diversity",
            "trig/diverse(space='keys')@model(combine='max')",
            "α's family Scoring",
            "As alpha, with cosines of mean keys in place of mean values. Rejected by the paper; its definition is not "
            "public, this one is kvretain's.",
        ),
        Preset(
            "value-weighting",
            "trig(value_weight=0.5)@model(combine='max')",
            "α's family Scoring",
            "TriAttention's union scores plus half the standardised logarithm of the value's length. Rejected by the "
            "paper; its definition is not public, this one is kvretain's.",
        ),
        Preset(
            "pyramidkv",
            "snapkv@head(layers='pyramid')",
            "PyramidKV, arXiv 2406.02069",
            "SnapKV with budgets that fall from the first layer to the last. Deviations: those of snapkv; the budgets' "
            "mean is the budget asked for.",
        ),
        Preset(
            "adakv",
            "snapkv@shared(floor=0.2)",
            "AdaKV, arXiv 2407.11550",
            "SnapKV's scores; the heads of a layer compete for its budget, each sure of a fifth of the mean. "
            "Deviations: those of snapkv.",
        ),
        Preset(
            "snapkv+hub",
            "snapkv+hub",
            "HubKV on SnapKV",
            "HubKV's correction on SnapKV's scores. Deviation: HubKV's own experiments use KVzip and Fast KVzip.",
        ),
        Preset(
            "expected",
            "expected@shared(floor=0.2)",
            "Expected Attention, arXiv 2510.00636",
            "What a Gaussian future query is expected to attend to, times the value's norm; the heads of a layer "
            "compete, as in the authors' default. Deviations: 4 sinks protected, statistics go on while decoding.",
        ),
        Preset(
            "kvzip",
            "kvzip@model-heads",
            "KVzip, arXiv 2505.23416",
            "The most attention that an entry receives when the context is read a second time; all heads of the model "
            "compete. Deviations: float32 scores, no repeat prompt, 4 sinks protected.",
        ),
        Preset(
            "fastkvzip",
            "fastkvzip@model-heads",
            "Fast KVzip, arXiv 2601.17668",
            "KVzip's scores as a learned gate guesses them from hidden states, in one pass; all heads of the model "
            "compete; 2 % of a short context is the recent window. Needs a gate: a published one, or one that "
            "`kvretain train-gate` made. Deviations: float32 gates, 4 sinks protected, at least one recent token.",
        ),
        Preset(
            "kvzip-plus",
            "kvzip(normalise=True)@model-heads",
            "KVzip+ in KVzap, arXiv 2601.07891",
            "KVzip's weights times the length of the projected value over that of the query's hidden state. "
            "Deviations: those of kvzip.",
        ),
        Preset(
            "hubkv",
            "kvzip+hub@model-heads",
            "HubKV (draft)",
            "HubKV's correction on KVzip's scores, as in the paper; head weights count because heads compete. "
            "Deviations: those of kvzip, and the readings that hub_refine states.",
        ),
        Preset(
            "h2o",
            "h2o",
            "H2O, arXiv 2306.14048",
            "Accumulated attention; half the budget is the recent window. Deviation: evicts every `every` tokens, and "
            "attention is accumulated per KV head (summed over its query group).",
        ),
    )
}
"""Policies by the names of their papers, in the order in which tables list them."""
