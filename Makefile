# Two commands set everything up on a machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# The newest stock onnxruntime, which replaces onnxruntime-training when its folder comes first on the path.
STOCK := .stock
# The last release of onnxruntime-training that has ORTTrainer, with all that it needs, for `make bench`.
LEGACY := .legacy
# Two workers, each on one thread.
PYTEST := python -m pytest --numprocesses 2
# The tests of a second run find the graphs of the first one, as far as neither model nor package have changed.
test: export ORT_TRAINER_CACHE := $(CURDIR)/build/exports

.PHONY: setup setup-stock setup-legacy demo test lint format bench fidelity operators docs clean

# The stamp depends on what is installed, so that a changed constraint triggers a new installation.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(STOCK)/.installed: $(VENV)/.installed
	rm -rf $(STOCK)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(STOCK) onnxruntime
	touch $@

$(LEGACY)/.installed: benchmarks/legacy-requirements.txt
	rm -rf $(LEGACY)
	$(PYTHON) -m venv $(LEGACY)
	$(LEGACY)/bin/python -m pip install --quiet --requirement benchmarks/legacy-requirements.txt
	touch $@

setup: $(VENV)/.installed

setup-stock: $(STOCK)/.installed

setup-legacy: $(LEGACY)/.installed

demo: setup
	$(BIN)/python examples/digits.py --out out/digits

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The second engine runs the tests that depend on the engine, and for tests/test_fidelity.py the graphs that the first
# one exported.
test: lint setup-stock
	rm -rf build/graphs
	ORT_TRAINER_TEST_GRAPHS=build/graphs $(BIN)/$(PYTEST) -m "not extra"
	PYTHONPATH=$(CURDIR)/$(STOCK) ORT_TRAINER_TEST_GRAPHS=build/graphs $(BIN)/$(PYTEST) -m "engine and not extra"

# Up to an hour on two cores. The legacy trainer takes part if `make setup-legacy` has been called.
bench: setup-stock
	$(BIN)/python benchmarks/train_step.py --write
	$(BIN)/python benchmarks/rewrites.py --write

fidelity: setup
	$(BIN)/python benchmarks/fidelity.py

# Continues an interrupted run from build/operators.jsonl.
operators: setup
	$(BIN)/python benchmarks/operators.py

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(STOCK) $(LEGACY) out dist build
