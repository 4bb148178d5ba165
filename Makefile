# setup   make .venv and install dpurt into it, only when that is stale
# demo    see it work on this machine: make demo ARGS="--help"
# test    the test suite: make test ARGS="-k zmq"; DPURT_NO_SKIP=1 turns skips into failures
# test-vm the tests that need RDMA and NVMe in the kernel, in a virtual machine: make test-vm ARGS="-k nvmet"; see tests/vm/testbed
# lint    ruff and mypy
# bench   all benchmarks, with their peers installed: make bench ARGS="--quick"
#
# Nothing here needs root, but test-vm to build its machine the first time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: setup demo test test-vm lint bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test,report]'
	touch $@

demo: setup
	$(BIN)/dpurt demo $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-vm: setup
	tests/vm/run $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup $(VENV)/.installed-bench
	$(BIN)/dpurt bench all $(ARGS)

$(VENV)/.installed-bench: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
