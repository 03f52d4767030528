import doctest
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from kvretain.evidence import Verdict, grade, grade_exact, grading, judge
from kvretain.evidence.grading import final_answer

pytest.importorskip("math_verify")

MATH500 = next(
    (p / "shared/data/math500/math500_test.json" for p in Path(__file__).resolve().parents if (p / "shared").is_dir()),
    Path("absent"),
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} or \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ 1, 2 \right\}}", r"\left\{ 1, 2 \right\}"),
        (r"\boxed{\left\{ x : x > 1 \right.}", r"\left\{ x : x > 1 \right."),
        (r"\fbox{ 7 }", "7"),
        ("\\boxed {7}", "7"),
        (r"\\boxed{7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{x = \boxed{7}}", r"x = \boxed{7}"),
        (r"\boxed{\boxed{7} \boxed{8}}", r"\boxed{7} \boxed{8}"),
        ("{ and } and } \\boxed{5} {", "5"),
        (r"\boxed{3} Put it in \boxed{}", "3"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{3", None),
        (r"\boxed{}", None),
        (r"\boxed 3", None),
        ("the answer is 5", None),
        ("", None),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{1}</think>It is 2.", None),
        (r"\boxed{1}</think>It is \boxed{2}", "2"),
        (r"<think>perhaps \boxed{1}", None),
        (r"\boxed{1}<think>or is it \boxed{2}", "1"),
        (r"<think>a</think>\boxed{1}<think>b \boxed{3}</think>\boxed{2}", "2"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_four_verdicts():
    assert [v.value for v in Verdict] == ["right", "wrong", "no_answer", "cut_off"]
    for judged in (grade, grade_exact):
        assert judged(r"it is \boxed{5}", "5") is Verdict.RIGHT
        assert judged(r"it is \boxed{6}", "5") is Verdict.WRONG
        assert judged("it is 5", "5") is Verdict.NO_ANSWER
        assert judged("it is 5", "5", cut_off=True) is Verdict.CUT_OFF
        assert judged(r"<think>is it \boxed{5}", "5", cut_off=True) is Verdict.CUT_OFF
        assert judged(r"\boxed{5} and on and on", "5", cut_off=True) is Verdict.RIGHT
        assert judged(r"\boxed{6} and on and on", "5", cut_off=True) is Verdict.WRONG


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("0.5", r"\frac{1}{2}"),
        (r"\dfrac12", "1/2"),
        ("2,125", "2125"),
        (r"\$18", "18"),
        (r"18 \text{ dollars}", "18"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("x=5", "5"),
        (r"\{2, 1\}", r"\{1,2\}"),
        ("1, 2", "2,1"),
        (r"\left(3, \frac{\pi}{2}\right)", r"\left( 3, \frac{2\pi}{4} \right)"),
        ("90", r"90^\circ"),
        (r"\text{Evelyn}", "Evelyn"),
        ("5.", "5"),
        ("025", "25"),
        (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("3.0", "3"),
        ("2.5", r"2 \frac{1}{2}"),
    ],
)
def test_equivalent_is_right_but_not_exact(answer, truth):
    text = f"Final answer: \\boxed{{{answer}}}"
    assert grade(text, truth) is Verdict.RIGHT
    assert grade_exact(text, truth) is Verdict.WRONG


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("0.33", "1/3"), ("(2,1)", "(1,2)"), ("1", "-1"), ("x+2", "x+1"), (r"\text{Evelny}", r"\text{Evelyn}"),
        (r"\text{seat}", r"\text{east}"), ("eleven", "11"), ("1,3", "1,2"), ("[0,1]", "[0,1)"), ("?", "5"),
    ],
)  # fmt: skip
def test_different_is_wrong(answer, truth):
    assert grade(f"\\boxed{{{answer}}}", truth) is Verdict.WRONG


@pytest.mark.skipif(not MATH500.is_file(), reason="../shared/data/math500 is not there")
def test_the_solutions_of_math500_are_right():
    rows = json.loads(MATH500.read_text(encoding="utf-8"))
    wrong = [row["unique_id"] for row in rows if grade(row["solution"], row["answer"]) is not Verdict.RIGHT]
    assert not wrong
    shifted = [grade(row["solution"], other["answer"]) for row, other in pairwise(rows)]
    same = sum(a["answer"] == b["answer"] for a, b in pairwise(rows))
    assert shifted.count(Verdict.RIGHT) <= same + 2


HOSTILE = ["9^{9^{9^9}}", "(9^9)!", r"\prod_{i=1}^{10^9} i", "(x+1)^{5000}", r"\frac{" * 3000 + "1" + "}{2}" * 3000]
MORE = [
    "10^{10^{10}}", "2^{2^{2^{2^{2^2}}}}", "(" * 5000 + "1" + ")" * 5000, "{" * 3000 + "}" * 3000, "1," * 5000 + "1",
    r"\sqrt{" * 3000 + "2" + "}" * 3000, r"\binom{10^8}{5\cdot 10^7}", "9999999^{9999999}", "1" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize(
    "answer", [*HOSTILE, *(pytest.param(answer, marks=pytest.mark.slow) for answer in MORE)], ids=lambda text: text[:12]
)
@pytest.mark.filterwarnings("ignore:graded as wrong")
def test_nothing_hangs(answer):
    began = time.monotonic()
    assert grade(f"\\boxed{{{answer}}}", "5", seconds=0.3) is Verdict.WRONG
    assert time.monotonic() - began < 30
    assert grade(r"\boxed{\frac{10}{2}}", "5") is Verdict.RIGHT


def test_a_comparison_that_is_ended_warns_and_its_memory_is_limited():
    with pytest.warns(
        RuntimeWarning, match=r"graded as wrong, because the comparison of '9\^\{9.* was not done in 0.3"
    ):
        grade(r"\boxed{9^{9^{9^9}}}", "5", seconds=0.3)
    grade(r"\boxed{1}", "2")
    status = Path(f"/proc/{grading._judge._process.pid}/limits")
    if status.is_file():
        assert f" {judge.MEMORY} " in status.read_text()


def test_extraction_is_linear():
    began = time.monotonic()
    for text in (r"\boxed{" * 200_000, r"\boxed{" * 50_000 + "}" * 50_000, "{" * 500_000, "\\" * 500_000):
        final_answer(text)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("wrap", ["{}", r"\text{{{}}}", r"\operatorname{{{}}}", "${}$"])
def test_text_is_never_evaluated(wrap, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    code = f"__import__('os').system('touch {mark}')"
    assert grade("\\boxed{" + wrap.format(code) + "}", "5") is Verdict.WRONG
    assert grade(r"\boxed{5}", code) is Verdict.WRONG
    assert not mark.exists()


def test_of_an_answer_only_number_literals_are_compiled():
    # In a process of its own, since an audit hook stays: what sympy compiles is its own code and Integer (43219 ).
    script = rf"""
import importlib.util, re, sys
spec = importlib.util.spec_from_file_location("judge", {judge.__file__!r})
judge = importlib.util.module_from_spec(spec)
spec.loader.exec_module(judge)
judge.equal("1", "1")
seen = []
sys.addaudithook(lambda event, args: seen.append(args[0]) if event == "compile" else None)
for answer in (
    "43219", "43219.5", "43219+1", "(43219)/2", "43219x", "x_{{43219}}", r"\text{{43219}}", r"\text{{print(43219)}}",
    r"print(43219)", r"x_{{print(43219)}}", r"\operatorname{{exec}}(43219)", r"\{{43219, 1\}}", "f(43219)", "'43219'",
):
    judge.equal(answer, "43220")
sources = [s.decode() if isinstance(s, bytes) else str(s) for s in seen]
found = [s for s in sources if "43219" in s]
assert found and all(re.fullmatch(r"Integer \(43219 \)|Float \('43219.5' \)", s) for s in found), found
assert not any("print" in s or "exec" in s for s in sources)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _judge_of(pid):
    """The judge's process here; ``pid`` is its at the parent."""
    return pid, grading._judge._process and grading._judge._process.pid


def _wrong_then_right(i):
    return [grade(f"\\boxed{{\\frac{{{2 * i}}}{{2}}}}", str(k)).value for k in (i + 1, i)]


def test_threads():
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(_wrong_then_right, range(1, 41))) == [["wrong", "right"]] * 40


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*fork")
def test_processes(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} on this system")
    grade(r"\boxed{1}", "2")  # forked children inherit a judge at work
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        theirs, own = pool.submit(_judge_of, grading._judge._process.pid).result()
        assert own != theirs
        assert list(pool.map(_wrong_then_right, range(1, 11))) == [["wrong", "right"]] * 10
    assert _wrong_then_right(5) == ["wrong", "right"]


def test_an_interrupted_comparison_leaves_no_reply_behind(monkeypatch):
    monkeypatch.setattr(grading, "_judge", grading._Judge())
    grade(r"\boxed{1}", "2")
    sent = grading._Judge._ask

    def interrupted(process, request, seconds):
        # The question is on its way when Ctrl-C comes; its reply, True, would be taken for that to the next question.
        process.stdin.write(request)
        process.stdin.flush()
        raise KeyboardInterrupt

    monkeypatch.setattr(grading._judge, "_ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grade(r"\boxed{0.5}", "1/2")
    monkeypatch.setattr(grading._judge, "_ask", sent)
    assert grade(r"\boxed{1}", "2") is Verdict.WRONG
    grading._judge._end()


@pytest.mark.filterwarnings("error")
def test_a_judge_killed_from_outside_is_replaced():
    grade(r"\boxed{1}", "2")
    grading._judge._process.kill()
    grading._judge._process.wait()
    assert grade(r"\boxed{0.5}", "1/2") is Verdict.RIGHT


def test_the_judge_ends_with_its_caller():
    script = r"""
from kvretain.evidence import grade, grading
grade(r"\boxed{1}", "2")
print(grading._judge._process.pid, flush=True)
import os
os._exit(1)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=_with_source())
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _runs(pid):
        time.sleep(0.05)
    assert not _runs(pid)


def _with_source():
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.is_file() and status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_without_math_verify_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(grading, "_judge", grading._Judge())
    monkeypatch.setattr(grading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "kvretain\[study\]"'):
        grade(r"\boxed{1}", "2")


def test_a_judge_that_cannot_start_is_an_error_and_no_verdict(monkeypatch):
    monkeypatch.setattr(grading, "_judge", grading._Judge())
    monkeypatch.setattr(grading.sys, "executable", "/bin/false" if os.path.exists("/bin/false") else "/usr/bin/false")
    with pytest.raises(ImportError, match="its process did not start: no sign of life"):
        grade(r"\boxed{1}", "2")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None, "5"), TypeError, "text must be a string, not NoneType"),
        ((r"\boxed{5}", 5), TypeError, "truth must be a string, not int"),
        ((r"\boxed{5}", " "), ValueError, "truth is empty"),
    ],
)
def test_bad_input(arguments, error, message):
    for judged in (grade, grade_exact):
        with pytest.raises(error, match=message):
            judged(*arguments)
    with pytest.raises(ValueError, match="seconds must be positive, not 0"):
        grade(r"\boxed{5}", "5", seconds=0)


def test_names_are_functions_even_after_their_modules_were_imported():
    import kvretain.evidence.grading
    import kvretain.evidence.splitting  # noqa: F401
    from kvretain.evidence import grade, split

    assert callable(grade) and callable(split)


def test_the_protocol_is_an_attribute_of_the_package_and_costs_torch_only():
    script = """
import sys, kvretain
assert "kvretain.evidence" not in sys.modules
kvretain.evidence.split, kvretain.evidence.grade, kvretain.evidence.paired_cluster_bootstrap
assert not {"transformers", "sympy", "math_verify", "scipy", "datasets", "pyarrow"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=_with_source())
    assert done.returncode == 0, done.stderr


def test_the_examples():
    module = importlib.import_module("kvretain.evidence.grading")
    assert doctest.testmod(module) == (0, 4)
