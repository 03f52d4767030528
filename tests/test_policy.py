"""Policies: the text form, the dict form, presets, and errors that list what is valid."""

import dataclasses
import json

import pytest

from kvretain import Policy, mergers, policy, presets, refiners, scorers, selectors
from kvretain.merge import Merger
from kvretain.refine import Hub, Refiner
from kvretain.scores import KeyDiff, KNorm, Scorer, SnapKV
from kvretain.scores.base import NEEDS
from kvretain.select import Selector

TEXTS = [
    *presets,
    "snapkv(window=16)",
    "snapkv(window=16, pooling='mean')+hub(discount=0.25, weight_clip=(0.9, 1.1))",
    'keydiff@layer(combine="mean")',
    "keydiff@model",
    "tova@head",
    "tova+hub@head",
    "random(seed=7)/topk@layer",
    "trig(calibration='a (copy).pt')",
    "trig(calibration='((a).pt')@layer",
    'trig(calibration="it\'s )(.pt")+hub',
]


@pytest.mark.parametrize("text", TEXTS)
def test_every_form_round_trips(text):
    policy = Policy.parse(text)
    assert Policy.parse(str(policy)) == policy
    assert Policy.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
    assert hash(policy) == hash(Policy.parse(text))


def test_the_parts_of_a_text():
    policy = Policy.parse(' snapkv( window = 16 ) + hub(discount=0.25) / topk @ layer(combine="max") ')
    assert policy.scorer == SnapKV(window=16)
    assert policy.refiner == Hub(discount=0.25)
    assert (policy.scope, policy.combine) == ("layer", "max")
    assert policy.needs == {"queries"}
    assert Policy.parse("keydiff") == Policy(KeyDiff())


def test_a_preset_is_its_text_and_differs_from_its_bare_scorer_only_by_scope():
    assert Policy.parse("tova").scope == "layer"
    assert Policy.parse("tova@head").scope == "head"
    assert str(Policy.parse("tova@head")) == "tova@head"


def test_dicts_are_flat_and_plain():
    flat = Policy.parse("snapkv+hub").to_dict()
    assert flat["scorer"] == "snapkv" and flat["scorer.window"] == 8 and flat["refiner.discount"] == 0.5
    assert all(isinstance(v, str | int | float | bool | tuple) for v in flat.values())


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("registry", [scorers, refiners, selectors, mergers], ids=lambda registry: registry.kind)
def test_no_field_takes_what_is_not_finite(registry, value):
    """Each field's own check speaks and quotes it."""
    for name in registry:
        for field in dataclasses.fields(registry[name]):
            with pytest.raises(ValueError, match=f"{field.name}.* {value}"):
                policy._build(registry, name, policy._arguments(f"({field.name}={value})", name))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hubkv@layer", ["'hubkv' is a preset and stands alone", "kvzip+hub@model-heads"]),
        ("kvzip+hub(neighbours=hub)", ["'hub': neighbours must be a plain value", "quotes, as in neighbours='hub'"]),
        ("fastkvzip(share=1/2)", ["'fastkvzip': share must be a plain value, not 1 / 2"]),
        ("trig/diverse(weight=nan)", ["diverse: weight must be a number of at least 0, not nan"]),
        ("trig/diverse(weight=-inf)", ["diverse: weight must be a number of at least 0, not -inf"]),
        ("snapkv@shared(floor=nan)", ["floor", "not nan"]),
        ("snapk", ["unknown scorer 'snapk'", "snapkv", "keydiff", "streaming"]),
        ("snapkv+hubb", ["unknown refiner 'hubb'", "hub"]),
        ("snapkv/top", ["unknown selector 'top'", "topk"]),
        ("snapkv@heads", ["unknown scope 'heads'", "head, layer, model"]),
        ("snapkv(windw=3)", ["'snapkv' takes no 'windw'", "window, kernel"]),
        ("snapkv(window=0)", ["window", "at least 1"]),
        ("snapkv(8)", ["arguments of 'snapkv' are named"]),
        ("snapkv(window=)", ["cannot read the arguments"]),
        ("snapkv(window=16", ["cannot read '(window=16': the ')' that closes it is missing"]),
        ("snapkv(window=16+hub", ["the ')' that closes it is missing"]),
        ("snapkv+hub(weight_clip=(0.9, 1.1)", ["the ')' that closes it is missing"]),
        ("knorm@layer(combine='mean'", ["the ')' that closes it is missing"]),
        ("snapkv(window=16))", ["cannot read ')'; the form is"]),
        ("trig(calibration='(')(", ["cannot read '(': the ')'"]),
        ("snapkv(window=8, window=9)", ["'snapkv' takes window once, but it is given 2 times"]),
        ("knorm@layer(combine='mean', combine='mean')", ["'layer' takes combine once"]),
        ("snapkv(window=__import__('os'))", ["policy"]),
        ("snapkv+", ["cannot read '+'"]),
        ("", ["scorer[+refiner][/selector][~merger][@scope]"]),
        ("full+hub", ["'full' keeps everything"]),
        ('knorm@layer(combine="sum")', ["unknown combine 'sum'", "zscore"]),
        ('knorm@head(combine="mean")', ["scope 'head' takes no 'combine'"]),
        ("snapkv@layer+hub", ["cannot read '+hub'"]),
    ],
)
def test_bad_texts_are_quoted_and_the_valid_names_listed(text, words):
    with pytest.raises(ValueError) as error:
        Policy.parse(text)
    message = str(error.value)
    assert repr(text) in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    "flat",
    [
        {},
        {"scorer": "nope"},
        {"scorer": "knorm", "refiner.kernel": 5},
        {"scorer": "knorm", "budget": 3},
        {"scorer": "knorm", "scorer.x": 1},
        {"scorer": "knorm", "scope": "all"},
    ],
)
def test_bad_dicts(flat):
    with pytest.raises(ValueError):
        Policy.from_dict(flat)


