"""Growing and learning in C++: twins of `core.grow` and `core.learn`."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from vllm_recycle.core.adjacency import MatrixLayout
from vllm_recycle.core.dynamic_operations import REFERENCE_DYNAMIC, DynamicOperations
from vllm_recycle.core.grow import Growth
from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.cpu.build import DTYPES, load_library, pointer, rows_pointer

logger = logging.getLogger("vllm.recycle")


def native_dynamic_operations() -> DynamicOperations:
    """The C++ set, or the reference where it cannot be built."""
    if load_library() is None:
        logger.warning("without g++ growing trees takes longer than it saves: use tree 'default'")
        return REFERENCE_DYNAMIC
    return DynamicOperations("c++", grow, learn, seed, top_k)


def grow(
    table: torch.Tensor,
    rates: torch.Tensor,
    *,
    layout: MatrixLayout,
    salts: torch.Tensor,
    tails: torch.Tensor,
    max_depths: torch.Tensor,
    times: torch.Tensor,
    slopes: torch.Tensor,
    num_other_rows: int,
    max_nodes: int,
) -> Growth:
    """See `vllm_recycle.core.grow.grow`."""
    batch, rows = len(tails), max_nodes + 1
    assert tails.shape[1] == layout.reach
    assert len(salts) == len(max_depths) == batch
    assert len(times) == len(slopes)
    num_nodes = torch.empty(batch, dtype=torch.int64)
    token_ids = torch.empty(batch, max_nodes, dtype=torch.int64)
    parents, depths = torch.zeros(2, batch, rows, dtype=torch.int64)
    masks = torch.zeros(batch, rows, rows, dtype=torch.bool)
    load_library().grow(  # type: ignore[union-attr]
        *_rows(table, layout),
        pointer(rates, torch.float64),
        pointer(salts),
        pointer(tails),
        pointer(max_depths),
        pointer(times, torch.float64),
        pointer(slopes, torch.float64),
        len(times),
        num_other_rows,
        batch,
        max_nodes,
        pointer(num_nodes),
        pointer(token_ids),
        pointer(parents),
        pointer(depths),
        pointer(masks, torch.bool),
    )
    return Growth(num_nodes, token_ids, Trees(parents, depths, masks))


def learn(
    table: torch.Tensor,
    counts: torch.Tensor | None,
    *,
    layout: MatrixLayout,
    salts: torch.Tensor,
    tails: torch.Tensor,
    parents: torch.Tensor,
    row_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    successors: torch.Tensor,
    walked: WalkResult,
) -> None:
    """See `vllm_recycle.core.learn.learn`."""
    assert tails.shape[1] == layout.reach
    path, token_ids = walked.path.contiguous(), walked.token_ids.contiguous()
    load_library().learn(  # type: ignore[union-attr]
        *_rows(table, layout),
        None if counts is None else pointer(counts, torch.float64),
        pointer(salts),
        pointer(tails),
        rows_pointer(parents),
        parents.stride(0),
        pointer(row_token_ids),
        pointer(cu_num_logits),
        pointer(successors, torch.int32),
        pointer(path),
        pointer(token_ids),
        path.shape[1],
        len(tails),
    )


def seed(table: torch.Tensor, token_ids: torch.Tensor, salt: int, *, layout: MatrixLayout) -> None:
    """See `vllm_recycle.core.learn.seed`."""
    load_library().seed(  # type: ignore[union-attr]
        *_rows(table, layout), pointer(token_ids), len(token_ids), salt
    )


def top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """See `vllm_recycle.core.learn.top_k`."""
    if logits.dtype not in DTYPES or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    best = torch.empty(len(logits), k, dtype=torch.int32)
    load_library().top_k_rows(  # type: ignore[union-attr]
        logits.data_ptr(),
        len(logits),
        logits.stride(0),
        logits.shape[1],
        k,
        logits.dtype == torch.bfloat16,
        torch.get_num_threads(),
        pointer(best, torch.int32),
    )
    return best


def _rows(table: torch.Tensor, layout: MatrixLayout) -> tuple[Any, ...]:
    lengths = (ctypes.c_int64 * len(layout.contexts))(*layout.contexts)
    return (
        pointer(table, torch.int32),
        lengths,
        len(layout.contexts),
        layout.vocab_size,
        layout.k,
        layout.slots,
        layout.has_own,
        layout.reads_shared,
        layout.writes_shared,
        layout.parts,
    )
