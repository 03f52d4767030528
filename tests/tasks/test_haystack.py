import pytest
from checkpoint import tiny_tokenizer

from kvretain.data import chapter
from kvretain.tasks.haystack import build_haystack, grade


def words(text, add_special_tokens=True):
    return {"input_ids": text.split()}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize("tokens", [300, 500, 2000])
@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
def test_length_and_depth_come_out_as_asked(tokenizer, tokens, depth):
    hay = build_haystack(tokenizer, chapter(), tokens=tokens, depth=depth)
    real = len(tokenizer(hay.context, add_special_tokens=False)["input_ids"])
    before = len(tokenizer(hay.context[: hay.context.index(hay.fact)], add_special_tokens=False)["input_ids"])
    assert hay.tokens == real <= tokens
    assert real > tokens - 200
    assert hay.depth == pytest.approx(before / real, abs=0.01)
    if 0 < depth < 1 and tokens >= 500:
        assert hay.depth == pytest.approx(depth, abs=0.1)
    if depth == 1:
        assert hay.context.endswith(hay.fact)
    if depth == 0:
        assert hay.context.startswith(hay.fact)


def test_the_same_arguments_give_the_same_haystack_and_seeds_differ(tokenizer):
    made = [build_haystack(tokenizer, chapter(), tokens=300, seed=seed) for seed in range(20)]
    assert made == [build_haystack(tokenizer, chapter(), tokens=300, seed=seed) for seed in range(20)]
    assert len({hay.fact for hay in made}) > 10


@pytest.mark.parametrize("seed", range(30))
def test_only_the_fact_gives_the_answer(seed):
    hay = build_haystack(words, chapter(), tokens=1500, seed=seed)
    assert hay.context.count(hay.fact) == 1
    assert grade(hay.fact, hay.answer)
    assert not grade(hay.context.replace(hay.fact, ""), hay.answer)
    assert not grade(hay.question, hay.answer)


def test_the_hay_is_the_text_with_the_fact_between_two_sentences():
    hay = build_haystack(words, chapter(), tokens=800, depth=0.5)
    before, after = hay.context.split(hay.fact)
    assert chapter().startswith(before)
    assert after.strip() and after.strip() in chapter()
    assert before.rstrip()[-1] in ".!?'\""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth": 1.5}, r"depth must lie in \[0, 1\], not 1.5"),
        ({"tokens": 5}, "tokens=5 leaves no room"),
        ({"tokens": 10_000}, "tokens; too few for tokens=10000"),
    ],
)
def test_bad_input(given, message):
    with pytest.raises(ValueError, match=message):
        build_haystack(words, chapter(), **given)


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        ("The key is in Lisbon.", "Lisbon", True),
        ("LISBON!", "lisbon", True),
        ("Lisbonne", "Lisbon", False),
        ("", "Lisbon", False),
        ("It is New-York", "new york", True),
        ("1,234,567 of them", "1234567", True),
        ("12345678", "1234567", False),
        ("1, 234", "1234", False),
    ],
)
def test_grade(reply, answer, right):
    assert grade(reply, answer) is right


def test_it_imports_no_transformers():
    import subprocess
    import sys

    code = "import sys, kvretain.tasks.haystack; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
