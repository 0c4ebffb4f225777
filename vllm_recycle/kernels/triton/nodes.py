"""Drafting and the walk, a lane a node.

Twins of `core.adjacency.fill_tree` and `core.verification.walk`, in one launch each, without a word
to the host, so that they can be part of a captured graph. Every rank computes the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core.adjacency import TableLayout
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.verification import WalkResult


def fill_tree(
    table: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_token_ids: torch.Tensor,
    *,
    tree: TreeTemplate,
    layout: TableLayout,
) -> torch.Tensor:
    """See `vllm_recycle.core.adjacency.fill_tree`; the tree's tables are on the table's device."""
    batch, nodes = last_token_ids.shape[0], tree.num_nodes
    assert table.is_contiguous()
    drafts = torch.empty(batch, nodes, dtype=torch.int64, device=table.device)
    lanes = triton.next_power_of_2(nodes)
    _fill_tree_kernel[(batch,)](
        drafts,
        table,
        idx_mapping.contiguous(),
        last_token_ids.contiguous(),
        tree.paths,
        tree.ranks,
        NODES=nodes,
        PATH=tree.paths.shape[1],
        LANES=lanes,
        WIDTH=1 + layout.k,
        FIRST_OVERLAY=layout.first_overlay,
        OVERLAY_ROWS=layout.overlay_rows,
        READS_SHARED=layout.reads_shared,
        num_warps=_warps(lanes),
    )
    return drafts


def walk(
    sampled: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    tree: TreeTemplate,
) -> WalkResult:
    """See `vllm_recycle.core.verification.walk`; the tree's tables are on the same device."""
    batch, nodes = draft_token_ids.shape
    assert nodes == tree.num_nodes
    path = torch.empty(batch, tree.paths.shape[1], dtype=torch.int64, device=sampled.device)
    token_ids = torch.empty_like(path)
    lengths = torch.empty(batch, dtype=torch.int32, device=sampled.device)
    lanes = triton.next_power_of_2(nodes)
    _walk_kernel[(batch,)](
        path,
        token_ids,
        lengths,
        sampled.contiguous(),
        draft_token_ids.contiguous(),
        cu_num_logits.contiguous(),
        tree.paths,
        NODES=nodes,
        PATH=path.shape[1],
        LANES=lanes,
        PLACES=triton.next_power_of_2(path.shape[1]),
        num_warps=_warps(lanes),
    )
    return WalkResult(path, token_ids, lengths)


def _warps(lanes: int) -> int:
    return min(8, max(1, lanes // 32))


@triton.jit
def _fill_tree_kernel(
    drafts: tl.tensor,
    table: tl.tensor,
    idx_mapping: tl.tensor,
    last_token_ids: tl.tensor,
    paths: tl.tensor,
    ranks: tl.tensor,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST_OVERLAY: tl.constexpr,
    OVERLAY_ROWS: tl.constexpr,
    READS_SHARED: tl.constexpr,
) -> None:
    """A program a request and a lane a node, which looks up its ancestors again by itself.

    So lanes need not wait for each other; those below one ancestor read the same words.
    """
    index = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, LANES)
    real = node < NODES
    overlay = FIRST_OVERLAY + tl.load(idx_mapping + index).to(tl.int64) * OVERLAY_ROWS
    token = tl.zeros([LANES], tl.int64) + tl.load(last_token_ids + index)
    for depth in range(1, PATH):
        row = tl.load(paths + (node + 1) * PATH + depth, mask=real, other=-1)
        below = row >= 0
        column = 1 + tl.load(ranks + row, mask=below, other=0)
        # The overlay and the shared matrix are read at once: one latency a level.
        successor = tl.full([LANES], -1, tl.int32)
        if READS_SHARED:
            successor = tl.load(table + (token + 1) * WIDTH + column, mask=below, other=-1)
        if OVERLAY_ROWS:
            own = table + (overlay + (token & (OVERLAY_ROWS - 1))) * WIDTH
            tag = tl.load(own, mask=below, other=-1)
            successor = tl.where(
                tag == token, tl.load(own + column, mask=below, other=-1), successor
            )
        token = tl.where(below, successor.to(tl.int64), token)
    tl.store(drafts + index * NODES + node, token, mask=real)


@triton.jit
def _walk_kernel(
    path: tl.tensor,
    token_ids: tl.tensor,
    lengths: tl.tensor,
    sampled: tl.tensor,
    draft_token_ids: tl.tensor,
    cu_num_logits: tl.tensor,
    paths: tl.tensor,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    LANES: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """A program a request and a lane a node: whether its whole path agrees, then the deepest."""
    index = tl.program_id(0).to(tl.int64)
    start = tl.load(cu_num_logits + index).to(tl.int64)
    num_rows = tl.load(cu_num_logits + index + 1).to(tl.int64) - start
    node = tl.arange(0, LANES)
    # Parents come first: where a node is scheduled, so are its ancestors.
    scheduled = (node < NODES) & (node + 1 < num_rows)
    produced = sampled + start
    drafts = draft_token_ids + index * NODES
    reached = scheduled
    depth = tl.zeros([LANES], tl.int32)
    parent = tl.zeros([LANES], tl.int64)
    for level in range(1, PATH):
        row = tl.load(paths + (node + 1) * PATH + level, mask=scheduled, other=-1)
        below = row >= 0
        draft = tl.load(drafts + row - 1, mask=below, other=-1)
        agrees = (draft >= 0) & (tl.load(produced + parent, mask=below, other=-1) == draft)
        reached = reached & (agrees | (row < 0))
        depth += below.to(tl.int32)
        parent = row
    # The deepest, and of several the first, as one number; -1 where the root alone was reached.
    best = tl.max(tl.where(reached, depth * LANES + (LANES - 1 - node), -1), axis=0)
    last = tl.where(best >= 0, LANES - best % LANES, 0)
    tl.store(lengths + index, tl.where(best >= 0, best // LANES, 0) + 1)
    place = tl.arange(0, PLACES)
    visited = tl.load(paths + last * PATH + place, mask=place < PATH, other=-1)
    emitted = tl.load(produced + visited, mask=visited >= 0, other=-1)
    tl.store(path + index * PATH + place, visited, mask=place < PATH)
    tl.store(token_ids + index * PATH + place, emitted.to(tl.int64), mask=place < PATH)
