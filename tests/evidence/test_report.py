import pytest

from kvretain.evidence.measure import Measurement
from kvretain.evidence.report import base_of, markdown, summarise
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
    assert "| 0.5 | `snapkv+hub@layer` | 8 | +12 [" in page
    assert summarise(ROWS) == summarise(ROWS) != summarise(ROWS, seed=1)


@pytest.mark.parametrize(
    ("policy", "base"),
    [("snapkv+hub", "snapkv"), ("snapkv(window=4)+smd@model", "snapkv(window=4)@model"), ("knorm", None)],
)
def test_base_of(policy, base):
    assert base_of(policy) == base
