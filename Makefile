# Everything that is done with this tree more than once. Needs only Python (3.10 or later) and make: the virtual
# environment is made on the first use, and again whenever constraints.txt or a pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/made-from-constraints
PACKAGES := $(sort $(wildcard packages/*))

DEMO_ARGS ?=
TEST_ARGS ?=
# Tests of one file stay together, because they share what they have started.
TEST_PROCESSES ?= 2
# The slow tests run in parts: the hash of the commit chooses one. Without a hash it is the first. PART=all: all parts.
PART ?= $(shell git rev-parse HEAD 2>/dev/null || echo 0)
BENCH_ARGS ?=
SOAK_RUNS ?= 5

# What a package imports and does not declare, and the reverse. Its names are those of the installed distributions.
DEPTRY := $(CURDIR)/$(BIN)/deptry src --optional-dependencies-dev-groups dev

# One thread a process: the tests start many processes, and more threads than cores only make them wait for each other.
export OMP_NUM_THREADS := 1
# Where the environment forbids bytecode files, each of the many processes compiles all the source again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench soak wheels proto docs clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name words; do printf '  %-12s %s\n' "$$name" "$$words"; done

demo: $(STAMP) ## train three replicas, kill two, watch them heal (DEMO_ARGS="--replicas 3 --steps 400 --kills 2 --seed 0")
	$(BIN)/tft demo $(DEMO_ARGS)

test: $(STAMP) ## run the tests, and of the slow ones the part of this commit (PART=all TEST_ARGS="-k quorum")
	$(BIN)/python -m pytest --part $(PART) --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(TEST_ARGS)

lint: $(STAMP) ## ruff, mypy --strict, who may import whom, undeclared dependencies, and whether generated code is stale
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo
	for package in $(PACKAGES); do (cd $$package && $(DEPTRY)) || exit 1; done
	$(BIN)/python scripts/proto.py --check
	$(BIN)/mypy

bench: $(STAMP) ## measure what must be fast, side by side with its peers (BENCH_ARGS="p1 p2")
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

soak: $(STAMP) ## the tests that run for minutes, then all the others five times over (SOAK_RUNS=5)
	$(BIN)/python -m pytest -m soak --timeout 1800 || [ $$? -eq 5 ]
	for run in $$(seq $(SOAK_RUNS)); do $(BIN)/python -m pytest -q || exit 1; done

wheels: $(STAMP) ## build one wheel a package into dist/
	rm -rf dist
	for package in $(PACKAGES); do $(BIN)/python -m build --wheel --no-isolation --outdir dist $$package || exit 1; done

proto: $(STAMP) ## generate the wire's Python code from its .proto
	$(BIN)/python scripts/proto.py

docs: $(STAMP) ## build the documentation into docs/_build; warnings and links that lead nowhere are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python scripts/check_links.py docs/_build/html

clean: ## remove all that the other targets made, the virtual environment too
	rm -rf $(VENV) $(VENV)-* dist docs/_build tft-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find packages integration_tests benchmarks examples scripts docs -name __pycache__ -prune -exec rm -rf {} +

# What comes from outside is installed by an explicit list; the packages then come from the tree, without dependencies,
# so that no index is asked for one of their names. Most modules are never imported, so none is compiled ahead.
$(STAMP): constraints.txt pyproject.toml scripts/third_party_requirements.py $(PACKAGES:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; say which with make PYTHON=...")'
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/third_party_requirements.py > $(VENV)/third-party.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -r $(VENV)/third-party.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation $(PACKAGES:%=-e ./%)
	touch $@
