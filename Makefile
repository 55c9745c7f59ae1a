# `make demo` and `make test` need Python 3.11 or later and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-all lint bench clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvkit needs Python 3.11 or later; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras, so that nothing is installed twice.
$(VENV)/kvkit.%: $(BIN)/python setup.cfg pyproject.toml
	$(PIP) --editable '.[$*]'
	@touch $@

$(VENV)/kvkit: $(BIN)/python setup.cfg pyproject.toml
	$(PIP) --editable .
	@touch $@

demo: $(VENV)/kvkit
	$(BIN)/python examples/demo.py

test: $(VENV)/kvkit.test
	$(BIN)/python -m pytest -m "not slow"

test-all: $(VENV)/kvkit.test
	$(BIN)/python -m pytest --cov --cov-report=term

lint: $(VENV)/kvkit.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# With the peers, torch among them: a large download.
bench: $(VENV)/kvkit.bench
	$(BIN)/kvkit bench --json benchmarks/results
	$(BIN)/python benchmarks/table.py

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out
