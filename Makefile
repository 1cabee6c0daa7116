# Two commands matter: `make train` and `make test`. Each sets up what it needs in .venv and may be called again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The environment is made anew only when what it is made from changes.
STAMP := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Containers often set it. The tests start hundreds of processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test test-fast pytest lint docs benchmark image clean

help:
	@echo "make setup      create $(VENV) with everything (about two minutes, once)"
	@echo "make train      pre-train a small real model on this machine: hlatctl train"
	@echo "make test       ruff, mypy, import-linter and pytest"
	@echo "make test-fast  only the tests that start no process (three minutes)"
	@echo "make docs       build the documentation in site/ (open site/index.html)"
	@echo "make benchmark  the benchmarks of benchmarks"
	@echo "make image      container image IMAGE=cpu, cuda, neuron or driver, with podman, buildah or docker"
	@echo "make clean      remove $(VENV) and caches; runs/ is never touched"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python %d.%d is too old, 3.11 or newer is needed\nhint: make PYTHON=python3.11" % sys.version_info[:2])'
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "error: this Python can not make virtual environments"; echo "hint: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[all,dev]'
	@$(INSTALL) --editable '.[torchtitan]' && $(INSTALL) --no-deps torchtitan || echo "warning: torchtitan can not be installed here; its tests are skipped"
	@touch $(STAMP)

train: $(STAMP)
	@$(BIN)/hlatctl train $(OVERRIDES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Side by side: most of the tests wait for processes to start.
test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

# A worker that crashes ends the run: xdist gives the one that replaces it no work, and waits for it forever.
pytest: $(STAMP)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The inner loop: no servers, no trainers, no sandboxes.
test-fast: $(STAMP)
	$(BIN)/pytest -n 2 --dist loadfile -m "not processes"

# Fails if a link or an anchor of a page doesn't exist.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict
	@echo "site/index.html"

benchmark: $(STAMP)
	$(BIN)/python -m benchmarks

# BASE=NAME@sha256:DIGEST pins what the image is made from; BUILD_FLAGS goes to the builder.
IMAGE ?= cpu
TAG ?= hlatctl-$(IMAGE)
BUILDER ?= $(firstword $(foreach each,podman buildah docker,$(if $(shell command -v $(each)),$(each))))
IMAGE_FLAGS_cpu := -f deploy/images/Dockerfile --target worker --build-arg INDEX=https://download.pytorch.org/whl/cpu
IMAGE_FLAGS_cuda := -f deploy/images/Dockerfile --target worker
IMAGE_FLAGS_driver := -f deploy/images/Dockerfile --target driver --build-arg INDEX=https://download.pytorch.org/whl/cpu
IMAGE_FLAGS_neuron := -f deploy/images/Dockerfile.neuron

image:
	@test -n "$(BUILDER)" || { echo "error: there is no builder of images"; echo "hint: apt-get install buildah"; exit 1; }
	@test -n "$(IMAGE_FLAGS_$(IMAGE))" || { echo "error: IMAGE=$(IMAGE): must be cpu, cuda, neuron or driver"; echo "hint: make image IMAGE=cpu"; exit 1; }
	@test "$(IMAGE)$(BASE)" != neuron || { echo "error: IMAGE=neuron needs BASE, one of AWS's Neuron containers"; echo "hint: make image IMAGE=neuron BASE=NAME@sha256:DIGEST (deploy/images/Dockerfile.neuron)"; exit 1; }
	$(BUILDER) build $(IMAGE_FLAGS_$(IMAGE)) $(if $(BASE),--build-arg BASE=$(BASE)) $(BUILD_FLAGS) -t $(TAG) .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
