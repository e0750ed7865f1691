# `make demo` and `make test` need nothing but Python 3.11 or newer: they make .venv when it is missing.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test test-slow lint bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tunesmith needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(RUN)/tunesmith demo

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN)/pytest -n 2 -m "not slow"

test-slow: $(INSTALLED)
	$(RUN)/pytest -m slow

lint: $(INSTALLED)
	$(RUN)/ruff format --check src tests examples benchmarks
	$(RUN)/ruff check src tests examples benchmarks
	$(RUN)/pyright --pythonpath $(RUN)/python

bench: $(INSTALLED)
	$(RUN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) build dist runs
