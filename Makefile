# Every target sets itself up in .venv first; a repeated call installs nothing. make only wraps:
# in an environment of your own, `pip install -r requirements.txt && jupyter-book build .` builds the book.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help book test lint notebooks bench record browser clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

book: $(READY)  ## build the book into _build/html; warnings are errors
	$(BIN)/jupyter-book build -W -n --keep-going .

test: $(READY) browser  ## run every test; builds the book once, in a copy
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadgroup -m "not serial"
	$(BIN)/python -m pytest -m serial

lint: $(READY)  ## ruff check and format, mypy on the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

notebooks: $(READY)  ## write the Colab notebooks from the chapters
	$(BIN)/python tools/notebooks.py

bench: $(READY) browser  ## measure engine, widgets and waste on this machine; kernels and copies where it has a GPU
	$(BIN)/python benchmarks/engine_cpu.py
	$(BIN)/python benchmarks/widgets.py
	$(BIN)/python benchmarks/waste.py
	@! nvidia-smi -L >/dev/null 2>&1 || for name in attention ceilings copies decode_ops engine; \
		do $(BIN)/python benchmarks/$$name.py || exit 1; done

record: $(READY)  ## record the decode shown in the book; needs an NVIDIA GPU
	$(BIN)/python tools/record.py decode

browser: $(READY)
	@$(BIN)/python tools/browser.py

clean:  ## remove what the targets above wrote, except .venv
	rm -rf _build build dist *.egg-info book/_static/vendor sanitize_logs
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): requirements.txt pyproject.toml tools/setup.sh
	sh tools/setup.sh "$(PYTHON)" $(VENV)
	@touch $@
