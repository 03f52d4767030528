"""kvretain beside an old transformers: it imports, works on tensors, and the cache says what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch, kvretain, kvretain.integrations.kvpress
assert kvretain.hub_refine(torch.rand(1, 2, 30), 0.5).shape == (1, 2, 30)
assert kvretain.Policy.parse("snapkv+hub@layer").scope == "layer"
assert "transformers" not in sys.modules
for touch in ("kvretain.RetentionCache", "kvretain.CompiledDecoding", "import kvretain.cache.support"):
    try:
        exec(touch)
    except ImportError as error:
        print(error)
"""


@pytest.mark.parametrize("version", ["4.45.2", "5.16.1"])
def test_an_old_transformers_is_named_before_anything_is_taken_from_it(version, tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    said = run.stdout.splitlines()
    assert len(said) == 3
    assert all(line.startswith(f"RetentionCache needs transformers>=5.17, found {version}: pip in") for line in said)


@pytest.mark.parametrize("version", ["4.56.0", "5.2.0", "5.17.0", "5.99"])
def test_the_metadata_allow_kvpress_s_transformers_and_ours(version):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [Requirement(text) for name in ("transformers", "cli") for text in extras[name]]
    found = [requirement for requirement in wanted if requirement.name == "transformers"]
    assert found and all(requirement.specifier.contains(version) for requirement in found)
