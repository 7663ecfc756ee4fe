# Bare `make` lists the targets; each has its help behind ##.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin

.PHONY: e2e help setup quickstart test test-vllm lint format types pytest lane-cluster lane-others unit clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 16

setup: ## Make .venv with everything in it (TORCH=torch==X.Y.Z names another build)
	@.ci/setup

quickstart: setup ## Encoder + PD + proxy on this machine, one picture asked about (ONESHOT=1: end by itself)
	@$(BIN)/python examples/quickstart.py $(if $(ONESHOT),--oneshot)

test: setup lint types pytest ## Set up and run everything that CI runs

lint: setup ## Ruff: lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## Let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## mypy
	$(BIN)/mypy

pytest: setup ## All test suites, in two lanes side by side
	@$(BIN)/python -m tests.prepare
	@$(MAKE) --no-print-directory --jobs=2 lane-cluster lane-others

# Suites that mostly wait, for Kubernetes above all, leave a core to those that mostly compute.
CLUSTER_SUITES := tests/e2e $(addprefix tests/integration/,chart cluster operator scaling)

# A line for each file of tests as it ends, and its lane's name before it.
LANE = set -o pipefail; PYTHONUNBUFFERED=1 $(BIN)/python -m pytest $(1) 2>&1 | sed --unbuffered 's/^/$(@:lane-%=%): /'

lane-cluster: setup
	@$(call LANE,$(CLUSTER_SUITES))

lane-others: setup
	@$(call LANE,$(addprefix --ignore=,$(CLUSTER_SUITES)))

e2e: setup ## Only: Helm install and kubectl apply in containers on a real node (builds the images first)
	$(BIN)/python -m pytest -m node

test-vllm: setup ## Only: our connector inside real vLLM (installs it into the user's cache first)
	$(BIN)/python -m pytest tests/vllm tests/integration/vllm

unit: setup ## Only the fast tests of pure decisions
	$(BIN)/python -m pytest tests/unit

clean: ## Remove the venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache

.PHONY: cluster-up cluster-down
cluster-up: setup ## A real Kubernetes on this machine, to work with by hand (docs/cluster.md)
	@$(BIN)/python -m tests.cluster up

cluster-down: setup ## End it, and remove everything it took
	@$(BIN)/python -m tests.cluster down
