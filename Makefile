# `make` lists the targets. Each sets up what it needs; torch's build and the package index are pip's own settings.

PYTHON ?= python3
BIN := .venv/bin
BIN_OLD := .venv-5.17/bin
# One thread is fastest for the small models of the demo and the tests.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-517 test-matrix test-kvpress test-lm-eval lint types docs dist bench clean

help:
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: .venv/installed ## hide a fact in a chapter, remove 80 and 90 % of the cache, ask for the fact
	$(BIN)/kvretain demo

test: .venv/installed ## the fast tests
	$(BIN)/python -m pytest -n auto

test-slow: .venv/installed ## the tests on the real embedded model (downloads it once)
	$(BIN)/python -m pytest -m slow

test-517: .venv-5.17/installed ## the cache tests on transformers 5.17, the oldest that is supported
	$(BIN_OLD)/python -m pytest -n auto tests/cache

test-matrix: test-517 .venv/installed ## the cache tests on the oldest and the newest transformers
	$(BIN)/python -m pytest -n auto tests/cache

test-kvpress: .venv-kvpress/installed ## our presses in the released kvpress, beside its own transformers
	.venv-kvpress/bin/python -m pytest tests/integrations/test_kvpress_presses.py tests/cache/test_versions.py

test-lm-eval: .venv-lm-eval/installed ## our model in the released lm-evaluation-harness; metrics against their packages
	.venv-lm-eval/bin/python -m pytest tests/integrations/test_lm_eval.py tests/tasks/test_metrics.py tests/tasks/test_benchmarks.py

lint: .venv/installed ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed ## mypy
	$(BIN)/mypy

docs: .venv/installed ## the site, into site/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: .venv/installed ## build a release and try its wheel in an environment of its own
	rm -rf dist .venv-dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build --outdir dist . >/dev/null
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch "$$(ls dist/*.whl)[cli]"
	cd dist && ../.venv-dist/bin/kvretain policies --json >/dev/null && ../.venv-dist/bin/python -c "import kvretain, sys; \
		assert 'transformers' not in sys.modules; print('kvretain', kvretain.__version__, 'installs from its wheel')"
	rm -rf .venv-dist

bench: .venv/installed ## the benchmarks, one after the other
	@set -e; for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

clean: ## remove the environments and what tools left behind
	rm -rf .venv .venv-5.17 .venv-kvpress .venv-lm-eval .pytest_cache .hypothesis .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml constraints.txt
	$(call install,.venv,constraints.txt)

.venv-5.17/installed: pyproject.toml constraints.txt
	mkdir -p .venv-5.17
	sed 's/^transformers==.*/transformers==5.17.*/' constraints.txt > .venv-5.17/constraints.txt
	$(call install,.venv-5.17,.venv-5.17/constraints.txt)

# PyTorch first, then pinned: what kvpress requires must not replace it.
.venv-kvpress/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-kvpress
	grep -E '^(torch|pytest|pytest-timeout)==' constraints.txt > .venv-kvpress/constraints.txt
	.venv-kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-kvpress/constraints.txt torch
	.venv-kvpress/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-kvpress/constraints.txt \
		kvpress pytest pytest-timeout -e '.[transformers]'
	@touch .venv-kvpress/installed

# PyTorch first, then pinned, as above.
.venv-lm-eval/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-lm-eval/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		rouge fuzzywuzzy pytest pytest-timeout -e '.[lm-eval,longbench,hub]'
	@touch .venv-lm-eval/installed

# $(call install,<environment>,<constraints>)
define install
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"kvretain needs Python 3.11 or newer, this is {v[0]}.{v[1]}: make PYTHON=python3.11 ...")'
	@echo 'setting up $(1), once; with torch to download this takes minutes'
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check -c $(2) torch -e '.[dev]'
	@touch $(1)/installed
endef
