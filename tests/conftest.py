"""Fixtures shared by all tests: tiny random models by name, one torch thread; and the oracle's count in the summary."""

from __future__ import annotations

import pytest

ORACLE_CELL = "test_oracle.py::test_cell["


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    from cache.models import one_thread

    with one_thread():
        yield


def _fixture_for(name: str):
    @pytest.fixture(scope="session", name=name)
    def tiny():
        from cache.models import model

        return model(name)

    tiny.__doc__ = f"The tiny random {name} of ``cache.models``, float32; shared, so a test must leave it as it was."
    return tiny


llama = _fixture_for("llama")
qwen2 = _fixture_for("qwen2")
qwen3 = _fixture_for("qwen3")
mistral = _fixture_for("mistral")
phi3 = _fixture_for("phi3")
gemma2 = _fixture_for("gemma2")
gemma3 = _fixture_for("gemma3")
gpt_oss = _fixture_for("gpt_oss")


def pytest_terminal_summary(terminalreporter) -> None:
    outcomes = {
        outcome: sum(ORACLE_CELL in getattr(report, "nodeid", "") for report in terminalreporter.stats.get(outcome, []))
        for outcome in ("passed", "failed", "skipped")
    }
    if any(outcomes.values()):
        rest = "".join(f", {count} {outcome}" for outcome, count in outcomes.items() if count and outcome != "passed")
        terminalreporter.write_line(f"oracle: {outcomes['passed']} cells passed{rest}")
