# Two commands set everything up on a machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# The same with the newest stock onnxruntime in the place of onnxruntime-training.
STOCK := .venv-stock
STOCK_PACKAGES := onnx onnxscript onnxruntime cerberus numpy safetensors pytest pytest-xdist \
	matplotlib scikit-learn tqdm transformers tokenizers build hatchling
# Two workers, each on one thread.
PYTEST := python -m pytest --numprocesses 2

.PHONY: setup setup-stock demo test lint format bench fidelity docs clean

# The stamp depends on what is installed, so that a changed constraint installs again.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(STOCK)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(STOCK)
	$(STOCK)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(STOCK)/bin/python -m pip install --quiet --constraint constraints.txt $(STOCK_PACKAGES)
	$(STOCK)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

setup: $(VENV)/.installed

setup-stock: $(STOCK)/.installed

demo: setup
	$(BIN)/python examples/digits.py --out out/digits

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The second environment runs the graphs of tests/test_fidelity.py that the first one exported, and exports all others.
# The examples and the packaging run in the first one only.
test: lint setup-stock
	rm -rf build/graphs
	ORT_TRAINER_TEST_GRAPHS=build/graphs $(BIN)/$(PYTEST)
	ORT_TRAINER_TEST_GRAPHS=build/graphs $(STOCK)/bin/$(PYTEST) \
		--ignore tests/test_examples.py --ignore tests/test_package.py

bench: setup
	$(BIN)/python benchmarks/train_step.py

fidelity: setup
	$(BIN)/python benchmarks/fidelity.py

docs: setup
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) $(STOCK) out dist build
