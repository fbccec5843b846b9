# `make demo` and `make test` need Python 3.11 or newer and pip, nothing else; a C++ compiler is used where there is one.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_FOR_DOCS := $(VENV)/.ready-for-docs
LOCK = $$($(BIN)/python -c 'import sys; print("-c constraints.txt" if sys.version_info[:2] == (3, 11) else "")')

.PHONY: help demo test test-all lint types layers doctest docs clean

help:
	@echo "make demo     train a small model on 4 processes, one of them late, and report (runs/demo)"
	@echo "make test     the tests, doctests included, but for those marked long"
	@echo "make test-all the whole test suite: browsers, network namespaces, long runs of many processes too"
	@echo "make lint | types | layers | doctest    one check each"
	@echo "make docs     the documentation as a website (build/docs/index.html)"
	@echo "make clean    remove $(VENV) and build products"

demo: $(READY)
	$(BIN)/python -m experiments.examples.demo --workdir runs/demo

# Files of tests are spread over the cores, in the order of their names: the last are quick, so no core waits long.
SPREAD := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(READY)
	JAXPACE_QUICK_TESTS=1 $(BIN)/python -m pytest $(SPREAD) -m "not long"

test-all: $(READY)
	$(BIN)/python -m pytest $(SPREAD)

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

doctest: $(READY)
	$(BIN)/python -m pytest -p tests.conftest jaxpace

# Nothing is fetched while building. A page that is in no table of contents, or a link that leads nowhere, is an error.
docs: $(READY_FOR_DOCS)
	$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --nitpicky -q -b html docs build/docs
	@echo "Open build/docs/index.html"

# The lock is for Python 3.11; other versions get what fits them. The environment is made anew when any of these changes.
$(READY): setup.py pyproject.toml constraints.txt $(wildcard jaxpace/observation/clocks/native/*.cc)
	@test -n "$(PYTHON)" || { echo "jaxpace needs Python 3.11 or newer: none found on PATH. Or: make PYTHON=/path/to/python"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxpace needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv --clear $(VENV) || \
	  { echo "$(PYTHON) has no working venv module; on Debian and Ubuntu: apt install python3-venv"; exit 2; }
	@echo "Installing jaxpace and what its tests and examples need"
	$(BIN)/python -m pip install --disable-pip-version-check $(LOCK) -e ".[examples,test,dev]"
	@$(BIN)/python -c 'from jaxpace.observation.clocks import resolve_clock; clock = resolve_clock(); \
	  print("Clock:", clock.name + ".", clock.notice)'
	@touch $@

# Sphinx is installed only where it is wanted, without building jaxpace once more.
$(READY_FOR_DOCS): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check $(LOCK) \
	  $$($(BIN)/python -c 'from importlib import metadata; print(*(line.split(";")[0].replace(" ", "") for line in \
	  metadata.requires("jaxpace") if "extra == \"docs\"" in line))')
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
	rm -f jaxpace/observation/clocks/native/*.so
