"""Calling the C++ kernels that read and write vLLM's KV cache: tree attention, and moving slots.

vLLM's own attention on CPU takes no mask and returns no log-sum-exp, so rows of a tree cannot go
through it. The keys and values of the trees' rows are in the cache behind the context, or, where
they have no slots there, those of the forward itself (`own`). A layer that shares another layer's
cache has none of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_recycle.core.tree import Trees
from vllm_recycle.kernels.cpu.kv_cache import ISAS, slot_elements
from vllm_recycle.kernels.cpu.pointers import DTYPES, REFS, library, pointer, pointers, rows_pointer

LANES = 16
NO_WINDOW = 2**62  # more tokens than a text has


@dataclass(frozen=True, eq=False)
class TreeQueries:
    """The rows of a step that are trees; what all layers of a step share.

    Attributes:
        trees: of the requests; each has a prefix of its rows.
        root_rows: int64 [batch], the flat row of each tree's root.
        num_rows: int64 [batch], rows of each tree, the root included.
        num_context: int64 [batch], tokens before the root.
        block_table: int32 [batch, n], the blocks of each request, enough for context and rows; for
            the context, and anything behind it, where the rows' keys and values are given.
        are_cached: whether the rows' keys and values are in the cache.

    """

    trees: Trees
    root_rows: torch.Tensor
    num_rows: torch.Tensor
    num_context: torch.Tensor
    block_table: torch.Tensor
    are_cached: bool = True

    def select(self, selection: torch.Tensor) -> TreeQueries:
        """Only the requests where `selection`, bool [batch], is true."""
        names = ("root_rows", "num_rows", "num_context", "block_table")
        rows = {name: getattr(self, name)[selection] for name in names}
        return replace(self, trees=self.trees.select(selection), **rows)


class _Queries(ctypes.Structure):
    """As `Queries` in tree_columns.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("root_rows", "num_rows", "num_context")),
        *((name, c_void_p) for name in ("block_table", "mask", "depths")),
        *((name, c_int64) for name in ("batch", "table_stride", "mask_batch_stride")),
        *((name, c_int64) for name in ("mask_stride", "depths_stride")),
    )


def _queries(queries: TreeQueries) -> Any:
    """For C++."""
    if (ref := REFS.get(queries)) is None:
        table, trees = queries.block_table, queries.trees
        mask, depths = trees.ancestor_mask, trees.depths
        assert table.dtype == torch.int32
        assert table.stride(1) == mask.stride(2) == 1
        ref = REFS[queries] = ctypes.byref(
            _Queries(
                *pointers(queries.root_rows, queries.num_rows, queries.num_context),
                *(table.data_ptr(), mask.data_ptr(), rows_pointer(depths)),
                *(len(queries.root_rows), table.stride(0), mask.stride(0), mask.stride(1)),
                depths.stride(0),
            )
        )
    return ref


def move_slots(
    kv_caches: Sequence[torch.Tensor], source: torch.Tensor, target: torch.Tensor, *, isa: str
) -> None:
    """Copy the keys and values of the source slots to the target slots, in every layer.

    All sources are read before a target is written, so the two may overlap.

    Args:
        kv_caches: layers of one shape, contiguous, of elements of 2 or 4 bytes; layers that share
            memory given once.
        source: int64 [n].
        target: int64 [n], without repetitions.
        isa: one of `ISAS`.

    """
    layer = kv_caches[0]
    read, write = (slot_elements(slots, shape=layer.shape, isa=isa) for slots in (source, target))
    caches = [pointer(kv_cache, layer.dtype) for kv_cache in kv_caches]
    library().move_slots(
        (c_void_p * len(caches))(*caches),
        len(caches),
        layer.element_size(),
        *pointers(read, write),
        read.numel(),
        torch.get_num_threads(),
    )


def unsupported_attention(dtype: torch.dtype, head_size: int, isa: str) -> dict[str, bool]:
    """What `tree_attention` does not have, and whether a layer has it."""
    without_amx = isa == "amx" and not library().reads_amx_layout()
    return {
        str(dtype).removeprefix("torch."): dtype not in DTYPES,
        f"heads of {head_size} numbers (no multiple of {LANES})": bool(head_size % LANES),
        f"the KV cache layout {isa!r}": isa not in ISAS or without_amx,
    }


def _rows(tensor: torch.Tensor | None, query: torch.Tensor) -> tuple[int | None, int]:
    """For C++: rows like those of the queries, and the stride from one to the next."""
    if tensor is None:
        return None, 0
    assert tensor.dtype == query.dtype
    assert tensor.stride()[1:] == (query.shape[2], 1)
    return tensor.data_ptr(), tensor.stride(0)


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
    """Attend from every tree row to its context and its ancestors; their KV is written already.

    On x86 a row has, bit for bit, what vLLM's kernel gives the decode row of its path: all is
    rounded in vLLM's order, and ancestors count where they are in a chain. In the AMX layout, whose
    products add values in pairs of slots, this is so for cached chains from the root on. Not where
    vLLM cuts a text, and its own rows part: over threads (`VLLM_CPU_ATTN_SPLIT_KV`), and by half
    the L2 cache (some 8000 tokens at 512 KiB).

    Args:
        query: [tokens, heads, head_size], see `unsupported_attention`.
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size].
        output: [tokens, heads, head_size], written at the rows of the trees.
        trees: the rows and their mask.
        scale: of the scores.
        isa: layout of the cache.
        own: keys and values of the forward's rows, each [tokens, kv_heads, head_size], of any token
            stride. Where given, the trees' rows have theirs from here, and nothing behind the
            context is read from the cache.
        window: of the layer, how many positions up to its own a row sees; None for all.
        sinks: floating point [heads], a score, scaled already, that each head's softmax has beside
            those of the keys, and that no value belongs to; None for none.

    """
    _, heads, head_size = query.shape
    _, kv_heads, block_size, _ = kv_cache.shape
    dtype, sinks = query.dtype, None if sinks is None else sinks.float()
    assert sinks is None or len(sinks) == heads
    keys, values = own or (None, None)
    library().tree_attention(
        _queries(trees),
        *_rows(query, query),
        *_rows(output, query),
        pointer(kv_cache, dtype),
        *_rows(keys, query),
        *_rows(values, query),
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
