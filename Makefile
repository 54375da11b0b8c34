# Needs python3 (3.11 or newer) with pip, git and make; everything else is installed into this folder.

PYTHON   ?= python3
UV       := .uv/bin/uv
BIN      := .venv/bin
SETTINGS ?= samples/seedance.toml
DAY      ?= 2026-10-01
ONLY     ?=
PORT     ?= 4200
CHARGE   ?=
JOB      ?=
RESOURCE ?=
POLICY   ?= samples/tiers.toml
FOLDER   ?=

# Quiet and self-contained: no analytics, Prefect's files in this folder, patience with a slow first start.
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT := false
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS := 120
export PREFECT_HOME := $(CURDIR)/.prefect
export UV_PYTHON_DOWNLOADS := never
unexport PYTHONPATH

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install dev nightly try explain tier ui emulators check test unit integration browser soak bench lock clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

$(UV):
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target .uv 'uv==0.13.9'

.venv/pyvenv.cfg: | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv

# One stamp a set: `dev` contains `run`, so nothing is taken away again by the next `make nightly`. A sync takes away what its
# file does not name, torch and its kin among it: their stamp goes first, and what needs them installs them again.
.venv/.run: requirements/run.txt .venv/pyvenv.cfg
	@rm -f .venv/.torch
	@test -e .venv/.dev || $(UV) pip sync --quiet --python $(BIN)/python --require-hashes requirements/run.txt
	@test ! -e .venv/.dev || $(UV) pip sync --quiet --python $(BIN)/python --require-hashes requirements/dev.txt
	@touch $@

.venv/.dev: requirements/dev.txt .venv/pyvenv.cfg
	@rm -f .venv/.torch
	@$(UV) pip sync --quiet --python $(BIN)/python --require-hashes requirements/dev.txt
	@touch .venv/.run $@

# pip and not uv, for pip also looks where it is set up to (a folder of wheels with torch for CPUs, say). All that dev.txt pins
# is given to it as constraints: nothing there can move.
.venv/.torch: requirements/torch.txt .venv/.dev
	@sed -n 's/^\([A-Za-z0-9._-]*\)\(\[[^]]*\]\)\{0,1\}\(==[^\\]*\) \\$$/\1\3/p' requirements/dev.txt > .venv/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
	  --constraint .venv/constraints.txt --requirement requirements/torch.txt
	@touch $@

install: .venv/.run ## environment that runs the pipeline

dev: .venv/.torch ## the same, with what checks and tests need

nightly: .venv/.run ## one nightly run (DAY=… SETTINGS=…), without a server of its own
	@$(BIN)/python -m flows.nightly --settings $(SETTINGS) --day $(DAY)

try: .venv/.torch ## a small training run on this machine under the probe, and where its money went (a minute)
	@$(BIN)/python samples/try

explain: .venv/.run ## where the money of a charge went, or what a job paid for (CHARGE=…, JOB=… or RESOURCE=…)
	@$(BIN)/python -m flows.explain --settings $(SETTINGS) --day $(DAY) $(if $(CHARGE),--charge '$(CHARGE)') \
	  $(if $(JOB),--job '$(JOB)') $(if $(RESOURCE),--resource '$(RESOURCE)')

tier: .venv/.run ## what moving checkpoints to colder storage would save, a dry run (POLICY=… FOLDER=…)
	@$(BIN)/python -m flows.tier --settings $(SETTINGS) --policy $(POLICY) $(if $(FOLDER),--folder '$(FOLDER)')

ui: .venv/.run ## Prefect server, worker and deployments on 127.0.0.1 (PORT=…), until Ctrl-C
	@$(BIN)/python -m flows.ui --port $(PORT)

emulators: ## the Azure Blob emulator that tests start (npm)
	npm ci --silent --no-audit --no-fund --prefix tests/emulators

check: .venv/.torch ## lint, format, types, data dictionary
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m schemas.dictionary --check

test: .venv/.torch ## every test but the soak
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not soak"

unit: .venv/.torch ## the quick tests
	$(BIN)/python -m pytest -q tests/unit

integration: .venv/.torch ## flows, storage, wheel
	$(BIN)/python -m pytest -q -m "not soak" tests/integration

browser: .venv/.dev ## the Prefect UI and the page in headless Chromium
	$(BIN)/python -m pytest -q -m "not soak" tests/browser

soak: .venv/.torch ## random seeds, every kill point
	$(BIN)/python -m pytest -m soak --timeout 7200

bench: .venv/.torch ## one table of measurements (ONLY=name for a part)
	@$(BIN)/python -m tests.bench $(if $(ONLY),--only $(ONLY))

lock: $(UV) ## compile the requirement files from pyproject.toml
	$(UV) pip compile pyproject.toml --quiet --group run --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header -o requirements/run.txt
	$(UV) pip compile pyproject.toml --quiet --group dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header -o requirements/dev.txt

clean: ## remove environments and caches, not the lake
	rm -rf .uv .venv .prefect .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
