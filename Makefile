# Two commands set everything up on a machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test lint format bench docs clean

# The stamp depends on what is installed, so that a changed constraint installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/python examples/digits.py --out out/digits

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest

bench: setup
	$(BIN)/python benchmarks/train_step.py

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) out dist build
