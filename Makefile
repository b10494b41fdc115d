# The front door. `make demo` and `make test` do all set-up themselves; nothing else needs to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Small models on few cores: OpenMP threads cost more than they bring, and fight with whatever else runs.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test test-slow test-gpu docs check format measure bench map baselines gpu gpu-serving clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(VENV)/ready  ## Watch two caches share a pool, over real HTTP (two minutes, CPU)
	$(BIN)/helmrec demo

# Two workers, a file of tests on one of them: more start more Ray clusters and servers than a small machine bears.
test: $(VENV)/ready  ## Run the tests (CPU, about ten minutes on two cores)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not gpu and not slow"

test-slow: $(VENV)/ready  ## Run the long tests too
	$(BIN)/python -m pytest -q -m "not gpu"

test-gpu:  ## On a machine with a card: run the tests that need it (three minutes with pytest-xdist and sixteen cores)
	PYTHONPATH=src:$$PYTHONPATH $(PYTHON) -m pytest -q -n 12 --dist load -p no:benchmark -m gpu tests/gpu

docs: $(VENV)/ready  ## Build the documentation: build/docs/html/index.html
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs/html

check: $(VENV)/ready  ## The one gate: format, lint, types, then the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: $(VENV)/ready  ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

measure: $(VENV)/ready  ## Measure the host side on this machine; writes docs/measurements
	$(BIN)/helmrec bench run host

bench: $(VENV)/ready  ## Every figure and table, and one report of all (CPU, a quarter of an hour on two idle cores)
	$(BIN)/helmrec bench all --quick

map: $(VENV)/ready  ## Where the split matters and what moving it gains; goes on where it was stopped (CPU, fifteen minutes)
	$(BIN)/helmrec bench run map

baselines: $(VENV)/ready  ## Every policy on the main scenario; goes on where it was stopped (CPU, forty minutes)
	$(BIN)/helmrec bench run baselines

gpu:  ## On a machine with a card: check every kernel, time the dense path and row reads; writes docs/measurements
	PYTHONPATH=src:$$PYTHONPATH OMP_NUM_THREADS=8 $(PYTHON) -m helmrec_bench run kernels
	PYTHONPATH=src:$$PYTHONPATH OMP_NUM_THREADS=8 $(PYTHON) -m helmrec_bench run row-reads

gpu-serving:  ## On a machine with a card: what moving data costs, and the trade-off map (ten minutes, 100 GB of memory)
	PYTHONPATH=src:$$PYTHONPATH OMP_NUM_THREADS=8 $(PYTHON) -m helmrec_bench run moves
	PYTHONPATH=src:$$PYTHONPATH OMP_NUM_THREADS=8 $(PYTHON) -m helmrec_bench run trade-off

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("HelmRec needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
