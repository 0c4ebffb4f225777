"""Filling a template on the device, in one launch: the twin of `core.grow.fill`.

A program serves a request, a lane a row of its tree. Levels come one after another: the rows of a
level look up their entries, and the rows below take their successors from there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.kernels.triton.matrix.find import (
    Layout,
    Texts,
    bounded,
    find_entry,
    inputs_of,
    read_tail,
)
from vllm_recycle.kernels.triton.walk import num_warps


def fill(
    drafts: torch.Tensor,
    worths: torch.Tensor,
    matrix: AdjacencyMatrix,
    rates: torch.Tensor,
    idx_mapping: torch.Tensor,
    texts: Texts,
    *,
    tree: TreeTemplate,
) -> None:
    """Draft below the last token of each text; see `core.grow.fill`.

    Args:
        drafts: int64 [batch, nodes], written: of each node, -1 where there is none.
        worths: float32 [batch, nodes], written: of each node, 0 where there is none.
        matrix: what is drafted from.
        rates: float32 [classes, contexts, 2, k, 4], each from 0 to 1.
        idx_mapping: integer [batch].
        texts: by `req_state_idx`.
        tree: the template, its tables on the device of the others.

    """
    batch, nodes = drafts.shape
    assert nodes == tree.num_nodes
    inputs = inputs_of(drafts, worths, matrix, rates, idx_mapping, texts)
    lanes, constants = triton.next_power_of_2(nodes + 1), Layout.of(matrix.layout)
    shape = (batch, lanes, constants.CONTEXT_LANES)
    scratch = torch.empty(shape, dtype=torch.int32, device=drafts.device)
    _fill_kernel[(batch,)](
        drafts,
        worths,
        scratch,
        *inputs,
        tree.parents,
        tree.ranks,
        tree.depths,
        NODES=nodes,
        LANES=lanes,
        LEVELS=tree.depth,
        LAYOUT=constants,
        num_warps=num_warps(lanes),
    )


@triton.jit
def _fill_kernel(
    drafts: tl.tensor,
    worths: tl.tensor,
    scratch: tl.tensor,
    table: tl.tensor,
    rates: tl.tensor,
    idx_mapping: tl.tensor,
    salts: tl.tensor,
    classes: tl.tensor,
    all_token_ids: tl.tensor,
    all_token_ids_stride: int,
    lengths: tl.tensor,
    parents: tl.tensor,
    ranks: tl.tensor,
    depths: tl.tensor,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    LAYOUT: tl.constexpr,
) -> None:
    """A program per request."""
    K: tl.constexpr = LAYOUT.K
    STRIDE: tl.constexpr = LAYOUT.CONTEXT_LANES  # of contexts
    index = tl.program_id(0).to(tl.int64)
    request = tl.load(idx_mapping + index).to(tl.int64)
    salt = tl.load(salts + request)
    rates += tl.load(classes + request) * (LAYOUT.RANKS * 4)
    row = tl.arange(0, LANES)
    is_row = row <= NODES
    parent = tl.load(parents + row, mask=is_row, other=0).to(tl.int32)
    rank = tl.load(ranks + row, mask=is_row, other=0).to(tl.int32)
    depth = tl.load(depths + row, mask=is_row, other=-1).to(tl.int32)
    contexts = scratch + index * (LANES * STRIDE)  # by row
    place = tl.arange(0, STRIDE)
    tail = read_tail(all_token_ids, all_token_ids_stride, lengths, request, LAYOUT)
    tl.store(contexts + place, tail)
    is_known = row == 0
    token = tl.full([LANES], -1, tl.int32)
    worth = tl.where(row == 0, 1.0, 0.0)
    for level in range(LEVELS):
        tl.debug_barrier()  # The contexts were written by other threads.
        expands = is_known & (depth == level)
        address, cell = find_entry(table, rates, contexts + row * STRIDE, salt, expands, LAYOUT)
        parent_address = tl.gather(address, parent, 0)
        is_child = (depth == level + 1) & (parent_address >= 0)
        child = tl.load(table + parent_address * (2 + K) + 1 + rank, mask=is_child, other=-1)
        rate = tl.load(rates + tl.gather(cell, parent, 0) + rank * 4, mask=is_child, other=0.0)
        rate = bounded(rate)
        is_child = is_child & (child >= 0)
        token = tl.where(is_child, child, token)
        worth = tl.where(is_child, tl.gather(worth, parent, 0) * rate, worth)
        is_known = is_known | is_child
        older_tokens = tl.load(
            contexts + parent[:, None] * STRIDE + place[None, :] - 1,
            mask=is_child[:, None] & (place > 0)[None, :],
            other=-1,
        )
        context = tl.where((place == 0)[None, :], child[:, None], older_tokens)
        tl.store(contexts + row[:, None] * STRIDE + place[None, :], context, mask=is_child[:, None])
    is_node = (row > 0) & is_row
    tl.store(drafts + index * NODES + row - 1, token.to(tl.int64), mask=is_node)
    tl.store(worths + index * NODES + row - 1, worth, mask=is_node)
