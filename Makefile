# Every target sets up what it needs: an environment in .venv, made from requirements.lock and made anew when that changes.
# Needs only git, make, a C compiler and Python 3.11 or newer; choose the interpreter with `make test PYTHON=python3.12`.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/stamp
SWEEP ?= sweeps/smollm2-residency.yaml
UPGRADE ?=
WORKERS ?= 3
# Tests run more than one process on few cores, so each keeps to one BLAS thread. Nothing else of the BLAS is touched.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/python -P -m pytest -rs -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help sweep test test-full accept chaos hazards mutants lint lock setup clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

sweep: setup ## set up, then compare base and head on SmolLM2 and write comment, page and store
	$(BIN)/assay run $(SWEEP)

test: setup ## set up, then run the tests, GPU tests included where there is a GPU
	$(PYTEST) -m "not accept and not slow" --must-run tests

test-full: setup ## the same with the slow tests
	$(PYTEST) -m "not accept" --must-run tests

accept: setup ## the full acceptance matrix: residency x policy x capture on a real model
	$(PYTEST) -m accept tests

chaos: setup ## kill, stop, fill up and cut off at named points, and resume: part of test-full, alone
	$(PYTEST) --dist worksteal tests/chaos

hazards: setup ## decode tiny and sample models under the happens-before checker: policy, budget, capture, layout, schedule
	$(PYTEST) --dist worksteal tests/unit/test_engine_hazards_matrix.py

mutants: setup ## leave out each call that orders, ends or refuses something, and name the check that falls
	$(ONE_THREAD) $(BIN)/python -P -m tests.mutants.run --jobs $(WORKERS) --out docs/results

lint: setup ## ruff, mypy, import contracts, one migration head
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@sh .ci/one-head $(BIN)/alembic

lock: setup ## bring requirements.lock up to pyproject.toml; UPGRADE=--upgrade takes newer releases too
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra postgres --universal --generate-hashes --no-header \
		--python-version 3.11 $(UPGRADE) --quiet --output-file requirements.lock

setup: ## make or reuse .venv, as every other target does first
	@PYTHON="$(PYTHON)" sh .ci/setup $(VENV)

clean: ## remove the environment, build outputs and caches; stored runs under .assay stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
