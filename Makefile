# Two commands for a machine that has only Python, pip and make:  make demo,  make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo bench test docs reference quick soak floors lint format types check wheel package clean
help:                     ## list these commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

demo: $(VENV)/.installed  ## make a toy data set, train on it, show what training brought
	$(BIN)/listwise demo

# What to measure, and its options: make bench PART="search --sizes 100000"
PART := summary
bench: $(VENV)/.installed-dev ## measure speed and memory on this machine
	$(BIN)/python -m benchmarks $(PART)

# Tests start many processes: without compiled files each of them would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

# Files side by side and in their order: one more than there are cores, because some tests mostly wait, and
# at most four for memory's sake (up to 3 GB each).
SIDES := $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')
test: $(VENV)/.installed-dev ## run every test
	$(BIN)/python -m pytest --numprocesses $(SIDES) --dist loadfile --no-loadscope-reorder

# The parts that most changes touch, without what takes long.
QUICK := $(addprefix tests/,losses evaluation models data descriptors training/test_step.py \
  search/test_index.py test_imports.py test_guest.py)
quick: $(VENV)/.installed-dev ## run the quick tests (a minute or so)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile -m 'not slow' $(QUICK)

# Every crash point, the whole demo, more generated examples, larger indexes, further cases.
# A part: make soak TESTS="tests/crash tests/fuzz"
TESTS := tests
soak: $(VENV)/.installed-dev ## run every test in its thorough version (hours)
	LISTWISE_SOAK=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(TESTS)

# In an environment of its own (several GB), without any extra.
FLOORS := .floors
floors: $(VENV)/bin/python ## run the core's tests on the lowest versions that pyproject.toml allows
	$(PYTHON) -m venv $(FLOORS)
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"])' \
	  | sed 's/>=/==/g' | xargs $(FLOORS)/bin/python -m pip install --quiet hypothesis pytest scikit-learn
	PYTHONPATH=src $(FLOORS)/bin/python -m pytest tests/losses tests/evaluation tests/models \
	  tests/training/test_step.py tests/data/test_images.py

lint: $(VENV)/.installed-dev ## check code, workflows, templates and the Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/hadolint Dockerfile

format: $(VENV)/.installed-dev ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev ## mypy, strict
	$(BIN)/mypy

# Fails on a broken link or anchor, a page that is not in the navigation, or an undocumented public name.
docs: $(VENV)/.installed-docs ## build the documentation site into site/
	$(BIN)/python -m pytest tests/test_site.py
	$(BIN)/zensical build --clean --strict

reference: $(VENV)/.installed-dev ## write reference/: all commands, settings and Python names
	$(BIN)/python tools/reference.py

check: lint types test    ## everything a change must pass

# A wheel that lacks a file is noticed in seconds, because the other packages are those of .venv.
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
wheel: $(VENV)/.installed-dev ## build the wheel and the sdist; use the wheel with the packages of .venv
	rm -rf dist .package
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m venv --without-pip .package
	$(BIN)/python -m pip --python .package/bin/python install --quiet --no-deps --no-index dist/*.whl
	$(BIN)/python $(PURELIB) > "$$(.package/bin/python $(PURELIB))/packages-of-venv.pth"
	cd .package && bin/python -I ../tests/try_wheel.py
	rm -rf .package

package: $(VENV)/.installed-dev ## build the wheel and the sdist; install the wheel in a new environment and use it
	rm -rf dist .package
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .package
	.package/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt dist/*.whl
	cd .package && bin/python -I ../tests/try_wheel.py
	rm -rf .package

clean:                    ## remove the environment and caches
	rm -rf $(VENV) $(FLOORS) site .package dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "listwise needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing listwise into $(VENV) (a few minutes the first time)"
	$(PIP) --editable '.[train,serve,imagenet]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(PIP) --editable '.[docs]'
	@touch $@
