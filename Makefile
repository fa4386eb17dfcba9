# Everything runs in a virtual environment of its own, made on first use. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
PIP = $(RUN) -m pip install --quiet --disable-pip-version-check

# Ranks are processes: without the files, each compiles every module that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test slow soak drawn models tsan lint bench wheel clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9%-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One stamp for each set of extras, so that a changed pyproject.toml is installed again.
$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@touch $@
$(VENV)/.demo: $(VENV)/.python pyproject.toml
	$(PIP) --no-compile --editable '.[cpu,emulated,plot]'
	@touch $@
$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(PIP) --no-compile --editable '.[dev]'
	@touch $@

demo: $(VENV)/.demo  ## run everything once, check it, draw a timeline (out/)
	$(RUN) -m kosmos_raw demo

# A file of tests stays with one of the two workers: what its tests build once is built once.
test: $(VENV)/.dev  ## every test that this machine can run
	$(RUN) -m pytest -n 2 --dist loadfile

test-%: $(VENV)/.dev  ## the same operators on N ranks under mpirun: make test-8
	$(VENV)/bin/mpirun -n $* $(RUN) -m pytest -m mpi tests/mpi

slow: $(VENV)/.dev  ## tests that take minutes: MoE layers in the emulator, and of every model in MXFP8
	$(RUN) -m pytest -m slow

soak: $(VENV)/.dev  ## every operator many times, on the CPU and emulated, with late ranks (an hour)
	$(RUN) -m tests.soak

drawn: $(VENV)/.dev  ## operators and MoE layers drawn at random, on the CPU (five minutes)
	$(RUN) -m tests.drawn --count 1000 --seconds 300 --seed $$(date +%s)

models: $(VENV)/.dev  ## MoE layers of nine models, scaled down, forward and backward, on the CPU and emulated
	$(RUN) -m tests.models

tsan: $(VENV)/.dev  ## histories of every operator on threads under ThreadSanitizer (five minutes)
	$(RUN) tests/forced/threads.py

lint: $(VENV)/.dev  ## ruff and mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/.demo  ## measure what this machine has
	$(RUN) -m kosmos_raw bench gemm

wheel: $(VENV)/.dev  ## dist/*.whl, with gfx950 code objects in it
	$(RUN) -m build --wheel --no-isolation

clean:  ## remove what was built here; the cache of kernels too
	$(if $(wildcard $(RUN)),-$(RUN) -c "import shutil; from kosmos_raw.build import cache; shutil.rmtree(cache.folder(), True)")
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
