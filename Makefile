# Each target is complete alone: it makes .venv and installs what it needs, once.
#
#   make demo       the main job on a built-in support desk          (ARGS=--json for a program)
#   make test       the tests, on up to four cores                   (ARGS="-k pools" for some of them)
#   make check      lint, format, types, layers, docs
#   make coverage   the tests with branch coverage
#   make stress     the long tier: long random stress, explorer, deep properties
#   make soak       a million calls of every kind from three loops while limits change   (ARGS="--calls 20000" for fewer)
#   make chaos      ten minutes of replicas that are killed and stopped while they share an engine   (ARGS="--seconds 60 --seed 7")
#   make bench      the benchmark table
#   make bench-engines  claims on a real server beside a bare PING
#   make groups     a limit over many groups, in chunks: the simulation of docs/many-groups.md
#   make docs       the documentation, in site/
#   make guarantees which test holds which promise, listed anew in docs/guarantees.md
#   make pictures   the pictures of the documentation, drawn anew
#   make build      wheel and sdist, in dist/
#   make clean      what these targets made, .venv too
#
# PYTHON=python3.12 chooses the interpreter; .venv is made anew when it has another one.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test check coverage stress soak chaos bench bench-engines groups docs guarantees pictures build clean python run dev bench-tools

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

python:
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	  echo "towerman: no $(PYTHON) on the PATH; install Python 3.11 or later, or name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("towerman: Python 3.11 or later is needed, $(PYTHON) is %d.%d; name another: make PYTHON=python3.12 ..." % v[:2])'

prepare = @"$(PYTHON)" tools/environment.py $(if $(filter file,$(origin PYTHON)),,--this-python)

run: python
	$(prepare) run

dev: python
	$(prepare) dev

bench-tools: python
	$(prepare) bench

demo: run
	@$(BIN)/towerman demo $(ARGS)

test: dev
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

check: dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py
	$(BIN)/zensical build --clean --strict

coverage: dev
	$(BIN)/python -m pytest --cov --cov-report=term-missing $(ARGS)

stress: dev
	TOWERMAN_LONG=1 $(BIN)/python -m pytest -m long -o faulthandler_timeout=3600 $(ARGS)

soak: dev
	$(BIN)/python tests/soak.py $(ARGS)

chaos: dev
	$(BIN)/python tests/chaos.py $(ARGS)

bench: bench-tools
	$(BIN)/python -m benchmarks $(ARGS)

groups: dev
	$(BIN)/python -m benchmarks.groups $(ARGS)

bench-engines: dev
	$(BIN)/python -m benchmarks.engines $(ARGS)

docs: dev
	$(BIN)/zensical build --clean --strict
	@echo "open site/index.html"

guarantees: python
	@"$(PYTHON)" tools/guarantees.py

pictures: dev
	@$(BIN)/python tools/pictures.py

build: dev
	$(BIN)/python -m hatchling build --directory dist

clean:
	rm -rf .venv site dist build .cache .coverage .coverage.* htmlcov .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find src tests tools docs -name __pycache__ -type d -prune -exec rm -rf {} +
