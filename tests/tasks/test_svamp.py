import json
from pathlib import Path

import pytest

from kvretain.tasks.example import grade_number
from kvretain.tasks.svamp import build_svamp, load_svamp

FILE = next(
    (p / "shared/data/svamp/test.jsonl" for p in Path(__file__).resolve().parents if (p / "shared").is_dir()), None
)
needs_file = pytest.mark.skipif(FILE is None or not FILE.is_file(), reason="../shared/data/svamp is not there")


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "svamp.jsonl"
    row = {"Body": "Ann has {} figs", "Question": "How many?", "Equation": "( ( {}.0 + 1.0 ) * 2.0 )", "Answer": 0.0}
    lines = [
        json.dumps(
            row | {"Body": f"Ann has {i} figs", "Equation": f"( ( {i}.0 + 1.0 ) * 2.0 )", "Answer": 2.0 * (i + 1)}
        )
        for i in range(120)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_row_becomes_a_problem(rows):
    problem = load_svamp(rows)[3]
    assert problem.question == "Ann has 3 figs. How many?"
    assert problem.steps == "(3 + 1) * 2 = 8"
    assert problem.answer == 8


def test_solved_problems_are_never_asked(rows):
    problems = load_svamp(rows)
    examples = [build_svamp(problems, index) for index in range(20)]
    asked = {example.question.strip() for example in examples}
    assert len(asked) == 20
    assert not any(question in example.context for question in asked for example in examples)
    assert all(example.context.count("Answer:") == 8 for example in examples)
    assert examples[0] == build_svamp(problems, 0) != build_svamp(problems, 0, seed=1)
    assert examples[4].grade(examples[4].target)
    with pytest.raises(ValueError, match="there is no example 20: 20 problems"):
        build_svamp(problems, 20)
    with pytest.raises(ValueError, match="too few"):
        build_svamp(problems[:50], 0)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"Body": "a"}', '{"Body": 1, "Question": "", "Equation": "", "Answer": 1}']
)
def test_a_bad_line_is_named(line, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: no SVAMP row"):
        load_svamp(path)


@pytest.mark.parametrize(
    ("reply", "answer", "right"),
    [
        (" 290 / 2 = 145.", "145", True),
        ("145.0", "145", True),
        ("1,450", "1450", True),
        ("-3", "-3", True),
        ("0.5", "0.5", True),
        ("145, so 3", "145", False),
        ("\n7\n8", "7", True),
        ("no idea", "7", False),
        ("", "7", False),
    ],
)
def test_grade_number(reply, answer, right):
    assert grade_number(reply, answer) is right


@needs_file
def test_the_real_file():
    problems = load_svamp(FILE)
    assert len(problems) == 1000
    wrong = [p.steps for p in problems if eval(p.steps.partition(" = ")[0]) != pytest.approx(p.answer, abs=0.01)]
    assert wrong == ["(4 - 2) + 3 = 1"]  # an error of the file
    assert all(build_svamp(problems, i).grade(build_svamp(problems, i).target) for i in range(0, 900, 50))
