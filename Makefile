# make demo | test | test-slow | lint | docs | bench | clean; each sets up what it needs in .venv
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test test-slow lint docs bench clean

setup: $(READY)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $(INSTALLED)

$(READY): $(INSTALLED)
	$(PIP) --editable '.[dev]'
	touch $(READY)

demo: $(INSTALLED)
	$(BIN)/dlcft demo

# files of tests side by side, each on one core
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

# without an extra, what needs it is skipped
test-slow: setup
	-for extra in architectures integrations docs notebooks; do $(PIP) --editable ".[dev,$$extra]"; done
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the site, in site/; its tests follow every link and try the search
docs: setup
	$(PIP) --editable '.[dev,docs]'
	$(BIN)/python overrides/commands.py > docs/reference/commands.md
	$(BIN)/zensical build --strict --clean
	$(BIN)/python -m pytest -m 'slow or not slow' tests/test_site.py tests/test_paper_to_code.py

# those that keep their tables, which then go into the documents; then those that print alone
KEPT := linearize curvature exact checkpoint export learner memory startup update workers
PRINTED := $(filter-out $(KEPT) measure tables,$(basename $(notdir $(wildcard benchmarks/*.py))))
bench: setup
	for name in $(KEPT); do \
		$(BIN)/python benchmarks/$$name.py --out results/benchmarks/$$name.json || exit 1; \
	done
	$(BIN)/python benchmarks/tables.py
	for name in $(PRINTED); do $(BIN)/python benchmarks/$$name.py || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .cache site
