import random

import pytest

from kvretain.evidence.measure import Measurement
from kvretain.evidence.report import base_of, markdown, publish, summarise, values_of
from kvretain.evidence.significance import paired_cluster_bootstrap
from kvretain.evidence.stats import bootstrap_mean


def row(index, policy, ratio=0.5, *, task="single", nll=1.0, exact=None, kl=None):
    return Measurement(task, index, policy, ratio, 100, 50.0, nll, kl, exact, exact, "", 1.0, 0.1)


ROWS = [
    *(row(i, "full", None, nll=0.1 * i, exact=True) for i in range(10)),
    *(row(i, "snapkv@layer", nll=1 + 0.1 * i, exact=i < 5) for i in range(10)),
    *(row(i, "snapkv+hub@layer", nll=0.5 + 0.2 * i, exact=i < 6) for i in range(8)),
    *(row(i, "knorm", task="continuation", kl=0.1 * i) for i in range(10)),
]


def test_cells_and_paired_differences():
    summary = summarise(ROWS)
    cells = {(cell["task"], cell["policy"]): cell for cell in summary["cells"]}
    assert cells["single", "full"]["exact"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 10}
    assert cells["single", "snapkv@layer"]["exact"]["mean"] == 0.5
    assert cells["single", "snapkv@layer"]["kl"] is None and cells["continuation", "knorm"]["exact"] is None
    assert cells["continuation", "knorm"]["kl"]["mean"] == pytest.approx(0.45)
    (difference,) = summary["differences"]
    assert (difference["policy"], difference["base"], difference["n"]) == ("snapkv+hub@layer", "snapkv@layer", 8)
    expected = bootstrap_mean([0.5 + 0.2 * i - (1 + 0.1 * i) for i in range(8)])
    assert difference["nll"]["mean"] == pytest.approx(expected.mean)
    assert (difference["nll"]["low"], difference["nll"]["high"]) == pytest.approx((expected.low, expected.high))
    assert difference["exact"]["mean"] == pytest.approx(1 / 8)


def test_markdown_shows_all_of_it():
    page = markdown(summarise(ROWS), {"model": "tiny", "command": "kvretain eval"})
    for text in ("- model: tiny", "## single", "## continuation", "| 0 | `full` | 10 | 50 | 100 [100, 100] |", "KL"):
        assert text in page
    assert "| policy | n | 0.5 |" in page and "| `snapkv+hub@layer` | 8 | +12 [+0, +38] |" in page
    assert summarise(ROWS) == summarise(ROWS) != summarise(ROWS, seed=1)


def compared(effects, examples=40, ratios=(0.5, 0.9), seed=0):
    """Rows of a base and of one refined policy per effect on its NLL, with noise of 1."""
    draw, rows = random.Random(seed), []
    for ratio in ratios:
        for i in range(examples):
            base = draw.gauss(3, 1)
            rows.append(row(i, "knorm", ratio, nll=base, exact=i % 2 == 0))
            for at, effect in enumerate(effects):
                refined = f"knorm+hub(kernel={2 * at + 3})"
                nll = base + effect + draw.gauss(0, 1)
                rows.append(row(i, refined, ratio, nll=nll, exact=i % 2 == 0))
    return rows


def test_comparisons_are_counted_and_marked():
    summary = summarise(compared([2.0, 0.0, 0.0]))
    found = summary["comparisons"]
    assert found["number"] == 2 * 2 * 3  # metrics, ratios, policies
    assert found["after_bonferroni"] == 2 <= found["excluding_0"]
    real = [row for row in summary["differences"] if row["policy"] == "knorm+hub(kernel=3)"]
    assert {row["ratio"] for row in real} == {0.5, 0.9} and all(row["p"]["nll"]["corrected"] < 0.01 for row in real)
    for row in summary["differences"]:
        assert row["p"].keys() == {"exact", "nll"} and row["p"]["exact"] == {"alone": 1.0, "corrected": 1.0}
        assert row["p"]["nll"]["corrected"] == pytest.approx(min(1, 12 * row["p"]["nll"]["alone"]))
    page = markdown(summary, {})
    (line,) = [line for line in page.splitlines() if line.startswith("| `knorm+hub(kernel=3)` | 40 | **+")]
    assert line.count("\\* [+") == 2 and line.count("**") == 4
    assert page.count("**+") + page.count("**-") == 2
    assert "hold 12 differences." in page and "about 1 would have" in page
    assert "correction 2 differ from 0 (**bold**: p-value of a paired sign bootstrap below 0.05/12)" in page


def test_p_values_are_those_of_the_paired_comparison():
    rows = compared([0.3], ratios=(0.5,))
    (difference,) = summarise(rows, seed=3, resamples=50_000)["differences"]
    base, refined = ([r.nll for r in rows if (r.policy == "knorm") == plain] for plain in (True, False))
    found = paired_cluster_bootstrap(base, refined, range(len(base)), resamples=50_000)
    assert difference["nll"]["mean"] == pytest.approx(found.difference)
    assert difference["p"]["nll"]["alone"] == pytest.approx(found.p_value, abs=0.01)


