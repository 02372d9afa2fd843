# make demo: see it work.  make test: check it.  make test-fast: while you work.  Each makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.PHONY: demo test test-fast check clean

# An installed environment is one whose stamp is newer than the files that say what to install.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/plures compare local fedavg ditto fedrep fedala fedrod pfedla plgu-lf afml --data digits \
	  --partition labels:4 --clients 60 --test-share 0.4 --epochs 3 --lr 0.1 --rounds 30 --seeds 0,1,2

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0

test-fast: check
	$(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0 -m "not slow"

clean:
	rm -rf $(VENV) runs build *.egg-info
