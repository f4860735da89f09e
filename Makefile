# Two commands: `make demo` shows what this is, `make test` proves it. Both set up all they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench kbk clean

$(STAMP): setup.cfg pyproject.toml tools/install.sh
	tools/install.sh $(PYTHON) $(VENV)
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/sim sweep examples/contest_knobs.yaml -o demo-out --fresh
	@echo "report: demo-out/report.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

kbk:
	tools/kbk_env.sh

test: $(STAMP) kbk lint
	$(BIN)/python -Im pytest

bench: $(STAMP)
	$(BIN)/python benchmarks/speed.py

clean:
	rm -rf $(VENV) .venv-kbk build dist demo-out .cache
