# make train   two CPU ranks train a small network on scanned digits
# make test    style, types and all tests
# make check   style, types and the tests that start no process
# make bench   side-by-side measurements (see benchmarks/)
# make test-gpu    the tests that need GPUs; those that this machine cannot run are counted
# make bench-gpu   step times beside ddp, one GPU a rank: make bench-gpu GPUS=8
# make clean   remove what the other targets made, the environment included
#
# The first call makes .venv and installs into it; later calls start at once.
# Another Python: make PYTHON=python3.12 train. More arguments: make train ARGS="trainer.max_epochs=3".

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
GPUS   ?= 2
JOBS   ?= 3
# What the second of Lightning's packages, pytorch_lightning, is tried with, before everything is with the first.
OTHER_PACKAGE_TESTS := tests/unit/test_internals_engine.py tests/unit/test_internals_loaders.py \
	tests/unit/test_internals_runs.py tests/unit/test_internals_stacks.py tests/unit/test_lightning_cli.py \
	$(addprefix tests/multi_process/,step/test_trainer.py step/test_trainer_fit.py data/test_loaders.py \
	optim/test_zero_failures.py)
BIN    := $(VENV)/bin
# One thread a rank: several ranks share few cores, and results do not depend on their number. Compiled files are
# kept also where the environment says otherwise: each of many processes would compile the package and the tests.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
STAMP  := $(VENV)/.installed

.PHONY: train test test-gpu check lint bench bench-gpu install clean
.DEFAULT_GOAL := train

install: $(STAMP)

# The stamp is older than these files when what is installed may have changed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("lightning_dp needs Python 3.10 or newer; name one with make PYTHON=...") if sys.version_info < (3, 10) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time this downloads PyTorch and takes some minutes)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

train: $(STAMP)
	$(BIN)/lean-ddp train experiment=digits trainer=cpu_sim $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Most tests wait more than they compute, for ranks that start or end, so a few run at a time: make JOBS=0 test for
# one after the other.
test: lint
	$(PYTEST) -n $(JOBS) --dist worksteal -p tests.support.other_package \
		-m "not gpu and not multi_gpu" -k "not compile and not precision" $(OTHER_PACKAGE_TESTS)
	$(PYTEST) -n $(JOBS) --dist worksteal $(ARGS)

test-gpu: $(STAMP)
	$(PYTEST) -m "gpu or multi_gpu" $(ARGS)

check: lint
	$(PYTEST) tests/unit $(ARGS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

bench-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.step_time --device cuda --ranks $(GPUS) --steps 50 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info outputs multirun lightning_logs
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
