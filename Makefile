# Two commands matter: `make bench` runs the benchmarks on this machine, `make test` the tests of this project.
# Everything lives in .venv; nothing outside the checkout is touched but the state directory (see README).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests start thousands of interpreters: each would compile all it imports where somebody has switched the caches off.
export PYTHONDONTWRITEBYTECODE :=
# Tests of real servers mostly wait, so that there are more workers than a small machine has cores.
WORKERS ?= 4
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: bench test servers coverage features test-fast test-slow fuzz mutants mutants-tenth lint types benchmarks old-torch cerebras docs house messages architecture pictures clean help

help:            ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

bench: $(VENV)/.stamp-bench  ## train the four workloads here, judge them against the last accepted figures
	$(BIN)/pytest suites/ --system local

# Real servers that must be there, as in `make test SERVICES=slurm`; without it, tests use what can start here.
SERVICES ?=

# A test that hangs says where, instead of keeping the whole run; no test takes minutes on a machine without other work.
HANG_GUARD := --timeout 900

TESTED := -m pytest $(SIDE_BY_SIDE) $(HANG_GUARD) -m "not slow" $(if $(SERVICES),--require-services=$(SERVICES))

# Ends whatever tests leave behind, and says what they cost in CPU seconds.
SUPERVISED := $(BIN)/python tests/supervise.py -- $(BIN)/python

test: $(VENV)/.stamp-test    ## what CI runs; says at the end which real servers were not there
	$(SUPERVISED) $(TESTED)

servers:         ## install the real servers that tests talk to (Debian, as root)
	ci/servers

coverage: $(VENV)/.stamp-test  ## the same, and which lines it reaches; every process is slower for it
	$(BIN)/coverage erase
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/coverage run $(TESTED)
	$(BIN)/coverage combine --quiet 2>/dev/null  # processes that tests kill leave files that cannot be read
	$(BIN)/coverage report --include='pytest_mlhpc/*' 2>/dev/null | tail -n 25

features: $(VENV)/.stamp-test  ## the same, and the tables of docs/state.md
	$(SUPERVISED) $(TESTED) --features tests/features.json
	$(BIN)/python tests/feature_table.py

test-fast: $(VENV)/.stamp-test  ## a minute or two on two cores; starts no server and no training
	$(SUPERVISED) -m pytest $(HANG_GUARD) -n auto --dist worksteal -m "not slow and not servers"

# What fails is kept in .hypothesis and tried first the next time; the failure prints how to make a test of it.
fuzz: $(VENV)/.stamp-test  ## every reader against thousands of odd inputs, other ones each time: ten minutes
	$(SUPERVISED) -m pytest $(HANG_GUARD) -n auto --dist worksteal -m "hypothesis and not slow" --hypothesis-profile=fuzz

mutants: $(VENV)/.stamp-test  ## do the tests notice the pinned mutants? an hour at most
	$(BIN)/python tests/mutants/mutants.py run

# Another tenth every day; `make mutants-tenth SEED=3` for a certain one.
SEED ?= $(shell date +%Y%m%d)

mutants-tenth: $(VENV)/.stamp-test  ## the same for a tenth of them, in minutes
	$(BIN)/python tests/mutants/mutants.py run --tenth $(SEED)

test-slow: $(VENV)/.stamp-test old-torch cerebras  ## the whole matrix: old torch releases, Cerebras' package and a newer Slurm too
	$(SUPERVISED) -m pytest $(SIDE_BY_SIDE) -m "not alone"
	$(SUPERVISED) -m pytest -m alone

lint: $(VENV)/.stamp-test    ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.stamp-test   ## mypy, strict
	$(BIN)/mypy

benchmarks: $(VENV)/.stamp-test  ## print the figures of benchmarks/performance.md
	$(BIN)/python -m benchmarks

old-torch: .venv-torch-1.13/.stamp .venv-torch-2.4/.stamp  ## interpreters with old torch releases, for test-slow

# The oldest torch that the payload promises (with the oldest Python where there is one), and that of Cerebras' releases.
# Nothing of this project is installed there: a node gets the payload's zip and has nothing else.
.venv-torch-%/.stamp:
	rm -rf $(@D)
	for python in python3.9 python3.10 python3.11 $(PYTHON); do \
	    if $$python -c '' 2>/dev/null; then exec $$python -m venv $(@D); fi; \
	done; exit 1
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check torch==$*.1 'numpy<2' h5py pillow
	touch $@

cerebras: .venv-cerebras/.stamp  ## an interpreter with Cerebras' package, for test-slow: 6 GB

# It pins torch 2.4 and NumPy 1.25, and is made for Python 3.11 alone (docs/accelerators.md).
.venv-cerebras/.stamp:
	rm -rf $(@D)
	python3.11 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check cerebras-pytorch==2.10.0 h5py pillow
	touch $@

docs: | $(VENV)/bin/python   ## HTML of docs/ below build/docs
	$(PIP) --group docs
	$(BIN)/sphinx-build -q -W -b html docs build/docs

house:           ## print how many modules there are, how large, and what imports what
	@$(PYTHON) tests/house.py

architecture:    ## draw docs/architecture.svg
	$(BIN)/python tests/architecture_picture.py

pictures:        ## draw the pictures of docs/report.md in Chromium
	$(BIN)/python tests/report_pictures.py

messages:        ## list every text that a user may read, to be read for plain English
	@$(PYTHON) tests/messages.py

clean:           ## remove what make made
	rm -rf $(VENV) .venv-torch-* .venv-cerebras .pytest_cache .mypy_cache .ruff_cache .coverage .coverage.*

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'

$(VENV)/.stamp-bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[torch]'
	touch $@

$(VENV)/.stamp-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[torch,kubernetes,influx]' --group dev
	touch $@ $(VENV)/.stamp-bench
