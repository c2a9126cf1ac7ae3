# `make demo` and `make test` work on a fresh machine: each makes .venv when it is not there yet.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow check lint types bench clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)  ## train a small real model over an emulated 100 Mbit/s link, plain and compressed
	$(BIN)/tersegrad demo

test: $(READY)  ## tests and doctests
	$(BIN)/python -m pytest

slow: $(READY)  ## the slow tier: minutes of real training over real slow links
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

check: lint types test  ## what CI runs

bench: $(READY)  ## the figures of benchmarks/README.md (about ten minutes on a quiet machine)
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) build dist
