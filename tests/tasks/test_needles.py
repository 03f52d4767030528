"""The generators: the same for the same arguments, not too long, and gradable by what they hide."""

import itertools
import math
import random
import re
import subprocess
import sys

import pytest
from checkpoint import tiny_tokenizer

from kvretain.data import chapter
from kvretain.tasks.continuation import build_continuation
from kvretain.tasks.example import Source
from kvretain.tasks.needles import NEEDLES, build_needle


@pytest.fixture(scope="module")
def source():
    return Source(chapter(), tiny_tokenizer())


def words(text, add_special_tokens=True):
    return {"input_ids": text.split()}


@pytest.mark.parametrize("task", NEEDLES)
def test_the_same_arguments_give_the_same_example(task, source):
    for index in range(5):
        assert build_needle(source, task, index, tokens=600) == build_needle(source, task, index, tokens=600)
    made = {
        build_needle(source, task, index, tokens=600, seed=seed).answers for index in range(10) for seed in range(2)
    }
    assert len(made) > 15


@pytest.mark.parametrize("tokens", [400, 600, 2000])
@pytest.mark.parametrize("task", NEEDLES)
def test_contexts_are_as_long_as_asked(task, tokens, source):
    for index in range(5):
        length = source.count(build_needle(source, task, index, tokens=tokens).context)
        assert tokens - 150 < length <= tokens


@pytest.mark.parametrize("task", NEEDLES)
def test_an_example_is_gradable(task, source):
    for index in range(20):
        example = build_needle(source, task, index, tokens=600)
        assert example.grade(example.opening + example.target)
        assert not example.grade(example.question)
        assert not example.grade("")
        for answer in example.answers:
            assert re.search(rf"\b{answer}\b", example.context)
            assert not example.grade(example.target.replace(answer, "x"))


@pytest.mark.parametrize(("task", "count"), [("single", 1), ("single7", 1), ("multikey", 4), ("multivalue", 3)])
def test_needles_stand_in_the_text(task, count, source):
    example = build_needle(source, task, 3, tokens=600)
    found = re.findall(r"magic numbers for (\w+ \w+) is: (\d+)\.", example.context)
    assert len(found) == count
    key = re.search(r"numbers? for (\w+ \w+) mentioned", example.question)[1]
    assert [number for other, number in found if other == key] == list(example.answers)
    assert {len(number) for _, number in found} == {7 if task == "single7" else 5}


def test_multiquery_asks_for_two_of_four_in_the_order_of_the_question(source):
    example = build_needle(source, "multiquery", 0, tokens=600)
    found = dict(re.findall(r"magic numbers for (\w+ \w+) is: (\d+)\.", example.context))
    first, second = re.search(r"for (\w+ \w+) and (\w+ \w+) mentioned", example.question).groups()
    assert len(found) == 4 and example.answers == (found[first], found[second])


@pytest.mark.parametrize("index", range(20))
def test_a_chain_is_assigned_in_its_order(index, source):
    example = build_needle(source, "tracking", index, tokens=400)
    held, wanted = {}, example.question.split("the value ")[1].split()[0]
    for name, value in re.findall(r"VAR ([A-Z]{3}) = (?:VAR )?([A-Z]{3}|\d{5})\.", example.context):
        held[name] = held.get(value, value)
    assert len(held) == 6
    assert [name for name, value in held.items() if value == wanted] == list(example.answers)


def test_common_words_are_the_most_common(source):
    example = build_needle(source, "words", 0, tokens=800)
    listed = re.findall(r"\d+\. (\w+)", example.context)
    counts = {word: listed.count(word) for word in listed}
    assert sorted(counts, key=counts.get, reverse=True)[:3] == sorted(example.answers, key=list(counts).index)
    assert set(counts.values()) == {10, 2}


def begins(source, task, index, **options):
    """Where the needles of an example begin, as shares of the context's tokens."""
    context = build_needle(source, task, index, **options).context
    places = [match.start() for match in re.finditer(r"One of the special magic|VAR [A-Z]{3} = ", context)]
    return [source.count(context[:place]) / source.count(context) for place in places]


RANGES = [(0.0, 1.0), (0.0, 0.5), (0.5, 1.0), (0.25, 0.75)]


