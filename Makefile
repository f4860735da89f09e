# Two commands: `make demo` shows what this is, `make test` proves it. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,replay,search,cluster,parquet,tokenizers,notebooks
SOURCES := $(shell find sim policies calibrate traces -name '*.py' -o -name '*.yaml' -o -name '*.html' -o -name '*.csv*')

.PHONY: demo test lint docs bench kbk clean

# servesim itself, as a wheel: what is shown and tested is what users install.
$(VENV)/.servesim: setup.cfg pyproject.toml tools/install.sh $(SOURCES)
	@tools/install.sh $(PYTHON) $(VENV) .
	@touch $@

# What its tests, notebooks and documents need besides; TORCH=torch==VERSION adds the torch backend's tests.
$(VENV)/.packages: setup.cfg pyproject.toml Makefile tools/install.sh | $(VENV)/.servesim
	@tools/install.sh $(PYTHON) $(VENV) '.[$(EXTRAS)]' $(TORCH)
	@touch $@

demo: $(VENV)/.servesim
	@rm -rf demo-out
	$(BIN)/sim sweep examples/contest_knobs.yaml -o demo-out
	@echo "Open demo-out/report.html in a browser: what won, why, and at what price."

lint: $(VENV)/.servesim $(VENV)/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kbk:
	tools/kbk_env.sh

test: lint kbk
	$(BIN)/python -Im pytest -n auto --maxprocesses 8 --dist loadfile -m 'not live and not benchmark and not ascend'
	$(BIN)/python -Im pytest -m live

# Tables, printed output and pictures of README and docs, and the notebooks of their Python files, all made anew.
docs: $(VENV)/.servesim $(VENV)/.packages
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/pages.py
	$(BIN)/python tools/pictures.py
	$(BIN)/jupytext --quiet --update --to ipynb notebooks/*.py

bench: $(VENV)/.servesim
	$(BIN)/python benchmarks/speed.py --policies --million

clean:
	rm -rf $(VENV) .venv-kbk build dist demo-out .cache
