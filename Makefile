# Everything a contributor or CI runs. `make` alone lists it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Ranks on this machine, and what else is handed to the command: make train NPROC=4 ARGS='run.name=mine'
NPROC ?= 2
ARGS ?=

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest --durations=40
# Beside each other; a worker has all tests of a file, which share their fixtures, and takes the files in order.
TOGETHER := -n 2 --dist loadfile --no-loadscope-reorder
SHELL_SCRIPTS := tests/gpu/check.sh $(wildcard launch/*.sh) launch/slurm.sbatch .ci/run

# One thread per rank unless told otherwise (torchrun would say so at length), time to save when
# stopped, and the renderer that this machine has.
export OMP_NUM_THREADS ?= 1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 120
WITH_RENDERER := export MUJOCO_GL=$${MUJOCO_GL:-$$(launch/system_packages.sh --renderer)};

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## install what is missing: system libraries (if root) and .venv
	@launch/system_packages.sh
	@launch/setup.sh

.PHONY: train
train: setup ## demonstrations, clone, GRPO: PushCube from pictures on NPROC=2 ranks; ARGS='key=value …' overrides of GRPO
	@set -x; export NPROC=$(NPROC); exec launch/recipe.sh pushcube_oft $(ARGS)

# Two runs of pytest: tests beside each other, then those that must have the machine alone. The second follows whatever
# became of the first, unless that was interrupted (2); that one of them has nothing to do (5) is no failure.
.PHONY: test
test: setup ## every test (those that need a GPU skip themselves); ARGS are pytest's
	@$(WITH_RENDERER) first=0; second=0; set -x; \
	$(PYTEST) --part=together $(TOGETHER) $(ARGS) || first=$$?; \
	if [[ $$first == 2 ]]; then exit 2; fi; \
	$(PYTEST) --part=alone $(ARGS) || second=$$?; \
	if [[ $$second == 5 ]]; then exit $$first; fi; \
	if [[ $$first != 0 && $$first != 5 ]]; then exit $$first; fi; \
	exit $$second

.PHONY: test-unit
test-unit: setup ## tests of single parts, no other process
	@$(WITH_RENDERER) set -x; exec $(PYTEST) tests/unit $(TOGETHER) $(ARGS)

.PHONY: test-distributed
test-distributed: setup ## tests on several ranks
	@$(WITH_RENDERER) set -x; exec $(PYTEST) tests/distributed $(ARGS)

.PHONY: test-e2e
test-e2e: setup ## tests that train from the command line
	@$(WITH_RENDERER) set -x; exec $(PYTEST) tests/e2e $(ARGS)

.PHONY: chaos
chaos: setup ## every test that kills or stops something, the whole matrix included (its table: perf/RESULTS.md)
	@$(WITH_RENDERER) first=0; set -x; $(PYTEST) -m chaos --ignore=tests/chaos/test_matrix.py $(ARGS) || first=$$?; \
	$(BIN)/python perf/chaos.py && $(BIN)/python perf/report.py && exit $$first

.PHONY: bench
bench: setup ## measure this machine (20 minutes; perf/RESULTS.md); ARGS=bench_mlp measures that one alone
	@$(WITH_RENDERER) set -x; exec $(BIN)/python perf/bench.py $(ARGS)

.PHONY: bench-check
bench-check: setup ## measure, and compare with what perf/results holds: fails if something is slower
	@$(WITH_RENDERER) set -x; exec $(BIN)/python perf/bench.py --check $(ARGS)

.PHONY: lint
lint: setup ## ruff, mypy, shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck $(SHELL_SCRIPTS)

.PHONY: docs
docs: setup ## write docs/configuration.md from the source
	$(BIN)/python docs/build.py

.PHONY: audit
audit: setup ## known vulnerabilities of the pinned dependencies; asks PyPI, so it is no part of the tests
	$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r launch/constraints.txt $(ARGS)

.PHONY: fmt
fmt: setup ## format and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: clean
clean: ## remove caches and build output; .venv and runs stay
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist outputs src/*.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: clean-runs
clean-runs: ## remove all runs, with their checkpoints
	rm -rf runs
