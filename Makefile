# Everyday commands. `make plan` and `make test` need Python 3.11 or later and make, nothing else.
PYTHON ?= python3
VENV   := .venv
FRAMEWORKS := .venv-frameworks
GROUPS_OF_FRAMEWORKS := $(basename $(notdir $(wildcard tests/frameworks/requirements/*.txt)))
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

# Byte code is kept whatever the environment says: each worker and each process of a test would compile all of it again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help plan test check fast slow nightly bench calibration bench-accuracy bench-memory bench-drawn bench-reserved bench-search bench-overhead mutants docs format clean test-frameworks test-frameworks-hf test-frameworks-checkouts test-hf

help:                              ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name words; do printf '%-14s %s\n' "$$name" "$$words"; done

plan: $(VENV)/planner.stamp        ## a plan for a 7B model; installs the planner alone, without torch
	$(BIN)/strategist plan --model-size 7B

# A rank of which gloo's or torch's own code dies of a segmentation fault, once in thousands of groups, is tried again and reported
# (docs/decisions/0164-ranks-that-crash-in-torch.md).
test: $(VENV)/everything.stamp     ## every test except the nightly ones
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "not nightly" --reruns 1 --only-rerun "exit code -11" --only-rerun "signal\s+11\s"

# With CHECKOUTS=FOLDER the frameworks that no registry has are asked too: tests/frameworks/README.md.
test-frameworks: test-frameworks-hf $(GROUPS_OF_FRAMEWORKS:%=test-frameworks-%) $(if $(CHECKOUTS),test-frameworks-checkouts)  ## emitted files, parsed and trained by the frameworks themselves, in environments of their own

test-frameworks-hf: $(FRAMEWORKS)/hf/stamp  ## the first of these environments alone: Hugging Face's, DeepSpeed and Lightning
	$(FRAMEWORKS)/hf/bin/python -m pytest $(addprefix tests/frameworks/test_,parsed.py trained.py pairs.py splits.py slurm.py) -W ignore --write-proofs hf

test-hf: $(FRAMEWORKS)/hf/stamp    ## what continuous integration runs of it: without Slurm, mpirun and cases made of others, and nothing is written
	$(FRAMEWORKS)/hf/bin/python -m pytest -n 2 --dist=worksteal $(addprefix tests/frameworks/test_,parsed.py trained.py pairs.py splits.py) -W ignore -k "not mpirun" -m "not nightly"

# Frameworks of folders that CHECKOUTS holds, called like their repositories: Megatron-LM, nanotron, byteps.
test-frameworks-checkouts: $(FRAMEWORKS)/frozen/stamp  ## with CHECKOUTS=FOLDER: frameworks that no registry has
	CHECKOUTS="$(CHECKOUTS)" $(FRAMEWORKS)/frozen/bin/python -m pytest tests/frameworks/test_checkouts.py -W ignore --write-proofs checkouts

# Frameworks whose versions clash with the others': make test-frameworks-ray
test-frameworks-%: $(FRAMEWORKS)/%/stamp
	$(FRAMEWORKS)/$*/bin/python -m pytest $(wildcard tests/frameworks/test_$(subst -,_,$*)*.py) -W ignore --write-proofs $*

check: $(VENV)/everything.stamp    ## lint, types, floors, fast tests: a minute on two cores
	$(BIN)/ruff check strategist tests benchmarks docs
	$(BIN)/ruff format --check strategist tests benchmarks docs
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=fast -m "not slow and not nightly"

fast: $(VENV)/everything.stamp     ## fast tests only
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=fast -m "not slow and not nightly"

slow: $(VENV)/everything.stamp     ## tests that start processes, need torch or try everything again
	$(BIN)/python -m pytest -m "slow and not nightly"

nightly: $(VENV)/everything.stamp  ## every test, ten times the generated cases; writes benchmarks/results
	$(BIN)/python -m benchmarks.nightly

bench-memory: $(VENV)/everything.stamp ## formulas against traces, term by term; writes benchmarks/results/memory.json
	$(BIN)/python -m benchmarks.bench_memory

bench-drawn: $(VENV)/everything.stamp ## the same over 200 layouts drawn from all that is legal; writes benchmarks/results/memory_drawn.json
	$(BIN)/python -m benchmarks.bench_memory drawn 200

bench-reserved: $(VENV)/everything.stamp ## published reserved memory against traces; writes benchmarks/results/reserved.json
	$(BIN)/python -m benchmarks.bench_reserved

bench: $(VENV)/everything.stamp    ## start-up and search, as ratios in one run; writes benchmarks/results
	$(BIN)/python -m compileall -q strategist
	$(BIN)/python -m benchmarks.bench_startup

bench-search: $(VENV)/everything.stamp  ## seconds and counts of searches; writes benchmarks/results/search.json
	$(BIN)/python -m benchmarks.bench_search

bench-overhead: $(VENV)/everything.stamp  ## Session.step beside a loop by hand, DDP and FSDP2; writes benchmarks/results/overhead.json
	$(BIN)/python -m benchmarks.bench_overhead

mutants: $(VENV)/everything.stamp  ## plant faults in a copy, one after the other: does a test see each? writes benchmarks/results/mutants.json
	$(BIN)/python -m benchmarks.mutants

calibration: $(VENV)/everything.stamp  ## factors and intervals that ship, fitted again to the published runs
	$(BIN)/python -m benchmarks.held_out

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
	$(PIP) -e '.[run,weights,qlora,fp8,calibrate,tensorboard,hf,test,dev]'
	$(BIN)/python -m compileall -q strategist
	touch $@ $(VENV)/planner.stamp

$(FRAMEWORKS)/hf/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)/hf
	$(FRAMEWORKS)/hf/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[run,hf,frameworks,test]'
	touch $@

$(FRAMEWORKS)/%/stamp: tests/frameworks/requirements/%.txt pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORKS)/$*
	$(FRAMEWORKS)/$*/bin/pip install --quiet --disable-pip-version-check -r $<
	$(FRAMEWORKS)/$*/bin/pip install --quiet --disable-pip-version-check -e '.[test]'  # after it: its pins may be below what we plan with
	$(if $(wildcard $(dir $<)without_dependencies/$*.txt),$(FRAMEWORKS)/$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r $(dir $<)without_dependencies/$*.txt)
	$(FRAMEWORKS)/$*/bin/pip uninstall --quiet --yes torchvision torchaudio  # no builds for torch's CPU build: Transformers fails with them
	touch $@

.SECONDARY:                        # environments that a pattern made are kept

clean:                             ## remove what the other targets made
	rm -rf $(VENV) $(FRAMEWORKS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
