"""The benchmarks' metrics: values worked out by hand, and the packages that LongBench's scripts call."""

import random

import pytest

from kvretain.data import chapter
from kvretain.tasks import metrics
from kvretain.tasks.metrics import NAMES, Metric


@pytest.mark.parametrize(
    ("name", "reply", "answer", "score"),
    [
        ("f1", "The Mad Hatter!", "the hatter", 2 / 3),
        ("f1", "tea tea tea", "tea time tea", 2 / 3),
        ("f1", "an apple, a day", "apple day", 1),
        ("f1", "", "tea", 0),
        ("f1", "the", "a", 0),
        ("rouge_l", "a b c d", "a c d e", 3 / 4),
        ("rouge_l", "d c b a", "a b c d", 1 / 4),
        ("rouge_l", "a b x y. a c z", "a b c d", 2 * (3 / 6) * (3 / 4) / (3 / 6 + 3 / 4)),
        ("rouge_l", "Tea", "tea", 0),
        ("rouge_l", "...", "tea", 0),
        ("retrieval", "Paragraph 12", "Paragraph 12", 1),
        ("retrieval", "12 or 3 or 12", "段落12", 2 / 3),
        ("retrieval", "the first", "Paragraph 1", 0),
        ("count", "10 paragraphs, 3 of them twice", "10", 1 / 2),
        ("count", "ten", "10", 0),
        ("edit_similarity", "```python\n# next\nreturn x + y\n", "return x", 0.8),
        ("edit_similarity", "\n\n", "return x", 0),
        ("match_part", "It was in OSLO.", "Oslo", 1),
        ("match_part", "It was in Os\x0blo.", "Oslo", 0),
    ],
)
def test_values_by_hand(name, reply, answer, score):
    assert Metric(name)(reply, (answer,)) == pytest.approx(score, abs=1e-8)


def test_classes():
    metric = Metric("classification", ("City", "Other City", "Food", "Date"))
    assert metric("Food", ("Food",)) == 1
    assert metric("Food or Date", ("Food",)) == 1 / 2
    assert metric("Other City", ("Other City",)) == 1  # City is part of the right one
    assert metric("Other City", ("City",)) == 1 / 2  # and not the other way round
    assert metric("Animal", ("Food",)) == 0


def test_the_best_of_several_answers_counts_and_rulers_are_shares():
    assert Metric("f1")("Oslo", ("Bergen", "in Oslo", "Oslo")) == 1
    assert Metric("match_all")("12 and 45", ("12", "34", "45", "67")) == 1 / 2
    assert Metric("match_part")("12 and 45", ("34", "45")) == 1
    assert Metric("match_part")("12 and 45", ("34", "67")) == 0


def test_only_the_first_line_counts_where_it_should():
    assert Metric("f1", first_line=True)("\n\nOslo\nQuestion: and Bergen?", ("Oslo",)) == 1
    assert Metric("f1")("\n\nOslo\nQuestion: and Bergen?", ("Oslo",)) < 1


def test_every_metric_is_1_for_the_answer_itself_and_lies_in_0_1():
    pytest.importorskip("jieba", reason="jieba is not installed")
    draw = random.Random(0)
    answers = {"retrieval": "Paragraph 7", "count": "7", "f1_chinese": "小狗在河边", "rouge_l_chinese": "小狗在河边"}
    for name in NAMES:
        metric, answer = Metric(name, ("a wise fish", "fish")), answers.get(name, "a wise fish")
        assert metric(answer, (answer,)) == pytest.approx(1, abs=1e-7)
        for _ in range(20):
            reply = "".join(draw.choices("a wise fish 7。小狗在.\n", k=20))
            assert 0 <= metric(reply, (answer,)) <= 1


def test_chinese_words():
    pytest.importorskip("jieba", reason="jieba is not installed")
    # 小狗 / 在 / 河边 against 小狗 / 在 / 公园: two of three words each; marks do not count in F1, but do in ROUGE.
    assert metrics.f1_chinese("小狗在河边。", "小狗在公园") == pytest.approx(2 / 3)
    assert metrics.rouge_l_chinese("小狗在河边", "小狗在公园") == pytest.approx(2 / 3)


def test_rouge_is_that_of_the_package():
    package = pytest.importorskip("rouge", reason="the package rouge is not installed").Rouge()
    words, draw = chapter().split(), random.Random(0)
    for _ in range(60):
        first = draw.randrange(len(words) - 200)
        reply, answer = (" ".join(words[start : start + draw.randrange(1, 90)]) for start in (first, first + 9))
        theirs = package.get_scores([reply], [answer])[0]["rouge-l"]["f"]
        assert metrics.rouge_l(reply, answer) == pytest.approx(theirs, abs=1e-12)


def test_a_sentence_may_be_long():
    text = " ".join(f"w{i}" for i in range(1200))
    assert metrics.rouge_l(text, text) == pytest.approx(1)


def test_edit_similarity_is_that_of_fuzzywuzzy():
    fuzz = pytest.importorskip("fuzzywuzzy.fuzz", reason="fuzzywuzzy is not installed")
    if "Levenshtein" in fuzz.SequenceMatcher.__module__:
        pytest.skip("fuzzywuzzy has its C library, whose ratio is another one")
    draw, text = random.Random(0), chapter().replace("\n", " ").replace("`", "")
    for _ in range(60):
        first = draw.randrange(len(text) - 300)
        reply, answer = text[first : first + draw.randrange(1, 250)], text[first + 3 : first + draw.randrange(4, 250)]
        assert metrics.edit_similarity(reply, answer) == fuzz.ratio(reply, answer) / 100
