"""What all calls of the C++ kernels need: the library, and tensors as pointers."""

from __future__ import annotations

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import torch

from vllm_recycle.kernels.cpu.build import load_library

DTYPES = (torch.float32, torch.bfloat16)  # that C++ reads of logits, queries and caches

# What C++ reads, made once: of a matrix, which keeps its tensors, and of what all layers share.
REFS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def library() -> ctypes.CDLL:
    """The kernels.

    Raises RuntimeError where there are none: an engine is configured for drafts on a machine that
    has them, and a worker of it may be on another one.
    """
    if (kernels := load_library()) is None:
        raise RuntimeError("a worker has no C++ kernels: install the package g++ on its machine")
    return kernels


def pointer(tensor: torch.Tensor | None, dtype: torch.dtype = torch.int64) -> int | None:
    """For C++, which believes what it is given; None stays None."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """For C++, of int64 tensors."""
    return [pointer(tensor) for tensor in tensors]


def rows_pointer(tensor: torch.Tensor) -> int:
    """For C++, of int64 rows, each contiguous, which may be one and the same (stride 0)."""
    assert tensor.dtype == torch.int64
    assert tensor.stride(-1) == 1
    return tensor.data_ptr()
