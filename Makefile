# `make demo` runs an example sweep, `make test` runs all checks. Both create the virtual environments they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,replay,search,cluster,parquet,tokenizers,notebooks
SOURCES := $(shell find sim policies calibrate traces -name '*.py' -o -name '*.yaml' -o -name '*.html' -o -name '*.csv*')

.PHONY: demo test lint docs bench kbk clean

# servesim is installed as a wheel, so that the demo and the tests use the same files as users.
$(VENV)/.servesim: setup.cfg pyproject.toml tools/install.sh $(SOURCES)
	@tools/install.sh $(PYTHON) $(VENV) .
	@touch $@

# Packages for tests, notebooks and documentation. TORCH=torch==VERSION adds the tests of the torch backend.
$(VENV)/.packages: setup.cfg pyproject.toml Makefile tools/install.sh | $(VENV)/.servesim
	@tools/install.sh $(PYTHON) $(VENV) '.[$(EXTRAS)]' $(TORCH)
	@touch $@

demo: $(VENV)/.servesim
	@rm -rf demo-out
	$(BIN)/sim sweep examples/contest_knobs.yaml -o demo-out
	@echo "Open demo-out/report.html in a browser: the winner, the reasons and the trade-offs."

lint: $(VENV)/.servesim $(VENV)/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kbk:
	tools/kbk_env.sh

test: lint kbk
	$(BIN)/python -Im pytest -n auto --maxprocesses 8 --dist loadfile -m 'not live and not ascend'
	$(BIN)/python -Im pytest -m live

# Regenerate tables, printed output and charts of README and docs, and the notebooks from their Python files.
docs: $(VENV)/.servesim $(VENV)/.packages
	$(BIN)/python tools/generate_tables.py
	$(BIN)/python tools/run_doc_examples.py
	$(BIN)/python tools/doc_charts.py
	$(BIN)/jupytext --quiet --update --to ipynb notebooks/*.py

bench: $(VENV)/.servesim
	$(BIN)/python benchmarks/speed.py --policies --million

clean:
	rm -rf $(VENV) .venv-kbk build dist demo-out .cache
