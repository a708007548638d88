# Two commands set everything up: `make demo` and `make test`. Any Python from 3.10 on will do; of those that run here,
# the first of these is taken.
ifndef PYTHON
PYTHON := $(shell for it in python3.11 python3.12 python3.10 python3.13 python3.14; do $$it -c '' 2>&- && echo $$it && break; done)
endif
# Of onnxruntime-training the small distribution, which is for the CPU, and ends with Python 3.12.
ifndef ENGINE
ENGINE := $(shell $(PYTHON) -c "import sys; print('cpu' if sys.version_info < (3, 13) else 'stock')")
endif
# Where pip finds torch; empty for where it finds everything else. PyTorch's page names one for the CPU.
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin

# The newest stock onnxruntime, which replaces onnxruntime-training when its folder comes first on the path.
STOCK := .stock
# The last release of onnxruntime-training that has ORTTrainer, with all that it needs, for `make bench`.
LEGACY := .legacy
# Libraries of `make recipes`; nothing else needs them. In another folder, dill would take them for code of the user.
RECIPES := .recipes/site-packages
# The package that trains in JavaScript, and the page that uses it; its test may take another Chromium than Debian's.
JS := js
BROWSER := examples/browser
CHROMIUM ?= /usr/bin/chromium
PORT ?= 8000
# What `make gpu` runs with, and where it writes.
GPU_PYTHON ?= python3
GPU := $(CURDIR)/build/gpu
# Linters and tests, in two workers, with a page at the end; docs/contributing.md says which command runs what.
RUN := $(BIN)/python -m tests.harness.run
# The tests of a second run find the graphs of the first one, as far as neither model nor package have changed.
quick test: export ORT_TRAINER_CACHE := $(CURDIR)/build/exports

.PHONY: setup setup-stock setup-legacy demo demo-adapters browser browser-build quick test everything reach flakes mutants matrix gpu fuzz soak
.PHONY: test-js build-c test-c test-browser dist dist-test audit lint format torture bench fidelity operators onnx-operators onnx-round-trips recipes docs site clean

# The stamp depends on what is installed, so that a changed constraint triggers a new installation. An environment that
# is there is kept, perhaps with a build of torch that was chosen, but not its engine: two would overwrite each other.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,dev)
	touch $@ $(VENV)/.demo

# What the demo needs, and nothing else.
$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,demo)
	touch $@

define install
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(BIN)/python -m pip uninstall -qq --yes onnxruntime-training-cpu onnxruntime-training onnxruntime
$(BIN)/python -m pip install --quiet --constraint constraints.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(ENGINE),$(1)]'
endef

$(STOCK)/.installed: $(VENV)/.installed
	rm -rf $(STOCK)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(STOCK) onnxruntime
	touch $@

$(LEGACY)/.installed: benchmarks/legacy-requirements.txt
	rm -rf $(LEGACY)
	$(PYTHON) -m venv $(LEGACY)
	$(LEGACY)/bin/python -m pip install --quiet --requirement benchmarks/legacy-requirements.txt
	touch $@

# Without what they require, which is installed already: they would bring another torch.
$(RECIPES)/.installed: $(VENV)/.installed examples/recipes/requirements.txt
	rm -rf $(RECIPES)
	$(BIN)/python -m pip install --quiet --no-deps --target $(RECIPES) --requirement examples/recipes/requirements.txt
	touch $@

%/node_modules/.installed: %/package.json %/package-lock.json
	npm ci --prefix $* --ignore-scripts --no-audit --no-fund
	touch $@

