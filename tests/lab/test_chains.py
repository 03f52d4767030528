"""Chains: an independent solver agrees, the text is what the docstring says, and its words survive the tokenizer."""

import random
import re
from collections import Counter

import pytest
from checkpoint import save_tiny_checkpoint
from transformers import AutoTokenizer

from kvretain.evidence import Verdict, grade_exact
from kvretain.lab.chains import NAMES, draw_chain, draw_recall, series
from kvretain.lab.evaluate import recalls
from kvretain.lab.vocabulary import DIGITS, IDS, WORDS, check, tokenizer


def solved(prompt: str) -> tuple[dict[str, int], str]:
    """All values and the asked variable, read from the text alone."""
    given, _, rest = prompt.partition(" : ")
    definitions, asked = re.fullmatch(r"(.*) \? (\w) :", rest).groups()
    known = {name: int(digit) for name, digit in (pair.split() for pair in given.split(" ; "))}
    words = definitions.split()
    for definition in (" ".join(words[at : at + 5]) for at in range(0, len(words), 5)):
        name, formula = definition.split(" = ")
        assert name not in known
        known[name] = eval(formula, {}, dict(known)) % 10  # refuses operands that are not known yet
    return known, asked


@pytest.mark.parametrize("steps, given", [(1, 1), (3, 2), (20, 4), (40, 12)])
def test_an_independent_solver_agrees(steps, given):
    for problem in series(20, steps=steps, given=given, seed=3):
        known, asked = solved(problem.prompt)
        assert (known, asked) == (problem.values, problem.asked) and problem.answer == str(known[asked])
        assert len(known) == steps + given and asked in [step.name for step in problem.steps[-max(1, steps // 4) :]]
        assert grade_exact(problem.solution, problem.answer) == Verdict.RIGHT
        wrong = str((known[asked] + 1) % 10)
        assert grade_exact(problem.solution, wrong) == Verdict.WRONG


def test_a_solution_repeats_definitions_and_recalls_operands():
    for problem in series(5, steps=20):
        words = problem.solution.split()
        assert len(words) == 20 * 15 + 7
        for number, step in enumerate(problem.steps):
            line = words[15 * number : 15 * (number + 1)]
            assert line[:6] == [*str(step).split(), ":"]
            expected = [word for n in (step.left, step.right, step.name) for word in (n, str(problem.values[n]), ";")]
            assert line[6:] == expected


def test_a_series_is_reproducible_and_another_one_differs():
    assert series(5, steps=8) == series(9, steps=8)[:5] != series(5, steps=8, seed=1)


def test_operands_lie_at_all_distances():
    far = Counter(min(found.distance // 50, 4) for problem in series(20, steps=20)
                  for found in recalls(problem.prompt, problem.solution))  # fmt: skip
    assert all(far[bin] > 10 for bin in range(5)), far


def test_what_makes_no_chain_is_refused():
    with pytest.raises(ValueError, match="at least one given variable and one step, not 4 and 0"):
        series(1, steps=0)
    with pytest.raises(ValueError, match=f"more than the {len(NAMES)} names"):
        series(1, steps=50)


def test_pure_recall_gives_each_value_again():
    words = draw_recall(random.Random(0), variables=5, queries=7)
    pairs = [tuple(words[at : at + 2]) for at in range(0, len(words), 3)]
    assert set(words[2::3]) == {";"} and len(pairs) == 12
    assert len(dict(pairs)) == 5 and set(pairs[5:]) <= set(pairs[:5])


def test_texts_survive_the_tokenizer(tmp_path):
    tokenizer().save_pretrained(tmp_path)
    for words in (tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        problem = draw_chain(random.Random(1), steps=6)
        text = f"{problem.prompt} {problem.solution}"
        ids = words(text)["input_ids"]
        assert ids == [IDS["<bos>"], *(IDS[word] for word in text.split())]
        assert words.decode(ids, skip_special_tokens=True) == text
        assert words(problem.solution, add_special_tokens=False)["input_ids"] == ids[-len(problem.solution.split()) :]
        assert [WORDS[i] for i in DIGITS] == list("0123456789")
        check(words, len(WORDS), "it")


def test_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the model has another vocabulary .* `kvretain lab train` makes"):
        check(AutoTokenizer.from_pretrained(save_tiny_checkpoint(tmp_path)), len(WORDS), "the model")


@pytest.mark.parametrize("size", [60, 120])
def test_other_embeddings_than_words_are_refused(size):
    with pytest.raises(ValueError, match=rf"the model has {size} embeddings, but its tokenizer, .* {len(WORDS)} words"):
        check(tokenizer(), size, "the model")
