# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both create .venv on first use; PYTHON=python3.12 chooses the interpreter.
PYTHON ?= python3
# Most of the tests wait for real processes: two files at a time take little more than half as long.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test chaos check bench install clean
.DEFAULT_GOAL := help

help: ## show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(INSTALLED) ## train a real MoE, break it three times, prove that nothing was lost
	$(BIN)/python -m deploy.demo $(DEMO)

test: $(INSTALLED) ## run every test that this machine can run
	@sh deploy/bootstrap.sh packages
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not chaos or brief" $(TESTS)

chaos: $(INSTALLED) ## break a real Slurm and a real S3 server in every way, about 45 minutes
	@sh deploy/bootstrap.sh packages
	$(BIN)/python -m pytest -m chaos tests/chaos tests/faults tests/integration $(TESTS)

check: $(INSTALLED) ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(INSTALLED) ## measure saving, training and recovery against named peers (40 min)
	$(BIN)/python -m tests.bench.checkpoint
	$(BIN)/python -m tests.bench.train
	$(BIN)/python -m tests.bench.mttr

install: $(INSTALLED) ## create .venv only

$(INSTALLED): pyproject.toml deploy/bootstrap.sh
	@sh deploy/bootstrap.sh venv "$(PYTHON)" "$(VENV)"
	@touch $@

clean: ## remove everything that was made here
	rm -rf $(VENV) build dist *.egg-info demo-out runs .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
