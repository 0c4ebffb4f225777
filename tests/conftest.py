"""What all tests run under."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, and for the children of tests too. The processes of a run are as many as
# the cores: more threads wait for each other, and where they spin on a core meanwhile, as they do
# by default, everything takes several times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# vLLM's ngram starts numba, which sets OpenMP's number of threads to that of the cores; a library
# that is first called later sets it back, within a step that vLLM has planned for the other number.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
# Compiling a model takes longer than all that a test makes of it. The tests of examples switch it
# on, so that each method is run compiled too; on a GPU engines run as they are served.
os.environ.setdefault("TORCH_COMPILE_DISABLE", str(int(not Path("/dev/nvidiactl").exists())))
if "PTX_ARCH" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # The tensors of kernels are to be the CPU's.

import pytest
import torch

from tests.integration.cuda import triton_interpreter
from tests.integration.models import cpu_torchvision

cpu_torchvision.add()

# The engine in the test's own process; tests of servers and of several ranks say otherwise.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# vLLM leaves a core to its front end, which has nothing to do meanwhile.
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def import_triton_kernels() -> None:
    """Import our Triton kernels, to run in Triton's interpreter where there is no GPU.

    A kernel is compiled or interpreted by what the environment says when it is imported; the
    engines in this process and its children are not to see that. With `PTX_ARCH`, a compute
    capability times ten, kernels are compiled for it, and their PTX is interpreted.
    """
    arch = os.environ.get("PTX_ARCH")
    interpret = not arch and not torch.cuda.is_available()
    if arch:
        from tests.kernels.triton.ptx import launch  # imports Triton, which is to compile

        launch.select(int(arch))
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        # Imported at a first launch otherwise, when the environment no longer says so.
        importlib.import_module("triton.experimental.gluon")
        triton_interpreter.speed_up()
    root = Path(__file__).parents[1]
    for file in sorted(root.glob("vllm_recycle/kernels/triton/**/[!_]*.py")):
        importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
    if interpret:
        del os.environ["TRITON_INTERPRET"]


import_triton_kernels()


@pytest.fixture(autouse=True)
def _level_of_logs() -> Iterator[None]:
    """What a command of ours sets for its process does not reach the next test."""
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests of what the installed vLLM lacks; those of the core need no vLLM."""
    needy = [item for item in items if item.path.parent.name != "core"]
    if not needy:
        return
    # It imports vLLM, which reads what is set above.
    from tests.integration.other_versions import reason_to_leave_out

    for item in needy:
        if reason := reason_to_leave_out(item.nodeid):
            item.add_marker(pytest.mark.skip(reason=reason))
