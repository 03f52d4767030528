"""The runner end to end on a tiny model: rows, resuming after a kill, processes, and what a folder refuses."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from checkpoint import save_tiny_checkpoint

from kvretain.evidence import runner
from kvretain.evidence.measure import FULL, Case
from kvretain.evidence.store import Store

pytest.importorskip("pyarrow")
from pyarrow import parquet

CASES = runner.cases_of(["knorm", "knorm+hub@layer"], [0.5])
TASKS = ("single", "continuation")


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    checkpoint = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return runner.Setting(str(checkpoint), length=300, following=16)


def work(setting, store, tasks=TASKS, indices=range(2), cases=CASES, **options):
    return list(runner.run(setting, store, runner.plan(store, tasks, indices, cases), **options))


def timeless(rows):
    return [dataclasses.replace(row, seconds=0, prefill_seconds=0) for row in rows]


@pytest.fixture(scope="module")
def whole(setting, tmp_path_factory):
    """An evaluation that ran through."""
    store = Store(tmp_path_factory.mktemp("out") / "whole", setting.identity())
    store.begin({})
    work(setting, store)
    return store


def test_full_random_and_streaming_always_come_along():
    assert [FULL] + [Case(p, 0.5) for p in ("random", "streaming", "knorm", "knorm+hub@layer")] == CASES
    assert len(runner.cases_of(["random", "full", "knorm", "knorm@head"], [0.5, 0.5, 0.9])) == 1 + 3 * 2


def test_one_row_per_example_policy_and_ratio(whole):
    rows = whole.rows()
    assert len({(row.task, row.index, row.policy, row.ratio) for row in rows}) == len(rows) == 2 * 2 * len(CASES)
    assert {row.kl is None for row in rows if row.task == "single"} == {True}
    assert all(row.exact is None and row.kl is not None for row in rows if row.task == "continuation")
    for row in rows:
        assert row.kept == (
            row.context_tokens if row.policy == "full" else row.context_tokens - row.context_tokens // 2
        )


def test_the_same_setting_gives_the_same_rows_in_two_processes(whole, setting, tmp_path):
    store = Store(tmp_path / "two", setting.identity())
    ticks = []
    done = work(setting, store, workers=2, report=lambda: ticks.append(1))
    assert len(done) == 4
    assert timeless(store.rows()) == timeless(whole.rows())


def test_what_is_there_is_not_done_again_and_more_can_be_added(whole, setting, tmp_path):
    store = Store(tmp_path / "more", setting.identity())
    store.begin({})
    work(setting, store, indices=range(1), cases=CASES[:3])
    assert not runner.plan(store, TASKS, range(1), CASES[:3])
    todo = runner.plan(Store(tmp_path / "more", setting.identity()), TASKS, range(2), CASES)
    assert [(unit.task, unit.index, len(unit.cases)) for unit in todo] == [
        ("single", 0, 2), ("continuation", 0, 2), ("single", 1, 5), ("continuation", 1, 5),
    ]  # fmt: skip
    work(setting, store)
    assert sorted(map(str, timeless(store.rows()))) == sorted(map(str, timeless(whole.rows())))


STREAMED = ("stream-single", "decode")
BUDGETS = runner.cases_of(["knorm"], budgets=[32, 64])


@pytest.fixture(scope="module")
def streaming(setting):
    return dataclasses.replace(setting, length=200, passages=2, chunk=32, every=8)


def test_streamed_tasks_at_budgets(streaming, tmp_path):
    store = Store(tmp_path / "out", streaming.identity())
    work(streaming, store, tasks=STREAMED, cases=[*BUDGETS, Case("knorm", 0.5)])
    rows = store.rows()
    assert len(rows) == 2 * 2 * (1 + 2 * 3 + 1)
    for row in rows:
        if row.budget:
            assert row.kept in range(row.budget, row.budget + 8 + 1) and row.mean_cache < row.budget + 8
        assert (row.token_kl is None) == (row.task != "decode") == (row.kl is None)
    lists = [row.token_kl for row in rows if row.task == "decode"]
    assert {(len(kl), *map(len, kl)) for kl in lists} == {(2, 16, 16)}
    for task in STREAMED:
        assert len({(row.index, row.mean_cache) for row in rows if row.task == task and row.budget == 32}) == 2


def test_a_budget_also_compresses_a_context_once(setting, tmp_path):
    store = Store(tmp_path / "out", setting.identity())
    work(setting, store, indices=range(1), cases=BUDGETS)
    assert {(row.policy, row.kept) for row in store.rows() if row.budget} == {
        (policy, budget) for policy in ("random", "streaming", "knorm") for budget in (32, 64)
    }


def test_a_streamed_needle_is_that_of_the_plain_task(streaming):
    bench = runner._bench(streaming)
    plain, streamed = bench.example("single", 5), bench.example("stream-single", 5)
    assert streamed == dataclasses.replace(plain, task="stream-single")


def test_streamed_rows_are_kept_one_by_one(streaming, tmp_path, monkeypatch):
    store = Store(tmp_path / "out", streaming.identity())
    seen, measure = [], runner.measure_streamed

    def dying(*arguments, **options):
        for row in measure(*arguments, **options):
            yield row
            seen.append(row)
            if len(seen) == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(runner, "measure_streamed", dying)
    with pytest.raises(KeyboardInterrupt):
        work(streaming, store, tasks=["decode"], indices=range(1), cases=BUDGETS)
    assert [row.case for row in store.rows()] == BUDGETS[:3]
    monkeypatch.undo()
    (unit,) = runner.plan(store, ["decode"], range(1), BUDGETS)
    assert list(unit.cases) == BUDGETS[3:]
    work(streaming, store, tasks=["decode"], indices=range(1), cases=BUDGETS)
    whole = Store(tmp_path / "whole", streaming.identity())
    work(streaming, whole, tasks=["decode"], indices=range(1), cases=BUDGETS)
    assert timeless(store.rows()) == timeless(whole.rows())


def test_rows_of_before_budgets_are_read(whole, setting, tmp_path):
    """A folder whose files lack the columns that came later."""
    store = Store(tmp_path / "old", setting.identity())
    (tmp_path / "old" / "parts").mkdir(parents=True)
    for part in (whole.folder / "parts").iterdir():
        table = parquet.read_table(part)
        new = ["budget", "mean_cache", "peak_cache", "token_nll", "token_kl", "score"]
        parquet.write_table(table.drop_columns(new), tmp_path / "old" / "parts" / part.name)
    assert store.rows() == whole.rows() and store.rows()[0].budget is None
    assert not runner.plan(store, TASKS, range(2), CASES)
    store.add(whole.rows()[:1])
    assert store.rows() == whole.rows()


def test_the_table_carries_its_origin(whole):
    files = whole.finish({"command": "kvretain eval"}, {"cells": []}, "# page")
    assert [path.name for path in files] == ["rows.parquet", "summary.json", "summary.md"]
    table = parquet.read_table(files[0])
    assert table.num_rows == len(whole.rows())
    about = json.loads(table.schema.metadata[b"kvretain"])
    assert about["command"] == "kvretain eval"
    assert {"torch", "transformers", "kvretain", "model", "seed"} <= about["identity"].keys()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_goes_on_where_it_was(whole, setting, tmp_path, workers):
    folder = tmp_path / "killed"
    command = [
        sys.executable, "-m", "kvretain.cli", "eval", "--model", setting.model, "--tasks", "single,continuation",
        "--policies", "knorm,knorm+hub@layer", "--ratios", "0.5", "--length", "300", "--following", "16", "--out",
        str(folder), "--workers", str(workers),
    ]  # fmt: skip
    process = subprocess.Popen([*command, "--n", "500"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len(list(folder.glob("parts/*.parquet"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    if workers == 2:  # orphans end themselves
        before = -1
        while before != (before := len(list(folder.glob("parts/*.parquet")))):
            time.sleep(2)
    killed = {path.name: path.stat().st_mtime_ns for path in folder.glob("parts/*.parquet")}
    assert 2 <= len(killed) < 1000
    result = subprocess.run([*command, "--n", "2", "--json"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    again = {path.name: path.stat().st_mtime_ns for path in folder.glob("parts/*.parquet")}
    assert killed.items() <= again.items()
    store = Store(folder, setting.identity())
    rows = [row for row in store.rows() if row.index < 2]
    assert timeless(rows) == timeless(whole.rows())
    assert (
        json.loads(result.stdout)["rows"] == len(store.rows()) == parquet.read_table(folder / "rows.parquet").num_rows
    )


def test_another_setting_is_refused(whole, setting):
    other = dataclasses.replace(setting, length=400, seed=7)
    with pytest.raises(ValueError, match=r"another length \(300 there, 400 now\), seed \(0 there, 7 now\)"):
        Store(whole.folder, other.identity())


def test_a_folder_of_something_else_is_refused(setting, tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="is not empty and holds no evaluation"):
        Store(tmp_path, setting.identity())
    with pytest.raises(ValueError, match="is a file"):
        Store(tmp_path / "thesis.txt", setting.identity())


def test_a_damaged_part_is_named(setting, tmp_path):
    (tmp_path / "damaged" / "parts").mkdir(parents=True)
    store = Store(tmp_path / "damaged", setting.identity())
    (tmp_path / "damaged" / "parts" / "single-00000.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"single-00000.parquet cannot be read .*; delete it"):
        runner.plan(store, ["single"], range(1), CASES)


def test_an_error_in_a_process_reaches_the_caller(setting, tmp_path):
    short = dataclasses.replace(setting, length=100_000)
    with pytest.raises(ValueError, match="too few for contexts of 99,"):
        work(short, Store(tmp_path / "short", short.identity()), tasks=["single"], workers=2)