def test_a_few_right_answers_more_show_no_more_than_their_signs():
    """Five of 100 examples differ, all in one direction: the interval excludes 0, and the exact p-value is 2 / 2**5."""
    rows = [row(i, "knorm", exact=False) for i in range(100)]
    rows += [row(i, "knorm+hub", exact=i < 5) for i in range(100)]
    (difference,) = summarise(rows)["differences"]
    assert difference["exact"]["low"] > 0
    assert difference["p"]["exact"]["alone"] == pytest.approx(0.0625, abs=0.01)


def test_without_an_effect_hardly_anything_survives_the_correction():
    """10 evaluations of 20 differences each: a share of about 0.05 of them may have a false one."""
    false = excluding = 0
    for seed in range(10):
        rows = compared([0.0] * 10, seed=seed, ratios=(0.5,))
        found = summarise(rows, seed=seed, resamples=1000)["comparisons"]
        false += found["after_bonferroni"] > 0
        excluding += found["excluding_0"]
    assert false <= 2
    assert excluding > false  # uncorrected, some of 100 NLL differences do exclude 0


def test_resamples_suffice_for_the_correction():
    """With many comparisons the smallest p-value that resampling can give still lies below the threshold."""
    summary = summarise(compared([3.0] * 12, ratios=(0.2, 0.4, 0.6, 0.8)), resamples=1000)
    found = summary["comparisons"]
    assert found["number"] == 96 and 1 / (found["resamples"] + 1) < 0.05 / 96
    assert found["after_bonferroni"] == 48


def test_a_task_without_refiners_has_no_comparisons():
    page = markdown(summarise([row(i, "knorm") for i in range(5)]), {})
    assert "refiner" not in page and "Bonferroni" not in page


def test_ratios_that_a_policy_lacks_are_left_open():
    rows = compared([1.0], ratios=(0.5, 0.9))
    rows = [r for r in rows if not (r.policy != "knorm" and r.ratio == 0.9 and r.index >= 30)]
    rows += [r for r in compared([1.0, 1.0], ratios=(0.5,)) if r.policy == "knorm+hub(kernel=5)"]
    page = markdown(summarise(rows), {})
    assert "| `knorm+hub(kernel=3)` | 30 to 40 | " in page
    assert any(
        line.startswith("| `knorm+hub(kernel=5)` | 40 |") and line.endswith(" – |") for line in page.splitlines()
    )


def test_publishing_writes_the_same_again(tmp_path):
    pytest.importorskip("pyarrow")
    from kvretain.evidence.store import Store

    store = Store(tmp_path, {"seed": 5, "model": "tiny"})
    store.begin({"command": "kvretain eval"})
    for index in range(10):
        store.add([r for r in ROWS if r.index == index and r.task == "single"])
    summary, page, files = publish(store, {"command": "kvretain eval"})
    assert summary["seed"] == 5 and page == markdown(summary, {**store.identity, "command": "kvretain eval"})
    before = {path.name: path.read_bytes() for path in files}
    again, run = Store.existing(tmp_path)
    assert (again.identity, run) == (store.identity, {"command": "kvretain eval"})
    publish(again, {"command": run["command"]})
    assert {path.name: path.read_bytes() for path in files} == before


def test_a_page_names_every_command_that_measured_into_its_folder(tmp_path):
    pytest.importorskip("pyarrow")
    from kvretain.evidence.store import Store

    for command in ("kvretain eval --n 5", "kvretain eval --n 10", "kvretain eval --n 5"):
        store = Store(tmp_path, {"seed": 5})
        store.begin({"command": command})
        store.add([r for r in ROWS if r.index == 0 and r.task == "single"])
    assert store.earlier == ["kvretain eval --n 10"]
    again, run = Store.existing(tmp_path)
    assert (again.earlier, run) == (["kvretain eval --n 10"], {"command": "kvretain eval --n 5"})
    _, page, _ = publish(again, run)
    assert "- earlier commands: kvretain eval --n 10\n- command: kvretain eval --n 5\n" in page


@pytest.mark.parametrize(
    ("policy", "base"),
    [
        ("snapkv+hub", "snapkv"),
        ("snapkv(window=4)+smd@model", "snapkv(window=4)@model"),
        ("knorm", None),
        ("keydiff/diverse(weight=2)@model", "keydiff@model"),
        ("keydiff+hub/diverse", "keydiff/diverse"),
        ("full", None),
    ],
)
def test_base_of(policy, base):
    assert base_of(policy) == base


def streamed(index, policy, budget=64, *, mean=60.0, kl=None, exact=None):
    """A row of a streamed task; ``kl`` one list of tokens a passage, for decoding."""
    task = "stream-single" if kl is None else "decode"
    mean_kl = None if kl is None else sum(map(sum, kl)) / sum(map(len, kl))
    return Measurement(
        task, index, policy, None, 100, 50.0, 1.0, mean_kl, exact, exact, None, 0.0, 0.1, budget, mean, 80.0, kl, kl
    )


