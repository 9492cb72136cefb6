# make demo | test | lab | bench | check | clean
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for-use
DEV_STAMP := $(VENV)/.installed-for-tests

.PHONY: demo test lab bench check format clean help

help:
	@echo "make demo   install, stream the bundled model, compare policies, write traces/demo/report.html"
	@echo "make test   install and run the whole test suite"
	@echo "make lab    install and open JupyterLab on the first notebook"
	@echo "make bench  measure speed and memory (several minutes, 7 GiB of disk)"
	@echo "make check  format, lint, types"
	@echo "make clean  remove the environment and caches"

demo: $(STAMP)
	@$(BIN)/bmoe-lab demo

lab: $(STAMP)
	$(BIN)/jupytext --to ipynb --update notebooks/*.py
	$(BIN)/jupyter lab notebooks/01_explore_routing.ipynb

# The browser first and by itself: what it measures must not wait for another test's cores.
test: $(DEV_STAMP) check
	$(BIN)/python -m pytest tests/browser
	$(BIN)/python -m pytest -n 2 --dist loadgroup --ignore=tests/browser

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV_STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist

# The tools that the build needs are looked for first: pip's own message for a missing compiler
# is several hundred lines long.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..."; exit 1; }
	@command -v c++ >/dev/null || { echo "A C++ compiler is needed to build llama.cpp (Debian: apt-get install g++)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing; the first time llama.cpp is compiled, which takes about 4 minutes on 2 cores."
	$(BIN)/python -m pip install --quiet -e '.[lab]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	@echo "Installing; the first time llama.cpp is compiled, which takes about 4 minutes on 2 cores."
	$(BIN)/python -m pip install --quiet -e '.[lab,dev]'
	@touch $@
