"""Calling the C++ kernels of the KV cache, or the torch functions where these cannot serve."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

import torch

from vllm_recycle.kernels.cpu import kv_cache as torch_kv_cache
from vllm_recycle.kernels.cpu import tree_attention as torch_attention
from vllm_recycle.kernels.cpu.build import load_library
from vllm_recycle.kernels.cpu.pointers import DTYPES, MADE, library, pointer, pointers, rows_pointer
from vllm_recycle.kernels.cpu.tree_attention import TreeQueries

LANES = 16
NO_WINDOW = 2**62  # more tokens than a text has


class _Queries(ctypes.Structure):
    """As `Queries` in tree_columns.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("first", "num_rows", "num_context")),
        *((name, c_void_p) for name in ("block_table", "mask", "depths")),
        *((name, c_int64) for name in ("batch", "table_stride", "mask_batch_stride")),
        *((name, c_int64) for name in ("mask_stride", "depths_stride")),
    )


def _queries(queries: TreeQueries) -> Any:
    """For C++."""
    if (known := MADE.get(queries)) is None:
        table, trees = queries.block_table, queries.trees
        mask, depths = trees.ancestor_mask, trees.depths
        assert table.dtype == torch.int32
        assert table.stride(1) == mask.stride(2) == 1
        known = MADE[queries] = ctypes.byref(
            _Queries(
                *pointers(queries.first, queries.num_rows, queries.num_context),
                *(table.data_ptr(), mask.data_ptr(), rows_pointer(depths)),
                *(len(queries.first), table.stride(0), mask.stride(0), mask.stride(1)),
                depths.stride(0),
            )
        )
    return known


def move_slots(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, isa: str
) -> None:
    """See `vllm_recycle.kernels.cpu.kv_cache.move_slots`."""
    found, (first, *_) = load_library(), kv_caches
    if found is None or first.element_size() not in (2, 4):
        torch_kv_cache.move_slots(kv_caches, source, target, isa=isa)
        return
    read, write = (
        torch_kv_cache.slot_elements(slots, shape=first.shape, isa=isa)
        for slots in (source, target)
    )
    caches = [kv_cache.data_ptr() for kv_cache in kv_caches]
    found.move_slots(
        (c_void_p * len(caches))(*caches),
        len(caches),
        first.element_size(),
        *pointers(read, write),
        read.numel(),
        torch.get_num_threads(),
    )


def has_tree_attention(dtype: torch.dtype, head_size: int, isa: str) -> bool:
    """Whether C++ attends from trees: not in float16, nor with head sizes that are no multiple of
    16, nor in the AMX layout where the compiler or the system has no AMX, nor without a compiler.
    """
    found = load_library()
    if found is None or dtype not in DTYPES or head_size % LANES:
        return False
    return isa != "amx" or bool(found.reads_amx_layout())


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    *,
    trees: TreeQueries,
    scale: float,
    isa: str,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """See `vllm_recycle.kernels.cpu.tree_attention.tree_attention`.

    That function serves where this one cannot (`has_tree_attention`).

    On x86 a row has, bit for bit, what vLLM's kernel gives the decode row of its path: all is
    rounded in vLLM's order, and ancestors count where they are in a chain. In the AMX layout, whose
    products add values in pairs of slots, this is so for cached chains from the root on. Not where
    vLLM cuts a text, and its own rows part: over threads (`VLLM_CPU_ATTN_SPLIT_KV`), and by half
    the L2 cache (some 8000 tokens at 512 KiB).
    """
    _, heads, head_size = query.shape
    dtype = query.dtype
    if not has_tree_attention(dtype, head_size, isa):
        torch_attention.tree_attention(
            query,
            kv_cache,
            output,
            trees=trees,
            scale=scale,
            isa=isa,
            own=own,
            window=window,
            sinks=sinks,
        )
        return
    of_query, of_output = query.stride(), output.stride()
    assert kv_cache.dtype == output.dtype == dtype
    assert kv_cache.is_contiguous()
    assert of_query[1:] == of_output[1:] == (head_size, 1)
    assert sinks is None or len(sinks) == heads
    _, kv_heads, block_size, _ = kv_cache.shape
    given: tuple[int | None, ...] = (None, 0, None, 0)
    if own is not None:
        for side in own:
            assert side.dtype == dtype
            assert side.stride()[1:] == (head_size, 1)
        given = tuple(of for side in own for of in (side.data_ptr(), side.stride(0)))
    sinks = None if sinks is None else sinks.float()
    library().tree_attention(
        _queries(trees),
        query.data_ptr(),
        of_query[0],
        output.data_ptr(),
        of_output[0],
        kv_cache.data_ptr(),
        *given,
        pointer(sinks, torch.float32),
        heads,
        kv_heads,
        head_size,
        block_size,
        NO_WINDOW if window is None else window,
        isa == "amx",
        dtype == torch.bfloat16,
        scale,
        torch.get_num_threads(),
    )
