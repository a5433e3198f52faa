# Each target makes the virtual environment that it needs; nothing has to be installed before.
.DEFAULT_GOAL := help
.PHONY: help demo test check bench fuzz gpu docs matrix report-check clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 - /p' Makefile | sed 's/ - /\t/'

# Written last, so that an installation that broke off is taken up again. pyproject.toml has the pins.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tied needs Python 3.11 or newer")'
	@echo "installing the pinned versions into $(VENV) (minutes, the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## train a tied autoencoder on real digits, and draw what it does
	$(BIN)/python examples/digits.py

test: $(INSTALLED) ## the tests, two at a time
	$(BIN)/python -m pytest -n 2

check: $(INSTALLED) docs ## lint, format, types, import direction, README examples, the docs' links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py tests/test_docs_examples.py -k 'not docs/'

bench: $(INSTALLED) ## ratios against the other libraries
	$(BIN)/python -m benchmarks

docs: $(INSTALLED) ## the documentation, strict, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

matrix: $(INSTALLED) ## the survival matrices into docs/ (minutes)
	$(BIN)/python tools/matrix.py

# The pinned torch may be a CPU build: GPU_PYTHON names another interpreter that has the libraries.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(INSTALLED)) ## the tests that need a CUDA device
	PYTHONPATH=src $(GPU_PYTHON) tools/gpu.py

report-check: $(INSTALLED) ## the page of `tied report`, in a headless Chromium
	$(BIN)/python -m pytest -m browser tests/test_report_browser.py

# A library of its own, with wheels for Linux alone; `make test` changes the same files without it.
fuzz: $(INSTALLED) ## a minute of files that were sound, changed, for the reader
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python fuzz/read_files.py

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
