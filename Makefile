# `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEV    := $(VENV)/development
RUN    := $(BIN)/vllm-repro run --expect any $(addprefix --scenarios ,$(SCENARIOS))

# Tests start the command and its servers hundreds of times. Without cached bytecode each start
# compiles it again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.SUFFIXES:
.PHONY: help install search-night nightly nightly-cpu test features test-live lint format bench bench-loadgen clean images check test-docker test-scenarios test-browser test-by-hand test-openai keep faults faults-quick mutants compose catalogue known-releases

help: ## list the targets
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 26

# The command alone is enough to reproduce a bug. Each environment is made once, and again when its
# inputs change.
$(BIN)/vllm-repro: pyproject.toml constraints.txt
	@echo "installing vllm-repro into $(VENV) (once, about a minute)"
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)  # also over a .venv that uv made without pip
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(DEV): $(BIN)/vllm-repro
	@echo "installing the development tools into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(BIN)/vllm-repro $@

install: $(DEV) ## make .venv with the command and the development tools

repro-%: $(BIN)/vllm-repro ## reproduce a scenario on the best server of this machine (SCENARIOS=DIR: also of yours)
	@$(RUN) $* --server auto

lab-%: $(BIN)/vllm-repro ## reproduce it in real vLLM on the CPU, parts of it replaced
	@$(RUN) $* --server lab

rehearse-%: $(BIN)/vllm-repro ## try a scenario on the rehearsal engine, in seconds
	@$(RUN) $* --server rehearsal

nightly: $(BIN)/vllm-repro ## run every scenario that this machine can run (harness/vllm_repro_nights/docs/nightly.md)
	@$(BIN)/vllm-repro nightly $(ARGS)

nightly-cpu: $(BIN)/vllm-repro ## the same without a GPU, in an hour: the newest release, as it is or in the lab (ARGS='--vllm SOURCE')
	@$(BIN)/vllm-repro nightly --server cpu --max-time 55m --answer-stall 60 --least-disk 10 $(ARGS)

search-night: $(BIN)/vllm-repro ## search the newest vLLM's whole engine for an hour on two cores, after the seeds of earlier nights (ARGS='--vllm SOURCE')
	@$(BIN)/vllm-repro explore --engine --go-on --for 1h --jobs 2 $(ARGS)

# Five workers: the tests wait for servers as much as they compute, and each collects them all.
test: $(DEV) ## run all tests that need no Docker, browser or real vLLM
	@$(BIN)/python -m pytest tests -n 5 -p no:logging --dist worksteal --ignore tests/live -m "not docker and not live and not browser"

test-random: $(DEV) ## run the property tests with other examples each time (the nightly job does)
	@$(BIN)/python -m pytest tests -n 2 --dist worksteal --ignore tests/live -m "hypothesis and not docker" --hypothesis-profile random

features: $(DEV) ## delete each feature in a copy, and then all of them, and test what is left
	@$(BIN)/python -m tests.features $(ARGS)

test-scenarios: $(DEV) ## run every scenario and arm on the rehearsal engine
	@VLLM_WATCHDOG_TIME_S=0.3 $(BIN)/python -m pytest scenarios -n 6 --scenario-server rehearsal  # it mostly waits

test-browser: $(DEV) ## test the pages in a headless Chromium (Debian: chromium)
	@$(BIN)/python -m pytest tests --ignore tests/live -m browser

test-docker: $(DEV) images ## test against a real Docker Engine
	@$(BIN)/python -m pytest tests --ignore tests/live -n 2 --dist worksteal -m docker

test-live: $(DEV) ## test real vLLM releases on this CPU: what changed, and two canaries (LIVE=all: all; downloads gigabytes)
	@$(BIN)/python -m pytest tests -n 2 --dist worksteal --durations 12 -m "live and not by_hand"

keep: $(DEV) ## keep the runs of the last live tests in tests/data/kept, for machines without them
	@$(BIN)/python -m tests.live.kept

test-by-hand: $(DEV) ## test more real releases, also in containers (too slow for CI)
	@$(BIN)/python -m pytest tests -m by_hand

test-openai: $(DEV) ## test what uses the openai SDK with its oldest release, and the newest before and after 3
	@set -e; for release in ==1.60.0 '<3' '<4'; do \
		folder="$(VENV)/openai/$$release"; \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --target "$$folder" --upgrade "openai$$release"; \
		PYTHONPATH="$$folder" $(BIN)/python -c 'import openai; print("openai", openai.__version__)'; \
		PYTHONPATH="$$folder" $(BIN)/python -m pytest tests/core/client/test_sdk.py tests/core/test_api.py -n 2 --dist worksteal; \
	done

images: ## build the images of the rehearsal engine
	@fixtures/images/build.sh rehearsal

compose: $(DEV) ## regenerate docker-compose.yml from the scenarios
	@$(BIN)/python -m vllm_repro.servers.compose_services > docker-compose.yml.new && mv docker-compose.yml.new docker-compose.yml

catalogue: $(DEV) ## regenerate catalogue.md, .html and .json in reports/results
	@$(BIN)/python -m vllm_repro_search.versions.catalogue

check: $(BIN)/vllm-repro ## find mistakes in the scenario files
	@$(BIN)/vllm-repro check
	@$(BIN)/python -m tests.budgets

lint: $(DEV) ## run ruff, mypy, and the checks of scenarios and workflows
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m tests.rows
	@$(BIN)/vllm-repro check
	@$(BIN)/python -m tests.budgets
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --builtin-schema vendor.github-actions action.yml
	@$(BIN)/zizmor --offline --quiet --no-progress --config .github/zizmor.yml .github/workflows action.yml

format: $(DEV) ## format and fix with ruff
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(DEV) ## run the benchmarks
	@$(BIN)/python benchmarks/detection.py
	@$(BIN)/python benchmarks/overhead.py

bench-loadgen: $(DEV) ## compare the measuring client with a bare one and `vllm bench serve` (a minute)
	@$(BIN)/python -m benchmarks.loadgen $(ARGS)

faults: $(DEV) images ## break live runs on purpose and write reports/results/reliability.md (an hour)
	@$(BIN)/python -m benchmarks.faults --write
	@$(BIN)/python -m benchmarks.kills --write

faults-quick: $(DEV) ## break a rehearsal once by each fault
	@$(BIN)/python -m benchmarks.faults --kinds rehearsal --quick

mutants: $(DEV) ## change the pure core in one place at a time, count what no test notices, write reports/results/reliability.md (half an hour)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[mutants]'
	@$(BIN)/python -m benchmarks.mutants --write

known-releases: $(DEV) ## read vLLM's releases from the package index again
	@$(BIN)/python -m vllm_repro.releases.known

clean: $(BIN)/vllm-repro ## remove orphans of killed runs, and build products
	@$(BIN)/vllm-repro clean --yes
	@rm -rf .mutants .mypy_cache .pytest_cache .ruff_cache dist build
