"""Kernels for CPUs: C++ where there is a compiler, which the engine's compile mode needs too."""

from __future__ import annotations

from vllm_recycle.core import reference
from vllm_recycle.core.operations import Operations
from vllm_recycle.kernels.cpu import calls
from vllm_recycle.kernels.cpu.build import load_library


def native_operations() -> Operations:
    """The C++ operations, or the reference where they cannot be built."""
    return reference if load_library() is None else calls
