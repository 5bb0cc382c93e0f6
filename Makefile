# Every target sets up what it needs, also in a fresh clone.
#
#   make demo       train small models on real text, and compare the speed with eager rotation
#   make test       the tests of the library, except slow ones, which rarely fail if the others pass
#   make test-tools the tests of the tools, the benchmarks, other libraries' models and the repository, except slow ones
#   make test-slow  the slow tests of all these
#   make test-rest  all tests that make test leaves out: of the tools, and slow ones
#   make emulate    the Triton kernels, compiled for four kinds of GPU and executed on the CPU (an hour)
#   make lint       formatting, lint, imports, types
#   make check      lint, spelling, documentation and the code in it
#   make site       build the documentation, and serve it until Ctrl-C
#   make coverage   which lines and branches of src/ all tests run (half an hour; ARGS as for test)
#   make harden     a search for faults of memory, races and leaks (long; ARGS=--quick: two minutes)
#   make mutants    small faults, planted one at a time: the first test that notices each (ARGS=--help)
#   make wheel      dist/tightrope-*.whl
#   make wheels     the source archive and this machine's wheel of a release, checked, in dist/: docs/release.md
#   make versions   the tests with many versions of Python and torch (downloads gigabytes of CUDA): docs/versions.md
#   make tritons    the tests of the Triton kernels with Triton 3.4 to 3.9 (an hour)
#   make clean      remove what the other targets made, except the results in tightrope-demo/
#
#   PYTHON=python3.12   the Python that creates .venv (3.10 or later)
#   WORKERS=4           number of test processes
#   ARGS='-k half'      more arguments for pytest (test, test-tools, test-slow), nox (versions), the demo or harden

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BASE := $(VENV)/base.stamp
DEMO := $(VENV)/demo.stamp
TOOLS := $(VENV)/tools.stamp
READY := $(VENV)/ready.stamp
# A variable, because a comma would end an argument of `call`.
EVERYTHING := .[tools,dev]
# What other builds and other packages need is in noxfile.py.
NOX := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/nox
BUILD := $(BIN)/python setup.py --quiet build_native --inplace

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-tools test-slow test-rest emulate versions tritons lint check coverage harden mutants site wheel wheels clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# It needs torch, the kernel and matplotlib, so it does not wait for the tools of the tests.
demo: $(if $(wildcard $(READY)),$(READY),$(DEMO))
	$(BIN)/python examples/demo.py $(ARGS)

# One thread per process: more would only compete for the cores. Tests of threading set their own
# number of threads. DOCUMENTS are tested in `make check`.
DOCUMENTS := tests/repository/test_docs.py tests/repository/test_site.py
TEST := -n $(WORKERS) --dist worksteal $(DOCUMENTS:%=--ignore=%)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TEST)

test: $(READY)
	$(PYTEST) -m 'not slow and not tools' $(ARGS)

test-tools: $(READY)
	$(PYTEST) -m 'tools and not slow' $(ARGS)

test-slow: $(READY)
	$(PYTEST) -m 'slow and not emulated' $(ARGS)

# All that `make test` leaves out, in one run.
test-rest: $(READY)
	$(PYTEST) -m '(slow or tools) and not emulated' $(ARGS)

# An hour: compiled GPU code, executed on the CPU.
emulate: $(READY)
	$(PYTEST) -m emulated $(ARGS)

# A failed test does not stop the report.
coverage: $(READY)
	rm -rf build/coverage
	mkdir -p build/coverage
	-OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(TEST) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# Run this before a release. After a change to code that torch.compile traces, that calls torch from C++ or to a
# kernel for Triton, run the oldest pair: ARGS='--python 3.10 --tags torch-2.10'.
versions: $(READY)
	$(MAKE) wheel
	$(NOX) --session versions $(ARGS)

tritons: $(READY)
	$(NOX) --session tritons $(ARGS)

# mypy needs torch, for its types.
lint: $(TOOLS)
	@! git grep -nE '^(<{7}|>{7}) ' || { echo "a merge has left its marks in these lines"; exit 1; }
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# With --quiet, mkdocs does not count warnings, and dead links pass --strict.
check: lint $(READY)
	$(BIN)/codespell . .ci/*
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal \
		--doctest-modules src/tightrope src/tightrope_tools $(DOCUMENTS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site

site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

harden: $(READY)
	$(NOX) --tags harden -- $(ARGS)

# Without what the second asks for: it imports nothing of it here.
mutants: $(READY)
	$(PIP) install --quiet --no-deps -c $(CONSTRAINTS) universalmutator
	OMP_NUM_THREADS=1 $(BIN)/python -m ci.mutation $(ARGS)

wheel: $(READY)
	rm -rf dist
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist

wheels: $(READY)
	$(NOX) --session wheels

clean:
	rm -rf $(VENV) build dist site src/*.egg-info src/tightrope/_native.*
	rm -rf .hypothesis .mypy_cache .nox .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. torch and the build tools come first: the package is built without isolation,
# against this torch.
$(BASE): constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "tightrope needs Python 3.10 or later, but '$(PYTHON)' is older or missing. Choose one: make PYTHON=python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
		echo "'$(PYTHON)' cannot create environments: it lacks venv or ensurepip. On Debian and Ubuntu" >&2; \
		echo "install the package python3-venv. Or choose another Python: make PYTHON=python3.12" >&2; \
		exit 1; }
	@echo "Setting up $(VENV): torch first, then packages, while the kernel compiles (2 to 6 minutes in all)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c $(CONSTRAINTS) torch
	$(PIP) install --quiet -c $(CONSTRAINTS) setuptools wheel
	@touch $@

# The kernel compiles in the background while pip installs the rest. That prints nothing, so the rules
# below run the build once more, visibly: it reuses all files that are compiled already, and prints the
# reason if it fails.
define install
	$(BUILD) >/dev/null 2>&1 & \
		TIGHTROPE_NATIVE=0 $(PIP) install --quiet -c $(CONSTRAINTS) --no-build-isolation \
		$(1); status=$$?; wait; exit $$status
endef

$(DEMO): $(BASE) pyproject.toml setup.py $(wildcard csrc/*)
	$(call install,-e . matplotlib)
	$(BUILD)
	@touch $@

$(TOOLS): $(BASE) pyproject.toml setup.py
	$(call install,-e '$(EVERYTHING)')
	@touch $@

$(READY): $(TOOLS) $(wildcard csrc/*)
	$(BUILD)
	@touch $@
