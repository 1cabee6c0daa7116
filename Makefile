# Two commands matter: `make train` and `make test`. Each sets up what it needs in .venv and may be called again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What hlatctl needs to run; see README, "Install only what a machine needs".
EXTRAS ?= all,torchtitan
# The environment is made anew only when what it is made from changes. The tests' tools are added when they are needed.
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Containers often set it. The tests start hundreds of processes, and each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test test-fast pytest lint docs benchmark bundle image clean

help:
	@echo "make setup      create $(VENV) with what hlatctl needs to run (about two minutes, once); EXTRAS=head: less"
	@echo "make train      pre-train a small real model on this machine: hlatctl train"
	@echo "make test       ruff, mypy, import-linter and pytest"
	@echo "make test-fast  only the tests that start no process (three minutes)"
	@echo "make docs       build the documentation in site/ (open site/index.html)"
	@echo "make benchmark  the benchmarks of benchmarks"
	@echo "make bundle     one file in dist/ that installs without a network; EXTRAS=head,train PLATFORM=manylinux_2_28_aarch64 PYTHON=3.12"
	@echo "make image      container image IMAGE=cpu, cuda or neuron, with podman, buildah or docker"
	@echo "make clean      remove $(VENV) and caches; runs/ is never touched"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python %d.%d is too old, 3.11 or newer is needed\nhint: make PYTHON=python3.11" % sys.version_info[:2])'
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "error: this Python can not make virtual environments"; echo "hint: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[$(EXTRAS)]'
	@$(if $(findstring torchtitan,$(EXTRAS)),$(INSTALL) --no-deps torchtitan)
	@touch $(STAMP)

$(DEV_STAMP): $(STAMP)
	$(INSTALL) --editable '.[all,torchtitan,dev]'
	@$(INSTALL) --no-deps torchtitan
	@touch $(DEV_STAMP)

train: $(STAMP)
	@$(BIN)/hlatctl train $(OVERRIDES)

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Side by side: most of the tests wait for processes to start.
test: $(DEV_STAMP)
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

# A worker that crashes ends the run: xdist gives the one that replaces it no work, and waits for it forever.
pytest: $(DEV_STAMP)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The inner loop: no servers, no trainers, no sandboxes.
test-fast: $(DEV_STAMP)
	$(BIN)/pytest -n 2 --dist loadfile -m "not processes"

# Fails if a link or an anchor of a page doesn't exist.
docs: $(DEV_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict
	@echo "site/index.html"

benchmark: $(DEV_STAMP)
	$(BIN)/python -m benchmarks

# PYTHON is a version here (3.12), the target's. INDEX=URL is a further package index, such as one with torch for CPUs.
# pip reads it from its environment, because every user of a machine can read the arguments of its processes.
PACK = $(firstword $(filter-out 3.%,$(PYTHON)) python3) deploy/bundle/bundle.py --platform '$(PLATFORM)' --python '$(filter 3.%,$(PYTHON))'

bundle: export PIP_EXTRA_INDEX_URL := $(strip $(PIP_EXTRA_INDEX_URL) $(INDEX))
bundle:
	@$(PACK) --extras '$(EXTRAS)' --to dist

# BASE=NAME@sha256:DIGEST pins what the image is made from; BUILD_FLAGS goes to the builder.
IMAGE ?= cpu
TAG ?= hlatctl-$(IMAGE)
BUILDER ?= $(firstword $(foreach each,podman buildah docker,$(if $(shell command -v $(each)),$(each))))
INDEX_cpu := https://download.pytorch.org/whl/cpu

image: export PIP_EXTRA_INDEX_URL := $(strip $(PIP_EXTRA_INDEX_URL) $(or $(INDEX),$(INDEX_$(IMAGE))))
image:
	@test -n "$(BUILDER)" || { echo "error: there is no builder of images"; echo "hint: apt-get install buildah"; exit 1; }
	@case "$(IMAGE)" in cpu|cuda|neuron) ;; *) echo "error: IMAGE=$(IMAGE): must be cpu, cuda or neuron"; echo "hint: make image IMAGE=cpu"; exit 1;; esac
	@test "$(IMAGE)$(BASE)" != neuron || { echo "error: IMAGE=neuron needs BASE, one of AWS's Neuron containers"; echo "hint: make image IMAGE=neuron BASE=NAME@sha256:DIGEST (deploy/images/Dockerfile.neuron)"; exit 1; }
ifeq ($(IMAGE),neuron)
	$(BUILDER) build -f deploy/images/Dockerfile.neuron --build-arg BASE=$(BASE) $(BUILD_FLAGS) -t $(TAG) .
else
	archive=$$($(PACK) --extras '$(EXTRAS)' --to dist) && \
	$(BUILDER) build -f deploy/images/Dockerfile $(if $(BASE),--build-arg BASE=$(BASE)) $(BUILD_FLAGS) -t $(TAG) $$(dirname $$archive)
endif

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
