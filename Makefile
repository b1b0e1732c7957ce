# make demo    install into .venv, then osler's main job on handwritten digits: a broken script, its verdict, its report
# make test    install into .venv, then all tests (the case zoo apart: make zoo)
# make check   lint, types, floors, stale pages
#
# PYTHON=python3.12 picks another interpreter, TORCH=torch==2.x another torch. pip's own settings (PIP_INDEX_URL, ...) are honoured.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.osler-ready
DEMO := examples/broken/double_activation

.PHONY: demo test check install zoo overhead build clean

demo: $(READY)
	@echo
	@echo "--- osler run $(DEMO)/train.py"
	@$(BIN)/osler run $(DEMO)/train.py
	@echo
	@echo "--- The repaired script is $(DEMO)/fixed.py. Other broken ones: examples/broken/. Your own: $(BIN)/osler run train.py"

test: $(READY)
	scripts/test-all

check: $(READY)
	scripts/check

zoo: $(READY)
	$(BIN)/python bench/zoo/run.py --json bench/results/zoo.json

overhead: $(READY)
	$(BIN)/python bench/overhead/run.py --json bench/results/overhead.json

build: $(READY)
	scripts/build

install: $(READY)

$(READY): pyproject.toml scripts/install
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" scripts/install $(VENV)
	@touch $@

clean:
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