@dataclasses.dataclass(frozen=True)
class Asking(Scorer):
    """Asks for what a test says."""

    asked: object = frozenset()
    last: object = 0

    needs = property(lambda self: self.asked)
    window = property(lambda self: self.last)

    def score(self, view):
        raise AssertionError


@pytest.mark.parametrize("scope", ["head", "layer"])
@pytest.mark.parametrize(
    ("scorer", "words"),
    [
        (Asking(frozenset({"query"})), "unknown need 'query'; valid: attention, .*queries"),
        (Asking(frozenset({"queries", "x"}), 8), "unknown need 'x'"),
        (Asking("queries"), "needs is a set, such as .*, not 'queries'"),
        (Asking({"queries"}), "'Asking' needs queries, .* its window must be .* at least 1 .* not 0"),
        (Asking({"queries"}, None), "not None"),
        (Asking({"queries"}, 2.0), "not 2.0"),
        (SnapKV, "a policy's scorer is a Scorer, not <class"),
        ("snapkv", "not 'snapkv'; Policy.parse reads texts"),
    ],
)
def test_a_scorer_that_cannot_be_served_is_no_policy(scorer, words, scope):
    with pytest.raises(ValueError, match=words):
        Policy(scorer, scope=scope)


def test_what_scorers_may_need():
    for need in NEEDS:
        assert Policy(Asking({need}, 1)).needs == {need}
    for text in presets:
        assert Policy.parse(text).needs <= NEEDS


@pytest.mark.parametrize("kind", ["refiner", "selector", "merger"])
def test_parts_of_another_kind(kind):
    with pytest.raises(ValueError, match=f"a policy's {kind} is a {kind.capitalize()}, not KNorm"):
        Policy(KNorm(), **{kind: KNorm()})


BASES = {scorers: Scorer, refiners: Refiner, selectors: Selector, mergers: Merger}


@pytest.mark.parametrize("registry", BASES, ids=lambda r: r.kind)
def test_only_frozen_dataclasses_are_registered_or_used(registry, monkeypatch):
    monkeypatch.setattr(registry, "_items", dict(registry._items))

    class Plain(BASES[registry]):
        def score(self, view): ...

        def refine(self, scores, ratio, *, positions, protected): ...

        def select(self, scores, keep, *, protected, positions=None, values=None): ...

        def merge(self, keys, values, index, positions): ...

    plain = Plain()
    for cls in (Plain, dataclasses.dataclass(Plain)):
        with pytest.raises(ValueError, match=f"{registry.kind} 'own': the class .*Plain is no frozen dataclass"):
            registry.register("own")(cls)
    del Plain.__dataclass_fields__
    given = {"scorer": KNorm(), registry.kind: plain}
    with pytest.raises(ValueError, match=r"Plain is no frozen dataclass.*@dataclass\(frozen=True\)"):
        Policy(**given)
    assert "own" not in registry


@pytest.mark.parametrize("registry", [scorers, refiners, selectors], ids=lambda r: r.kind)
def test_every_component_is_a_documented_frozen_dataclass(registry):
    for name in registry:
        item = registry[name]()
        assert registry.name_of(item) == name
        assert type(item).__doc__
        with pytest.raises(AttributeError):
            item.some_new_attribute = 1


def test_presets_state_their_source():
    for name, preset in presets.items():
        assert preset.name == name and preset.doc
        assert preset.paper or name in ("full", "random")
