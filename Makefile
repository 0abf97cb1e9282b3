# Two commands: `make serve` (the demo server) and `make test` (everything that is checked).
# Both set up what they need, so each works on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODELS ?= .models
PORT ?= 8000
export VENV
bin := $(VENV)/bin

.PHONY: help serve test install install-dev models test-models check clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

serve: install models  ## serve the demo models on http://127.0.0.1:$(PORT)
	$(bin)/rose serve $(MODELS)/all-MiniLM-L6-v2 $(MODELS)/SmolLM2-135M-Instruct --port $(PORT)

test: install-dev test-models check  ## run every check and test
	$(bin)/python -m pytest

install: $(VENV)/.installed  ## make the virtual environment with ROSE and the demo extra

install-dev: $(VENV)/.installed-dev  ## the same with everything the tests need

# torch first and alone: what comes later then finds it there and does not choose another build.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(bin)/pip install --quiet --upgrade pip
	$(bin)/pip install --quiet '$(TORCH)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(bin)/pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(bin)/pip install --quiet --editable '.[dev]'
	@touch $@

models: $(VENV)/.installed  ## fetch the demo models into $(MODELS)
	$(bin)/python tools/fetch_models.py --into $(MODELS)

test-models: $(VENV)/.installed  ## the same and a multilingual embedder for the tests
	$(bin)/python tools/fetch_models.py --into $(MODELS) --with-e5

check: install-dev  ## format, lint, types, import contracts
	tools/check

clean:  ## remove the virtual environment and the caches; models stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
