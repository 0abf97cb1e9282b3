# Two commands: `make serve` (the demo server) and `make test` (everything that is checked).
# Both set up what they need, so each works on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODELS ?= .models
PORT ?= 8000
# A line for each package and a bar while it comes; `make PIP=--quiet` says nothing.
PIP ?= --progress-bar on
# Processes that share out the tests, by file; `make WORKERS=0` is plain `python -m pytest`.
WORKERS ?= 2
export VENV
# The servers of the tests start quickly only where Python keeps what it has compiled.
unexport PYTHONDONTWRITEBYTECODE
bin := $(VENV)/bin

.PHONY: help serve test install install-dev models test-models check clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort

serve: install models  ## serve the demo models on http://127.0.0.1:$(PORT)
	$(bin)/rose serve $(MODELS)/all-MiniLM-L6-v2 $(MODELS)/SmolLM2-135M-Instruct --port $(PORT)

test: install-dev test-models check  ## run every check and test
	$(bin)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

install: $(VENV)/.installed  ## make the virtual environment with ROSE and the demo extra

install-dev: $(VENV)/.installed-dev  ## the same with everything the tests need

# torch first and alone: what comes later then finds it there and does not choose another build.
$(VENV)/.torch:
	@echo 'Making $(VENV) and fetching $(TORCH): some hundred MB, which takes minutes'
	$(PYTHON) -m venv $(VENV)
	$(bin)/pip install --quiet --upgrade pip
	$(bin)/pip install $(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo 'Installing ROSE and what the demo needs'
	$(bin)/pip install $(PIP) --editable '.[demo]'
	@touch $@

# In one go, for it brings what `install` does.
$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	@echo 'Installing ROSE and what its tests need'
	$(bin)/pip install $(PIP) --editable '.[dev]'
	@touch $(VENV)/.installed $@

models: $(VENV)/.installed  ## fetch the demo models into $(MODELS)
	$(bin)/python tools/fetch_models.py --into $(MODELS)

test-models: $(VENV)/.installed-dev  ## the same and a multilingual embedder for the tests
	$(bin)/python tools/fetch_models.py --into $(MODELS) --with-e5

check: install-dev  ## format, lint, types, import contracts
	tools/check

clean:  ## remove the virtual environment and the caches; models stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