$(JS)/dist/index.js: $(JS)/node_modules/.installed $(JS)/tsconfig.json $(wildcard $(JS)/src/*.ts)
	npm run build --prefix $(JS)

# Made anew every time, as any file of the package may have changed.
browser-build: setup $(JS)/dist/index.js $(BROWSER)/node_modules/.installed
	$(BIN)/python $(BROWSER)/make_artifacts.py
	cp $(JS)/dist/index.js $(BROWSER)/build/ort-trainer.js

setup: $(VENV)/.installed

setup-stock: $(STOCK)/.installed

setup-legacy: $(LEGACY)/.installed

demo: $(VENV)/.demo
	$(BIN)/python examples/characters.py --out out/characters

# Tunes a small language model with LoRA on a base of 8 bits, and serves it in stock ONNX Runtime: two minutes.
demo-adapters: setup setup-stock
	PYTHONPATH=$(STOCK) $(BIN)/python examples/adapters.py --out out/adapters

# Serves the page that trains, on this machine alone. Needs Node.js for the packages of examples/browser.
browser: browser-build
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(BROWSER) $(PORT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What a change can affect, in three minutes: of the files that differ from `main`, or from the commit SINCE=...
quick: setup setup-stock
	$(RUN) quick --since "$(SINCE)" $(if $(SEED),--seed $(SEED))

# The gate, on both engines. The commit seeds the lots that choose tests; SEED=... repeats those of another.
test: setup setup-stock
	$(RUN) gate $(if $(SEED),--seed $(SEED))

# All of it, unsampled, from an empty cache. WRITE=1 writes the tables of docs/reference/tests.md.
everything: setup setup-stock
	$(RUN) everything $(if $(WRITE),--write)

# Measures under coverage which tests reach what, and writes tests/measured.json, which `quick` and `test` choose by.
reach: setup setup-stock
	$(RUN) reach $(if $(WRITE),--write)

# What fails in one of three random orders, beside a load, is a defect of the test or of the package. Two hours.
flakes: setup
	$(RUN) flakes $(if $(SEED),--seed $(SEED))

# After `make reach`: do the tests of the gate notice what those of the whole notice?
mutants: setup
	$(BIN)/python benchmarks/mutants.py

# Hundreds of kills, tens of thousands of steps, of which memory is measured: a quarter of an hour.
torture: setup
	$(BIN)/python -m pytest -m torture

# On a bare machine with a GPU and PyTorch for it: tests against PyTorch there, and then the measurements of docs/kernels.md.
# WHEELS is a folder with the packages that the machine lacks; nothing is downloaded. Nine minutes.
gpu:
	rm -rf $(GPU) && mkdir -p $(GPU)/site
	test -z "$(WHEELS)" || $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --target $(GPU)/site $(WHEELS)/*.whl
	PYTHONPATH=$(GPU)/site:$(CURDIR) $(GPU_PYTHON) -m pytest -q -p no:cacheprovider -m gpu -n 8 tests/gpu
	PYTHONPATH=$(GPU)/site:$(CURDIR) $(GPU_PYTHON) benchmarks/gpu.py --out $(GPU)/results.json

# Draws models, and trains them here and in PyTorch; CASE=... repeats one case. What differs becomes a script in build/fuzz.
fuzz: setup
	$(BIN)/python -m tests.fuzz.run --minutes $(or $(MINUTES),60) --seed "$(SEED)" --case "$(CASE)"

# 100,000 steps, and what happens between them in long runs: ten minutes. WRITE=1 writes the picture and the table.
soak: setup
	$(BIN)/python benchmarks/soak.py $(if $(WRITE),--write)

# A tenth of them on other versions of Python, torch and all else, where that Python is: noxfile.py lists them. An hour.
matrix: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[matrix]'
	$(BIN)/nox
	$(BIN)/nox -s table

# The wheel is built from the source distribution, so that both are complete.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# Installs the wheel in a new environment, runs a tenth of the tests on it, and writes the bill of its materials.
dist-test: dist
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[supply]'
	tests/wheel.sh

# Asks the registry for known faults of all versions in constraints.txt; fails, too, if it has no answer.
audit: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[supply]'
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip --strict

# Trains in Node.js, and compares losses and checkpoints with Python's.
test-js: setup $(JS)/dist/index.js
	$(BIN)/python tests/portable/make_artifacts.py
	PYTHON=$(CURDIR)/$(BIN)/python npm test --prefix $(JS)

# Builds the library in C++, the examples and the programs of the tests with sanitizers. Optimizing them would take a
# minute instead of twenty seconds.
build-c:
	test -e /usr/include/xxhash.h || (apt-get update --quiet && apt-get install --yes --quiet libxxhash-dev)
	cmake -S c -B build/c -DCMAKE_BUILD_TYPE=Debug -DORT_TRAINER_SANITIZE=ON -DORT_TRAINER_PROGRAMS=ON \
		-DORT_LIBRARY=$$(echo $(CURDIR)/$(STOCK)/onnxruntime/capi/libonnxruntime.so.*)
	cmake --build build/c --parallel 2

# Trains in C and C++ on the stock engine, and compares with Python.
test-c: setup setup-stock build-c
	$(BIN)/python tests/portable/make_artifacts.py
	build/c/test build/portable
	$(BIN)/python tests/portable/compare_digits.py

# Trains in the page, in headless Chromium, and leaves a picture in build/browser.png.
test-browser: browser-build
	test -x $(CHROMIUM) || (apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium)
	CHROMIUM=$(CHROMIUM) PYTHON=$(CURDIR)/$(BIN)/python node --test $(BROWSER)/page.test.js

# More than two hours on two cores. The legacy trainer takes part if `make setup-legacy` has been called.
bench: setup-stock
	$(BIN)/python benchmarks/train_step.py --write
	$(BIN)/python benchmarks/rewrites.py --write
	$(BIN)/python benchmarks/precisions.py --write
	$(BIN)/python benchmarks/data_parallel.py --write
	$(BIN)/python benchmarks/onnx_step.py --write
	$(BIN)/python docs/generate.py

fidelity: setup
	$(BIN)/python benchmarks/fidelity.py

# Continues an interrupted run from build/operators.jsonl.
operators: setup
	$(BIN)/python benchmarks/operators.py

# The node tests of the onnx package, forward and backward, against the importer of ONNX models.
onnx-operators: setup
	$(BIN)/python benchmarks/onnx_operators.py

# Models that torch.onnx exported, trained here and in PyTorch.
onnx-round-trips: setup
	$(BIN)/python benchmarks/onnx_round_trips.py

# The scripts of examples/recipes, each beside the same in PyTorch; those of examples/libraries, without and with a line.
recipes: $(RECIPES)/.installed
	PYTHONPATH=$(RECIPES) $(BIN)/python -m pytest -rs tests/test_recipes.py
	PYTHONPATH=$(RECIPES) $(BIN)/python benchmarks/libraries.py $(if $(WRITE),--write,--rounds 1)

docs: setup
	$(BIN)/python docs/generate.py

# The pages of docs/ and the docstrings as a site, in build/site; a warning is an error. Needs Python 3.11 or newer.
site: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -b html -W --keep-going -q -c docs . build/site

clean:
	rm -rf $(VENV) $(STOCK) $(LEGACY) $(dir $(RECIPES)) out dist build $(BROWSER)/build $(BROWSER)/node_modules
