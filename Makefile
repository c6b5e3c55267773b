# make demo, make test and make test-fast set up everything they need, in .venv.

PYTHON ?= python3
ENGINE ?= jacobi
VENV := .venv
UV := $(VENV)/bin/uv
READY := $(VENV)/.ready

.PHONY: help demo test types all-tests test-fast test-hostile test-lerobot coverage clean

help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/' | expand -t 14

demo: $(READY)   ## a video of the shipped model on this machine's CPU, in outputs/demo; ENGINE=vllm for vLLM
	$(VENV)/bin/terra generate experiment=demo engine=$(ENGINE) output=outputs/demo overwrite=true

test: $(READY)   ## lint, types, import contracts, tests
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(MAKE) --no-print-directory --jobs=2 --keep-going types all-tests

# Beside the tests, where these wait for something: half a minute.
types: $(READY)
	nice $(VENV)/bin/pyright

# One thread in each of the two processes: more threads than cores wait for each other.
all-tests: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -m "not hostile" --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-fast: $(READY)  ## the tests without vLLM, browser, training and notebooks: two minutes
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -m "not slow and not hostile" --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-hostile: $(READY)  ## the long attacks, soaks and kills, which make test leaves out
	$(VENV)/bin/pytest -m hostile

# 0.4.4 writes and edits version 3.0 of LeRobot's format, 0.3.3 writes version 2.1.
test-lerobot: $(READY)  ## datasets that the lerobot package writes, imported; installs it beside Terra
	for version in 0.3.3 0.4.4; do \
		$(UV) venv --quiet --allow-existing --python $(VENV)/bin/python $(VENV)/lerobot/$$version && \
		$(UV) pip install --quiet --python $(VENV)/lerobot/$$version/bin/python --override tests/real/overrides.txt \
			"lerobot==$$version" || exit 1; \
	done
	TERRA_LEROBOT=$(VENV)/lerobot/0.4.4/bin/python TERRA_LEROBOT_21=$(VENV)/lerobot/0.3.3/bin/python \
		$(VENV)/bin/pytest tests/real/check_lerobot.py

coverage: $(READY)  ## the tests again, and the lines that they reach; slower
	$(VENV)/bin/pytest -m "not hostile" --cov --cov-report=term:skip-covered

clean:           ## remove the environment and what was generated
	rm -rf $(VENV) outputs

# --compile-bytecode: the first start would take half a minute longer without.
$(READY): pyproject.toml .ci/constraints.txt .ci/overrides.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"Terra needs Python 3.11 to 3.13, got {v[0]}.{v[1]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(UV) pip install --python $(VENV)/bin/python --compile-bytecode --constraint .ci/constraints.txt --override .ci/overrides.txt \
		--group dev --editable '.[bags,cpu,doom,gym,notebooks,ray,record,refiner,serve,train]'
	touch $@
