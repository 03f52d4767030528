"""README: its Python runs, and its table of policies is the presets."""

import re
from pathlib import Path

import pytest

from kvretain import Policy, presets

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "load_model(" not in block])
def test_python_without_a_model(block):
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in BLOCKS if "load_model(" in block])
def test_python_on_the_embedded_model(block, capsys):
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    cache = names["cache"]
    assert cache.trace.mean_length < cache.get_seq_length() / 2
    assert str(cache.nbytes) in capsys.readouterr().out


def test_there_is_python_of_both_kinds():
    assert len(BLOCKS) == 2


def test_the_table_of_policies_is_the_presets():
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (.*?) ?\| ?(.*?) ?\|$", README, flags=re.MULTILINE)
    expected = [
        (p.name, p.text, ", ".join(sorted(Policy.parse(p.text).needs)) or "–", p.paper) for p in presets.values()
    ]
    assert rows == expected


def test_lossy_is_said_in_the_first_lines():
    assert "lossy" in "\n".join(README.splitlines()[:10])
