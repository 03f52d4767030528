import pytest

from kvretain.tasks.decoding import build_decoding
from kvretain.tasks.example import Source


def words(text, add_special_tokens=False):
    return {"input_ids": list(range(len(text.split())))}


SOURCE = Source("Tea is served. " * 100, words)  # 300 tokens, each its own number
SHAPE = {"passages": 2, "prompt": 10, "following": 19}


def test_passages_are_whole_disjoint_and_as_long_as_asked() -> None:
    made = [build_decoding(SOURCE, index, **SHAPE) for index in range(5)]
    rows = [row for example in made for row in example.rows]
    assert len(rows) == 10 and {example.prompt for example in made} == {10}
    for row in rows:
        assert row == tuple(range(row[0], row[0] + 30))
    assert len({token for row in rows for token in row}) == 300
    assert [row[0] for row in rows] != sorted(row[0] for row in rows)


def test_the_same_arguments_give_the_same_example() -> None:
    assert build_decoding(SOURCE, 3, **SHAPE) == build_decoding(SOURCE, 3, **SHAPE)
    assert build_decoding(SOURCE, 3, **SHAPE) != build_decoding(SOURCE, 3, seed=1, **SHAPE)
    assert (build_decoding(SOURCE, 3, **SHAPE).task, build_decoding(SOURCE, 3, **SHAPE).index) == ("decode", 3)


def test_a_text_too_short_says_what_it_is_enough_for() -> None:
    message = "300 tokens, enough for 5 examples of 2 passages of 30, so there is no example 5: give a longer --text"
    with pytest.raises(ValueError, match=message):
        build_decoding(SOURCE, 5, **SHAPE)
    with pytest.raises(ValueError, match="enough for 0 examples of 8 passages of 641"):
        build_decoding(SOURCE, 0)
