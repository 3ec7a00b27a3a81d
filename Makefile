# Everything a newcomer, a developer and CI need. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= models/tiny-qwen3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --prefer-binary --constraint constraints.txt
INSTALLED := $(VENV)/.installed
BENCHMARKS := $(basename $(notdir $(wildcard benchmarks/[a-z]*.py)))

# Two threads of two processes on two cores are far slower than one each.
export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench mutation clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED)  ## Make .venv with pearl and everything it needs (again when pyproject.toml or constraints.txt change)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "setup: $(PYTHON) is older than Python 3.11; name another one: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || { echo "setup: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup: installing torch (some minutes the first time)"
	@$(PIP) torch
	@echo "setup: installing pearl with its train and dev extras"
	@$(PIP) --editable '.[train,dev]'
	@touch $@
	@echo "setup: done, $$($(BIN)/pearl --version) in $(VENV)"

demo: setup $(MODEL)/config.json  ## Train a tiny model to guess a number, on this machine's CPU
	$(BIN)/pearl train recipes/demo/guess_number.toml

$(MODEL)/config.json: | $(INSTALLED)
	$(BIN)/python scripts/make_tiny_qwen3.py --out $(MODEL)

# Two at a time, on two cores: the integration tests wait for processes most of the time.
.PHONY: test-here test-integration
test: setup  ## Run the tests, without the chaos and the GPU ones
	@$(MAKE) --no-print-directory --jobs 2 test-here test-integration

test-here:
	$(BIN)/python -m pytest -m "not integration and not chaos and not gpu"

# Shown when it has ended, so that two reports do not run into each other.
test-integration:
	@report=$$(mktemp); \
	$(BIN)/python -m pytest -m "integration and not chaos and not gpu" -o cache_dir=.pytest_cache/integration \
		> $$report 2>&1; status=$$?; cat $$report; rm $$report; exit $$status

check: setup  ## Lint, format, types, order of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy benchmarks examples scripts
	$(BIN)/lint-imports

mutation: setup  ## Measure what the tests of choice, plan and gates notice (long)
	$(PIP) --editable '.[mutation]'
	$(BIN)/python scripts/mutation_score.py

bench: setup $(MODEL)/config.json  ## Run every benchmark in its quick form
	@failed=""; for name in $(BENCHMARKS); do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name --quick || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "bench: failed:$$failed"; exit 1; }

clean:  ## Remove everything that can be made again: the environment, caches, the tiny model; keeps runs/
	rm -rf $(VENV) $(MODEL) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -type d -name __pycache__ -prune -exec rm -rf {} +
