# Everyday commands. `make plan` and `make test` need Python 3.11 or later and make, nothing else.
PYTHON ?= python3
VENV   := .venv
FRAMEWORKS := .venv-frameworks
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

# Byte code is kept whatever the environment says: each worker and each process of a test would compile all of it again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help plan test check fast slow nightly bench bench-accuracy bench-memory bench-reserved docs format clean test-frameworks

help:                              ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name words; do printf '%-14s %s\n' "$$name" "$$words"; done

plan: $(VENV)/planner.stamp        ## a plan for a 7B model; installs the planner alone, without torch
	$(BIN)/strategist plan --model-size 7B

test: $(VENV)/everything.stamp     ## every test except the nightly ones
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not nightly"

test-frameworks: $(FRAMEWORKS)/stamp  ## emitted files, parsed and trained by the frameworks themselves, in an environment of their own
	$(FRAMEWORKS)/bin/python -m pytest tests/frameworks -W ignore --write-proofs

check: $(VENV)/everything.stamp    ## lint, types, floors, fast tests: under a minute
	$(BIN)/ruff check strategist tests benchmarks docs
	$(BIN)/ruff format --check strategist tests benchmarks docs
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=fast -m "not slow and not nightly"

fast: $(VENV)/everything.stamp     ## fast tests only
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=fast -m "not slow and not nightly"

slow: $(VENV)/everything.stamp     ## tests that start processes or need torch
	$(BIN)/python -m pytest -m slow

nightly: $(VENV)/everything.stamp  ## every test, ten times the generated cases; writes benchmarks/results
	$(BIN)/python -m benchmarks.nightly

bench-memory: $(VENV)/everything.stamp ## formulas against traces, term by term; writes benchmarks/results/memory.json
	$(BIN)/python -m benchmarks.bench_memory

bench-reserved: $(VENV)/everything.stamp ## published reserved memory against traces; writes benchmarks/results/reserved.json
	$(BIN)/python -m benchmarks.bench_reserved

bench: $(VENV)/everything.stamp    ## start-up and search, as ratios in one run; writes benchmarks/results
	$(BIN)/python -m compileall -q strategist
	$(BIN)/python -m benchmarks.bench_startup

bench-accuracy: $(VENV)/everything.stamp  ## published runs against predictions; writes benchmarks/results
	$(BIN)/python -m benchmarks.bench_accuracy

docs: $(VENV)/everything.stamp     ## pages that are generated from data
	$(BIN)/python docs/make_pages.py

format: $(VENV)/everything.stamp   ## let ruff lay out the code
	$(BIN)/ruff check --fix strategist tests benchmarks docs
	$(BIN)/ruff format strategist tests benchmarks docs

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("strategist needs Python 3.11 or later") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# Byte code is compiled once here, because an editable install leaves that to the first start.
$(VENV)/planner.stamp: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e .
	$(BIN)/python -m compileall -q strategist
	touch $@

$(VENV)/everything.stamp: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[run,weights,calibrate,hf,test,dev]'
	$(BIN)/python -m compileall -q strategist
	touch $@ $(VENV)/planner.stamp

$(FRAMEWORKS)/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[run,hf,frameworks,test]'
	touch $@

clean:                             ## remove what the other targets made
	rm -rf $(VENV) $(FRAMEWORKS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
