# Everything a contributor needs. Each target makes the virtual environment it runs in.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint types unit slow bench docs clean
.DEFAULT_GOAL := test

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/winnow demo

test: lint types unit

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/basedpyright --level error

unit: $(INSTALLED)
	$(BIN)/python -m pytest

slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

bench: $(INSTALLED)
	$(BIN)/python benchmarks/selection.py
	$(BIN)/python benchmarks/regression.py

docs: $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site
