# Every target does its own set-up: virtual environment, locked packages, converted default model.
# The first run takes minutes and shows what it does; later runs find the stamp and start at once.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
READY := .venv/outrider-ready
# Tested alone and first, because only it must be covered wholly (see pyproject.toml).
FLOOR0 := tests/unit/workers/speculation
# A run that hangs in native code, where pytest cannot interrupt it, ends here all the same.
LIMIT := timeout --foreground --kill-after=30 3100

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup serve test check fix bench lock

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## Set up everything, and no more

serve: $(READY)  ## Start the server; ARGS="--port 9000 --config FILE"
	$(BIN)/outrider serve $(ARGS)

test: check  ## Run the checks and all tests; ARGS="-k name" for some
ifeq ($(ARGS),)
	$(LIMIT) $(BIN)/pytest $(FLOOR0) --cov
	$(LIMIT) $(BIN)/pytest --ignore=$(FLOOR0)
else
	$(LIMIT) $(BIN)/pytest $(ARGS)
endif

check: $(READY)  ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(READY)  ## Apply what the linter and the formatter can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## Measure decoding; ARGS="--prompts FILE --arms plain,code --json OUT"
	$(BIN)/outrider bench decode $(ARGS)

lock:  ## Resolve pyproject.toml anew and write requirements.lock
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install '.[dev]'
	{ head -n 2 requirements.lock; \
	  .venv-lock/bin/pip freeze --all --exclude outrider --exclude pip | \
	  sed 's/+[a-z0-9.]*$$//' | grep -v -e '^nvidia-' -e '^cuda-' -e '^triton=' \
	    -e '^xgrammar=' -e '^apache-tvm-ffi='; } > .venv-lock/lock
	mv .venv-lock/lock requirements.lock
	rm -rf .venv-lock build

$(READY): requirements.lock requirements-no-deps.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "outrider needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -r requirements.lock
	$(BIN)/python -m pip install --no-deps -r requirements-no-deps.lock
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	$(BIN)/outrider models fetch
	touch $@
