# Everything a fresh machine with Python 3.11 needs; each target makes .venv where it is missing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check -c constraints.txt

.PHONY: install demo test test-slow lint bench clean

install: .venv/.base

.venv/.base: pyproject.toml constraints.txt
	@echo "installing nereus into .venv (about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) -q --progress-bar on torch==2.13.0
	@$(PIP) -q --progress-bar on -e .
	@touch $@

.venv/.dev: .venv/.base
	@$(PIP) -q -e '.[dev,sim,bench]'
	@touch $@

demo: .venv/.base
	@$(BIN)/nereus train recipes/quickstart.yaml run.overwrite=true

test: .venv/.dev
	$(BIN)/pytest

test-slow: .venv/.dev
	$(BIN)/pytest -m slow --timeout 1800

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.dev
	for name in generate reshard planner costmodel dag coordination; do $(BIN)/nereus bench $$name || exit 1; done

clean:
	rm -rf .venv .cache runs
