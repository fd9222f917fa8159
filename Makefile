# The one door for people. `make help` lists what there is.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/vllm-repro run --expect any

# A test starts the command and its servers some thousand times: bytecode that may not be written is compiled each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.SUFFIXES:
.PHONY: help install nightly test test-live lint format bench clean images check compose test-docker test-scenarios test-browser test-by-hand

help: ## this list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 26

# The environment is made once, and again when what it is made from has changed.
$(BIN)/vllm-repro: pyproject.toml constraints.txt
	@echo "making $(VENV) (once)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(BIN)/vllm-repro ## make .venv with the command and everything for development

repro-%: $(BIN)/vllm-repro ## reproduce a scenario with the best server that this machine has
	@$(RUN) $* --server auto

lab-%: $(BIN)/vllm-repro ## reproduce it in real vLLM on the CPU, with its CUDA parts replaced
	@$(RUN) $* --server lab

rehearse-%: $(BIN)/vllm-repro ## show a scenario at work on the rehearsal engine, in seconds
	@$(RUN) $* --server rehearsal

reference-%: $(BIN)/vllm-repro ## record anew what real releases do with the seeded combinations of its reference table
	@PYTHONPATH=fixtures $(BIN)/python -m reference $*

nightly: $(BIN)/vllm-repro ## every scenario that this machine can run, at the newest nightly image: green, red or amber (docs/nightly.md)
	@$(BIN)/vllm-repro nightly $(ARGS)

test: $(BIN)/vllm-repro ## all tests that need no Docker, no browser and no real vLLM
	@$(BIN)/python -m pytest tests -n 2 --dist worksteal -m "not docker and not live and not browser"

test-scenarios: $(BIN)/vllm-repro ## every scenario and arm as a pytest test, on the rehearsal engine
	@$(BIN)/python -m pytest scenarios -n 2 --scenario-server rehearsal

test-browser: $(BIN)/vllm-repro ## the pages in a real Chromium, headless (Debian: apt-get install chromium)
	@$(BIN)/python -m pytest tests -m browser

test-docker: $(BIN)/vllm-repro images ## the tests against a real Docker Engine
	@$(BIN)/python -m pytest tests -n 2 --dist worksteal -m "docker and not live"

test-live: $(BIN)/vllm-repro ## real vLLM releases on this CPU (the first time installs them: gigabytes)
	@$(BIN)/python -m pytest tests -n 2 --dist worksteal -m "live and not by_hand"

test-by-hand: $(BIN)/vllm-repro ## more real releases, in containers too: what CI has no minutes for
	@$(BIN)/python -m pytest tests -m by_hand

images: ## build the images of the rehearsal engine
	@fixtures/images/build.sh rehearsal

compose: $(BIN)/vllm-repro ## write docker-compose.yml anew from the scenarios
	@$(BIN)/python -m vllm_repro.servers.compose_services > docker-compose.yml.new && mv docker-compose.yml.new docker-compose.yml

check: $(BIN)/vllm-repro ## find mistakes in the scenario files
	@$(BIN)/vllm-repro check

lint: $(BIN)/vllm-repro ## ruff, mypy strict, scenario files, workflows
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/vllm-repro check
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/zizmor --offline --quiet --no-progress .github/workflows

format: $(BIN)/vllm-repro ## let ruff format and mend what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(BIN)/vllm-repro ## the figures in benchmarks/
	@$(BIN)/python benchmarks/detection.py
	@$(BIN)/python benchmarks/overhead.py
	@$(BIN)/python benchmarks/prompts.py
	@$(BIN)/python -m benchmarks.nights
	@$(BIN)/python -m benchmarks.rendering

clean: $(BIN)/vllm-repro ## remove what killed runs left, and build products
	@$(BIN)/vllm-repro clean --yes
	@rm -rf .mypy_cache .pytest_cache .ruff_cache dist build
