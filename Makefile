# make demo    train the embedded model through our own MCP server and show what it learned
# make test    lint, types, import rules and the default tests; make test-more adds those that take minutes
# make bundle  the .mcpb bundle for clients that install by one file; needs npm
#
# Everything goes into $(VENV). Steps of the installation are repeated only when pyproject.toml or constraints.txt changed.
# On Linux the index's plain torch is a CUDA build of several gigabytes. For a CPU build from another index:
#   make demo TORCH="torch==2.13.0 --index-url URL-OF-A-CPU-INDEX"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
BUNDLE_DIR ?= build
MCPB_VERSION := 2.1.2
MCPB := .cache/mcpb/$(MCPB_VERSION)/node_modules/.bin/mcpb

BIN := $(VENV)/bin
# On a terminal pip shows its own progress; elsewhere each step is one line.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input $(shell [ -t 2 ] || echo --quiet --quiet)
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test test-more lint bench conformance inspector clients clean

# Others' checkers and clients, each at one version: node's in $(NODE), a virtual environment for each client.
NODE := .cache/node
CLIENTS := .cache/clients
OTHER_CLIENTS := $(patsubst tests/clients/%.txt,$(CLIENTS)/%/.installed,$(wildcard tests/clients/*.txt))
CHECKERS := $(if $(shell command -v npm),$(NODE)/.installed)

demo: $(VENV)/.installed-train
	@$(BIN)/hermes-rl demo $(DEMO_ARGS)

test: lint
	$(BIN)/python tests/run.py -m "not slow and not gpu" -n 3 --dist worksteal $(PYTEST_ARGS)

test-more: $(VENV)/.installed-more $(OTHER_CLIENTS) $(CHECKERS)
	$(BIN)/python tests/run.py -m "(slow or gpu) and not alone" -n 2 --dist worksteal $(PYTEST_ARGS)
	$(BIN)/python tests/run.py -m "slow and alone" $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The three checks by others' tools; test-more has them, too (those on node where npm is at hand).
conformance: $(VENV)/.installed-dev $(NODE)/.installed
	$(BIN)/python -m pytest tests/conformance/test_official_suite.py $(PYTEST_ARGS)

inspector: $(VENV)/.installed-dev $(NODE)/.installed
	$(BIN)/python -m pytest tests/conformance/test_inspector.py $(PYTEST_ARGS)

clients: $(VENV)/.installed-dev $(OTHER_CLIENTS)
	$(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

# Its stdout is JSON alone, so what an installation says goes to stderr.
bench:
	@$(MAKE) --no-print-directory $(VENV)/.installed-bench >&2
	@$(BIN)/python tests/bench/all.py $(BENCH_ARGS)

# Validated and packed by the official tool; the environment that the bundle runs in is made by who installs it.
bundle: $(MCPB)
	@$(PYTHON) bundle/make.py --mcpb $(MCPB) --output $(BUNDLE_DIR)

$(MCPB):
	@npm install --silent --no-audit --no-fund --prefix .cache/mcpb/$(MCPB_VERSION) @anthropic-ai/mcpb@$(MCPB_VERSION) >&2

clean:
	rm -rf $(VENV) .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@echo "Making $(VENV) with $(PYTHON) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	@$(PYTHON) -m venv $(VENV)

# torch by itself first, so that its build can be chosen; everything else by the pinned versions.
$(VENV)/.installed-torch: $(VENV)/bin/python constraints.txt
	@echo "Installing $(firstword $(TORCH)) (some hundred megabytes, a minute or more) ..."
	@$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.installed-train: $(VENV)/.installed-torch pyproject.toml constraints.txt
	@echo "Installing hermes-rl-mcp[train] ..."
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@$(PIP) install -e '.[train]' -c $(VENV)/constraints.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-train pyproject.toml constraints.txt
	@echo "Installing hermes-rl-mcp[train,wandb,dev] ..."
	@$(PIP) install -e '.[train,wandb,dev]' -c $(VENV)/constraints.txt
	@touch $@

# Extras whose tests are skipped without them.
$(VENV)/.installed-more: $(VENV)/.installed-dev
	@echo "Installing hermes-rl-mcp[train,wandb,dev,agent,browser] ..."
	@$(PIP) install -e '.[train,wandb,dev,agent,browser]' -c $(VENV)/constraints.txt
	@touch $@

# What we are measured against.
$(VENV)/.installed-bench: $(VENV)/.installed-dev
	@echo "Installing hermes-rl-mcp[train,wandb,dev,bench] ..."
	@$(PIP) install -e '.[train,wandb,dev,bench]' -c $(VENV)/constraints.txt
	@touch $@

$(NODE)/.installed: tests/conformance/package.json
	@echo "Installing node and the checkers of tests/conformance/package.json into $(NODE) ..."
	@mkdir -p $(NODE)
	@cp $< $(NODE)/
	@npm install --prefix $(NODE) --no-audit --no-fund --no-package-lock --loglevel=error
	@touch $@

$(CLIENTS)/%/.installed: tests/clients/%.txt
	@echo "Installing $< into $(@D) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check --no-input --quiet install -r $<
	@touch $@
