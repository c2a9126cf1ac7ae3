# `make demo` and `make test` work on a fresh machine: each makes .venv when it is not there yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow fuzz fuzz-bounds soak check lint types rooms bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)  ## train a small real model over an emulated 100 Mbit/s link, plain and compressed
	$(BIN)/tersegrad demo

test: $(READY)  ## tests and doctests, file by file in four processes: many of their tests wait for processes of their own
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

slow: $(READY)  ## the slow tier: minutes of real training over real slow links
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=1200

fuzz: $(READY)  ## a million mutated frames over all codecs (some minutes)
	$(BIN)/python -m tersegrad.lab.fuzz --frames 1000000

fuzz-bounds: $(READY)  ## fewer frames, with every array access of every kernel checked (compiles all kernels anew)
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(VENV)/numba-bounds $(BIN)/python -m tersegrad.lab.fuzz --frames 50000

soak: $(READY)  ## ten thousand steps of random methods with restarts, NaNs and real processes (some minutes)
	$(BIN)/python -m tersegrad.lab.soak --steps 10000

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

rooms: $(READY)  ## imports go downwards only
	$(BIN)/lint-imports

check: lint types rooms test  ## what CI runs

bench: $(READY)  ## the figures of benchmarks/README.md (long; needs a quiet machine)
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) build dist
