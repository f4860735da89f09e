# `make demo` runs an example sweep, `make compile` compiles the engine, `make test` checks a change in six to fourteen minutes,
# `make test-all` also runs the slow checks. `make docs` builds the site of docs/.
# They create the virtual environments they need, with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := dev,replay,search,cluster,parquet,tokenizers,notebooks
RECOMMEND := sim recommend --model llama-3.1-8b --device H100 --rate 20 --prompt 1200 --output 200 \
	--system-prompt 1000 --subject-to 'p99_ttft_ms <= 1000'
PARALLEL := -n auto
export PYTHONDONTWRITEBYTECODE := # Python keeps what it has translated: a start without that takes several times as long
RERUNS := # .ci/run repeats a failed test, and prints it as a test to repair
SOURCES := $(shell find sim policies routers calibrate traces -name '*.py' -o -name '*.yaml' -o -name '*.html' -o -name '*.js' -o -name '*.css' -o -name '*.csv*')

.PHONY: demo compile test test-all versions lint docs renew bench kbk vllm clean

# servesim is installed as a wheel, so that the demo and the tests use the same files as users. It is compiled if there
# is a C compiler; `make compile` fails without one.
$(VENV)/.servesim: setup.py setup.cfg pyproject.toml constraints.txt tools/install.sh $(SOURCES)
	@echo "Installing, and compiling the engine if there is a C compiler: two to three minutes on two cores, only once."
	@rm -f $(VENV)/.compiled
	@tools/install.sh $(PYTHON) $(VENV) '.[replay]'
	@touch $@
	@! $(BIN)/sim --version | grep -q '(compiled)' || touch $(VENV)/.compiled

$(VENV)/.compiled: setup.py setup.cfg pyproject.toml constraints.txt tools/install.sh $(SOURCES)
	@SERVESIM_COMPILE=1 tools/install.sh $(PYTHON) $(VENV) '.[replay]'
	@touch $@ $(VENV)/.servesim

compile: $(VENV)/.compiled

# Packages for tests, notebooks and documentation. TORCH=torch==VERSION adds the tests of the torch backend.
$(VENV)/.packages: setup.cfg pyproject.toml constraints.txt Makefile tools/install.sh | $(VENV)/.servesim
	@tools/install.sh $(PYTHON) $(VENV) 'servesim[$(EXTRAS)]' $(TORCH)
	@touch $@

demo: $(VENV)/.servesim
	@rm -rf demo-out
	$(BIN)/sim sweep examples/contest_knobs.yaml -o demo-out
	@echo "Open demo-out/report.html in a browser: the winner, the reasons and the trade-offs."
	@echo "Next, flags for your own server, after '. $(VENV)/bin/activate':"
	@echo "  $(RECOMMEND)"

lint: $(VENV)/.packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --cache-dir=.mypy_cache/scripts --implicit-reexport --allow-untyped-calls --no-warn-return-any benchmarks tools

kbk:
	tools/kbk_env.sh

# An environment with vLLM for the CPU. With SERVESIM_VLLM_PYTHON set, `make test-all` also runs the tests of a real server.
vllm:
	tools/vllm_env.sh

# The suite tests the compiled package, and plain Python if it cannot be compiled; install.sh has said why. Of a compiled
# package, tests/compiled compares the bytes that it and plain Python write for 500 scenarios.
COMPILED = SERVESIM_COMPILE=$$([ ! -e $(VENV)/.compiled ] || echo 1)
test: $(VENV)/.servesim lint
	$(COMPILED) $(BIN)/python -Im pytest $(PARALLEL) $(RERUNS) --dist worksteal -m 'not slow and not kbk and not live and not ascend'

# The site, then documents, notebooks, wheels, kills, fuzzing and MindSpore by file, because these files share costly fixtures. Then the
# tests that go by the wall clock, one by one.
test-all: test kbk docs
	$(COMPILED) $(BIN)/python -Im pytest $(PARALLEL) $(RERUNS) --dist loadfile -m '(slow or kbk) and not live and not ascend'
	$(BIN)/python -Im pytest $(RERUNS) -m live

# The installed versions of all packages that the tests use.
versions: $(VENV)/.compiled $(VENV)/.packages kbk
	@for venv in $(VENV) .venv-kbk; do [ ! -x $$venv/bin/pip ] || { \
		echo "$$venv: $$($$venv/bin/python --version) on $$(uname -sm)"; \
		$$venv/bin/pip freeze --disable-pip-version-check --exclude servesim | paste -sd ' ' | fold -sw 120; }; done

# The site of docs/, with search and no broken link. Open site/index.html; it needs no network.
.venv-docs/.installed: tools/docs_constraints.txt
	@rm -rf .venv-docs
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# Regenerate tables, printed output and charts of README and docs, and run the notebooks from their Python files.
renew: $(VENV)/.servesim $(VENV)/.packages
	$(BIN)/python tools/generate_tables.py
	$(BIN)/python tools/run_doc_examples.py
	$(BIN)/python tools/doc_charts.py
	$(BIN)/python tools/run_notebooks.py

bench: $(VENV)/.compiled
	$(BIN)/python benchmarks/speed.py --million

clean:
	rm -rf $(VENV) .venv-kbk .venv-vllm .venv-docs build dist site demo-out .cache