def test_passages_are_the_blocks_of_decoding():
    rows = [streamed(i, "knorm", kl=[[i, i + 1.0], [0.0, 1.0], [2.0, 2.0]]) for i in range(4)]
    assert values_of(rows[3], "kl") == values_of(rows[3], "nll") == [3.5, 0.5, 2.0]
    assert (values_of(rows[3], "exact"), values_of(row(1, "knorm", nll=7), "nll")) == ([], [7.0])
    (cell,) = summarise(rows)["cells"]
    expected = bootstrap_mean([0.5, 0.5, 2, 1.5, 0.5, 2, 2.5, 0.5, 2, 3.5, 0.5, 2])
    assert cell["kl"] == pytest.approx({"mean": expected.mean, "low": expected.low, "high": expected.high, "n": 12})
    assert cell["n"] == 4


def correlated(draw, passages, length, memory=0.98, spread=0.3):
    """Tokens with a mean of 0: a level for each passage, and around it what follows the token before."""
    made = []
    for _ in range(passages):
        level, now, tokens = draw.gauss(0, spread), draw.gauss(0, 1), []
        for _ in range(length):
            now = memory * now + (1 - memory**2) ** 0.5 * draw.gauss(0, 1)
            tokens.append(level + now)
        made.append(tokens)
    return made


def test_intervals_of_dependent_tokens_cover_as_often_as_they_say():
    hits = naive = 0
    for seed in range(200):
        draw = random.Random(seed)
        rows = [streamed(i, "knorm", kl=correlated(draw, 8, 60)) for i in range(3)]
        (cell,) = summarise(rows, seed=seed, resamples=400)["cells"]
        hits += cell["kl"]["low"] <= 0 <= cell["kl"]["high"]
        every = [token for r in rows for passage in r.token_kl for token in passage]
        alone = bootstrap_mean(every, seed=seed, resamples=400)
        naive += alone.low <= 0 <= alone.high
    assert 0.88 < hits / 200 < 0.99
    assert naive / 200 < 0.5


def test_differences_are_paired_by_passage():
    draw = random.Random(0)
    rows = []
    for i in range(3):
        plain = correlated(draw, 8, 20, spread=3)
        rows.append(streamed(i, "keydiff@model", kl=plain))
        better = [[token - 0.1 + draw.gauss(0, 0.05) for token in passage] for passage in plain]
        rows.append(streamed(i, "keydiff/diverse@model", kl=better))
        rows.append(streamed(i, "keydiff/diverse@model", 128, kl=better))
    (difference,) = summarise(rows)["differences"]
    assert (difference["base"], difference["budget"], difference["kl"]["n"]) == ("keydiff@model", 64, 24)
    assert difference["kl"]["mean"] == pytest.approx(-0.1, abs=0.02)
    assert difference["kl"]["high"] < -0.08 and difference["p"]["kl"]["corrected"] < 0.01
    page = markdown(summarise(rows), {})
    assert "| policy | n | all but 64 |" in page and "| `keydiff/diverse@model` | 24 | **-0.1" in page


def test_a_mean_cache_off_the_others_is_flagged():
    means = {"random": 60.0, "streaming": 60.1, "knorm": 60.2, "h2o": 60.9}
    rows = [streamed(i, policy, mean=mean, exact=True) for policy, mean in means.items() for i in range(3)]
    rows += [streamed(i, "full", None, mean=300.0, exact=True) for i in range(3)]
    rows += [streamed(i, "h2o", 128, mean=110.0, exact=True) for i in range(3)]
    cells = {(cell["policy"], cell["budget"]): cell for cell in summarise(rows)["cells"]}
    assert [key for key, cell in cells.items() if cell.get("uneven")] == [("h2o", 64)]
    page = markdown(summarise(rows), {})
    assert "| all but 64 | `h2o` | 3 | 60.9 ≠ (80) |" in page and page.count("≠") == 2
    assert "| 0 | `full` | 3 | 300.0 (80) | 100" in page and "| all but 128 | `h2o` | 3 | 110.0 (80) |" in page
    assert "≠" not in markdown(summarise([r for r in rows if r.policy != "h2o"]), {})


def test_policies_that_differ_in_a_number_stand_in_its_order():
    weights = ("/diverse(weight=2.0)", "", "/diverse(weight=0.1)", "/diverse", "/diverse(weight=10.0)")
    rows = [streamed(0, "knorm", budget, exact=True) for budget in (128, 64)]
    rows += [streamed(0, f"keydiff{w}@model", budget, exact=True) for w in weights for budget in (64, 128)]
    rows += [streamed(0, "full", None, exact=True)]
    lines = [line.split(" | ") for line in markdown(summarise(rows), {}).splitlines() if line.startswith("| ")]
    table = [(line[0][2:], line[1]) for line in lines if line[1].startswith("`")]
    order = ["`knorm`", *(f"`keydiff{weights[at]}@model`" for at in (2, 3, 0, 4, 1))]
    assert table == [("0", "`full`"), *(("all but 64", p) for p in order), *(("all but 128", p) for p in order)]
    paired = [line[0] for line in lines if line[0].startswith("| `keydiff")]
    assert paired == [f"| `keydiff{weights[at]}@model`" for at in (2, 3, 0, 4)] * 2
