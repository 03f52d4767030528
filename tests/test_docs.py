"""README and docs: their Python runs, their commands and links exist, and both languages say the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvretain import Policy, presets

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES if "results" not in page.parts}


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


WITH_A_MODEL = [page for page, text in TEXTS.items() if any("load_model(" in block for block in blocks(text))]
ALONE = [
    pytest.param(block, id=f"{page}-{number}")
    for page, text in TEXTS.items()
    for number, block in enumerate(blocks(text))
    if "load_model(" not in block and re.match(r"(from|import) ", block) and "model(" not in block
]


def run(block: str, names: dict) -> None:
    # Dataclasses look for a module of that name.
    exec(compile(block, "docs", "exec"), names)


@pytest.fixture(autouse=True)
def _registries_as_before(monkeypatch):
    """Examples register components of their own."""
    from kvretain import mergers, refiners, scorers, selectors

    for registry in (mergers, refiners, scorers, selectors):
        monkeypatch.setattr(registry, "_items", dict(registry._items))


@pytest.mark.parametrize("block", ALONE)
def test_python_without_a_model(block):
    run(block, {"__name__": "builtins"})


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_A_MODEL)
def test_python_on_the_embedded_model(page, capsys):
    """All blocks of a page, one after the other."""
    names = {"__name__": "builtins"}
    for block in blocks(TEXTS[page]):
        run(block, names)
    if page.startswith("README"):
        cache = names["cache"]
        assert cache.trace.mean_length < cache.get_seq_length() / 2
        assert str(cache.nbytes) in capsys.readouterr().out


def test_there_is_python_of_both_kinds():
    assert {"README.md", "docs/index.md", "docs/add-a-scorer.md"} <= set(WITH_A_MODEL) and len(ALONE) >= 6


def commands() -> list[tuple[str, list[str]]]:
    found = []
    for page, text in TEXTS.items():
        joined = re.sub(r"\\\n\s*", " ", text)
        for line in re.findall(r"^ {4}(kvretain .*)$", joined, flags=re.MULTILINE):
            words = shlex.split(line, comments=True)
            found.append((page, words[1:]))
    return found


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: str(value)[:60])
def test_commands_and_their_options_exist(page, words):
    import typer

    import kvretain.commands  # noqa: F401
    from kvretain.commands.shared import app

    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    assert not getattr(command, "commands", {}), f"{words[:1]} is no command"
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert not {word.partition("=")[0] for word in words if word.startswith("--")} - options


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", TEXTS[page]):
        if not target.startswith(("http:", "https:")):
            assert (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_table_of_policies_is_the_presets(page):
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (.*?) ?\| ?(.*?) ?\|$", TEXTS[page], flags=re.MULTILINE)
    expected = [
        (p.name, p.text, ", ".join(sorted(Policy.parse(p.text).needs)) or "–", p.paper) for p in presets.values()
    ]
    assert rows == expected


@pytest.mark.parametrize(("one", "other"), [("README.md", "README.zh-CN.md"), ("docs/index.md", "docs/zh/index.md")])
def test_both_languages_have_the_same_python(one, other):
    assert blocks(TEXTS[one]) == blocks(TEXTS[other])


def test_lossy_is_said_in_the_first_lines():
    assert "lossy" in "\n".join(TEXTS["README.md"].splitlines()[:12])
    assert "有损" in "\n".join(TEXTS["README.zh-CN.md"].splitlines()[:12])
