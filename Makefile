# make demo: a first look; make docs: the site; make test, test-all, lint, format, bench, clean: for working on the
# library.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3.11
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

.PHONY: demo test test-all lint format bench docs release-check clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/core.stamp
	@$(BIN)/bayesrule fit breast_cancer --out run

# Compiled programs are kept between runs, since compiling is most of what the suite does.
test test-all: export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
test test-all: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0.1
test test-all: export JAX_PLATFORMS := cpu
# Every process that a test starts would compile the whole source again.
unexport PYTHONDONTWRITEBYTECODE
# XLA optimises less and emits each program as one piece, which saves half of the time and most of the memory.
test test-all: export XLA_FLAGS ?= --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1

# What must hold after every change, and one file of it as XLA compiles by default; `make test XLA_FLAGS=` runs all so.
test: $(VENV)/dev.stamp
	@mkdir -p $(JAX_COMPILATION_CACHE_DIR)
	$(BIN)/python -m pytest $(ARGS)
ifeq ($(ARGS),)
	XLA_FLAGS= $(BIN)/python -m pytest -m "as_users and not extended" tests/reference/test_glm.py
endif

# All tests, or those of some parts: make test-all PART="rule fitting". `as_users` is compiled as XLA does by default.
PART ?= $(shell $(BIN)/python tests/parts.py)
test-all: $(VENV)/dev.stamp
	@mkdir -p $(JAX_COMPILATION_CACHE_DIR)
	@for part in $(PART); do \
		mark= flags="$$XLA_FLAGS"; \
		if [ $$part = as_users ]; then mark=as_users flags=; fi; \
		printf '\n\n== The part %s ==\n' $$part; \
		paths=$$($(BIN)/python tests/parts.py $$part) || exit 2; \
		XLA_FLAGS="$$flags" $(BIN)/python -m pytest -m "$$mark" $$paths $(ARGS) || failed="$$failed $$part"; \
	done; \
	test -z "$$failed" || { printf '\nThese parts failed:%s\n' "$$failed"; exit 1; }

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tests/public_types.py

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/run.py $(ARGS)

# The site, into build/site. What its pages compute is kept in .cache/docs until the library changes.
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/docs.stamp
	$(BIN)/python -m mkdocs build --strict
	@echo "The site is in build/site: open build/site/index.html"

# What users will install: the wheel by itself, without extras and without this folder.
release-check: $(VENV)/dev.stamp
	rm -rf dist build/release
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/release || python3 -m venv --clear build/release
	build/release/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build/release && bin/bayesrule fit breast_cancer --out run && test -s run/report.html

clean:
	rm -rf .cache .pytest_cache .ruff_cache build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV):
	$(PYTHON) -m venv $@ || python3 -m venv --clear $@

# The library alone is enough for the demo; the dev extra contains it. Both come again only when
# pyproject.toml changes.
$(VENV)/core.stamp: pyproject.toml | $(VENV)
	@echo "Installing bayesrule into $(VENV) (a minute or so, the first time)"
	@$(PIP_INSTALL) .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml | $(VENV)
	@echo "Installing bayesrule and its development tools into $(VENV) (a few minutes, the first time)"
	@$(PIP_INSTALL) '.[dev]'
	@touch $(VENV)/core.stamp $@

$(VENV)/docs.stamp: pyproject.toml | $(VENV)
	@echo "Installing bayesrule and what the site needs into $(VENV) (a few minutes, the first time)"
	@$(PIP_INSTALL) '.[docs]'
	@touch $(VENV)/core.stamp $@
