# Every target works from a bare clone: the environment is made when it is missing or out of date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed

S3_TESTS := $(addprefix tests/infra/test_,store.py store_s3.py store_faults.py log.py objects.py probe.py) \
	tests/flows/test_s3_run.py

# vLLM has an environment of its own. On a GPU: make vllm VLLM_PACKAGE=vllm==0.32.0
VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.installed
VLLM_PACKAGE ?=

.PHONY: run test check lint test-slow test-ceph test-postgres vllm test-vllm bench clean up down

$(READY): requirements.lock pyproject.toml
	@echo "installing into $(VENV): 2.5 GB, some minutes, once"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $(READY)

install: $(READY)

run: $(READY)  ## train the tiny model: about three minutes on two cores
	$(BIN)/rollflow run flows/runs/tiny.toml

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check: lint test

test-slow: $(READY)  ## minutes: downloads a real model, kills real runs at many moments
	$(BIN)/python -m pytest -m "slow and not gpu"

test-ceph: $(READY)  ## the store, its records and short runs on a Ceph gateway out of Debian packages (66 MB, once)
	ROLLFLOW_TEST_S3=ceph $(BIN)/python -m pytest -m "not gpu" $(S3_TESTS)

test-postgres: $(READY)  ## a run with Prefect and MLflow on a PostgreSQL server of its own
	$(BIN)/python -m pytest -m "not gpu" tests/infra/test_databases.py tests/flows/test_postgres.py

$(VLLM_READY): requirements-vllm.lock
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
ifeq ($(VLLM_PACKAGE),)
	$(VLLM)/bin/python -m pip install --quiet "$$(grep ^torch== requirements-vllm.lock)"
	$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement requirements-vllm.lock
else
	$(VLLM)/bin/python -m pip install --quiet $(VLLM_PACKAGE) "$$(grep ^pyarrow== requirements-vllm.lock)"
endif
	touch $(VLLM_READY)

vllm: $(VLLM_READY)  ## the environment of the vLLM engine: 3.4 GB, a minute or two of downloading

test-vllm: $(READY) $(VLLM_READY)  ## the real vLLM: its weights, a run through it, kills of its processes
	$(BIN)/python -m pytest -n 0 -m slow tests/flows/test_vllm.py

bench: $(READY)
	$(BIN)/python -m tests.benchmarks.run

up: $(READY)
	$(BIN)/rollflow up

down: $(READY)
	$(BIN)/rollflow down

clean:
	rm -rf $(VENV) $(VLLM) build *.egg-info .pytest_cache .ruff_cache .hypothesis
