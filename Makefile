# make test creates the environment and runs the default suite; make help lists the rest.
#
#   make test PYTHON=python3.12 VENV=.venv-newest   another interpreter, another environment
#   make test ARGS="-k gspo -x"                     options for pytest
#   make test WORKERS=0                             in one process

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
ARGS ?=

PY = $(VENV)/bin/python
PIP = $(PY) -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
PYTEST = $(PY) -m pytest -n $(WORKERS) --maxprocesses=8 --dist=worksteal $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help install install-dev test test-slow lint format types doctest demo train tables bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

test: install ## the default suite
	$(PYTEST) -m "not slow"

test-slow: install ## the tests marked slow
	@$(PYTEST) -m slow || { status=$$?; [ $$status -eq 5 ] && echo "No test is marked slow."; }

lint: install-dev ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: install-dev ## rewrite the files as `make lint` asks
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: install-dev ## mypy
	$(PY) -m mypy jaxrl_lm

doctest: install ## the examples in the docstrings (README's run with the default suite)
	$(PYTEST) -p tests.conftest --doctest-modules jaxrl_lm

demo: install ## the two headline experiments: tables, figures, results/
	$(PY) -m experiments.length_bias demo
	$(PY) -m experiments.ratio_explosion demo

train: install ## GRPO on a small language model: reward, samples, figure, checkpoints, results/train
	$(PY) -m experiments.train

tables: install ## rewrite the generated tables: README.md, docs/parity.md, docs/which_grpo.md
	$(PY) -c "from experiments.algorithm_table import update_readme; update_readme()"
	$(PY) -c "from experiments.which_grpo import main; main(write=True)"
	$(PY) -m tests.parity.report

bench: install ## speed of every objective, of sampling, and of packed updates
	$(PY) -m benchmarks.objectives
	$(PY) -m benchmarks.sampling
	$(PY) -m benchmarks.packing

clean: ## remove environments, caches and build output; results/ stays
	rm -rf .venv .venv-newest $(VENV) .jax_cache .hypothesis .pytest_cache .mypy_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

# A stamp is written last: an interrupted step is done again.
$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found. Name an interpreter: make test PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxrl_lm needs Python 3.11 or later, and $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name another interpreter: make test PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: it comes without venv or ensurepip." >&2; \
	  echo "On Debian and Ubuntu they are in the package python3-venv." >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) -e '.[experiments,test]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@
