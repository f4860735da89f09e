# Two commands: `make demo` shows what this is, `make test` proves it. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find sim policies calibrate traces -name '*.py' -o -name '*.yaml' -o -name '*.html' -o -name '*.csv*')

.PHONY: demo test lint bench kbk clean

# The packages that servesim and its tests need; TORCH=torch==VERSION adds the torch backend's tests.
$(VENV)/.packages: setup.cfg pyproject.toml tools/install.sh
	tools/install.sh $(PYTHON) $(VENV) $(TORCH)
	touch $@

# servesim itself, as a wheel: what is tested is what users install.
$(VENV)/.servesim: $(VENV)/.packages $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	touch $@

demo: $(VENV)/.servesim
	rm -rf demo-out
	$(BIN)/sim sweep examples/contest_knobs.yaml -o demo-out

lint: $(VENV)/.servesim
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kbk:
	tools/kbk_env.sh

test: lint kbk
	$(BIN)/python -Im pytest

bench: $(VENV)/.servesim
	$(BIN)/python benchmarks/speed.py --policies --million

clean:
	rm -rf $(VENV) .venv-kbk build dist demo-out .cache