@pytest.mark.parametrize("depth", RANGES, ids=str)
@pytest.mark.parametrize("task", [task for task in NEEDLES if task != "words"])
def test_needles_lie_within_the_depth(task, depth, source):
    """On real sentences, whose lengths differ by more than a factor of ten."""
    low, high = depth
    found = [share for index in range(20) for share in begins(source, task, index, tokens=800, depth=depth)]
    assert len(found) >= 20
    assert low - 0.01 <= min(found) and max(found) <= high + 0.01
    assert max(found) - min(found) > 0.6 * (high - low)


@pytest.mark.parametrize("skip", [0, 7, 100])
@pytest.mark.parametrize("depth", [(0.0, 1.0), (0.2, 0.6)], ids=str)
def test_consecutive_examples_spread_evenly_over_the_depth(depth, skip):
    source = Source("Tea is served. " * 400, words)
    low, high = depth
    places = [begins(source, "single", skip + i, tokens=600, depth=depth)[0] for i in range(40)]
    tenths = [min(int(10 * (place - low) / (high - low)), 9) for place in places]
    assert all(2 <= tenths.count(tenth) <= 6 for tenth in range(10)), tenths
    # No two neighbours of the series are close, so that few examples are spread as well.
    ordered = sorted(places[:5])
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 0.08 * (high - low)


@pytest.mark.parametrize("task", ["multikey", "multivalue", "tracking"])
def test_the_needles_of_an_example_spread_evenly(task):
    source = Source("Tea is served. " * 400, words)
    found = begins(source, task, 3, tokens=1000, depth=(0.0, 1.0))
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert max(steps) - min(steps) < 0.02 and min(steps) > 0.9 / len(found) - 0.02


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_depth_between_two_ends_of_sentences_means_the_nearest(share):
    source = Source("Tea is served. " * 100, words)
    for index in range(5):
        (found,) = begins(source, "single", index, tokens=200, depth=(share, share))
        assert found == pytest.approx(share, abs=0.06)  # a needle of 10 in 200 tokens cannot begin at the very end


@pytest.mark.parametrize("depth", [(-0.1, 1), (0, 1.1), (0.6, 0.4), (0, math.nan), (0.5,)], ids=str)
def test_a_bad_depth(depth, source):
    with pytest.raises(ValueError, match=r"depth must be two shares in order, within \[0, 1\], not \("):
        build_needle(source, "single", 0, tokens=600, depth=depth)


def test_a_passage_wraps_around_the_end():
    source = Source("One. Two. Three. Four. Five.", words)
    passages = {tuple(source.passage(3, random.Random(seed))) for seed in range(50)}
    assert ("Five.", "One.", "Two.") in passages and len(passages) == 5
    assert all(len(passage) == 3 for passage in passages)


def test_a_passage_begins_with_a_sentence_that_fits():
    source = Source("One. This sentence has six words. Three.", words)
    assert {tuple(source.passage(2, random.Random(seed))) for seed in range(50)} == {("One.",), ("Three.", "One.")}


@pytest.mark.parametrize(
    ("task", "tokens", "message"),
    [
        ("single", 10, "leave no room"),
        ("single", 100_000, "too few for contexts"),
        ("words", 40, "no room for a list"),
        ("haystack", 500, "unknown task 'haystack'; valid: single"),
    ],
)
def test_bad_input(task, tokens, message, source):
    with pytest.raises(ValueError, match=message):
        build_needle(source, task, 0, tokens=tokens)


def test_a_text_without_words_is_refused():
    with pytest.raises(ValueError, match="no sentence"):
        Source(" \n", words)


def test_a_continuation_is_a_piece_of_the_text(source):
    made = build_continuation(source, 2, tokens=100, following=16)
    assert (len(made.context), len(made.following)) == (100, 17)
    text = source.tokenizer.decode([*made.context, *made.following])
    assert text in chapter()
    assert made == build_continuation(source, 2, tokens=100, following=16)
    assert made != build_continuation(source, 3, tokens=100, following=16)
    with pytest.raises(ValueError, match="a continuation needs 100,017"):
        build_continuation(source, 0, tokens=100_000, following=16)


def test_it_imports_no_transformers():
    code = "import sys, kvretain.tasks.needles, kvretain.tasks.svamp; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
