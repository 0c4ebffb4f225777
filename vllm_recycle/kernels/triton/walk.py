"""Drafting and the walk, a lane a node.

Twins of `core.adjacency.fill_tree` and `core.verification.walk`, in one launch each, without a word
to the host, so that they can be part of a captured graph. Every rank computes the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.triton.trees import DeviceTrees

# Added up for as many rows as a path can have, still above the least int32.
_FAR = tl.constexpr(-(1 << 20))


def walk(
    sampled: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    tree: TreeTemplate | DeviceTrees,
    idx_mapping: torch.Tensor | None = None,
) -> WalkResult:
    """See `vllm_recycle.core.verification.walk`; the tree's tables are on the same device.

    With `DeviceTrees`, `idx_mapping`, integer [batch], says which are those of the batch.
    """
    batch, nodes = draft_token_ids.shape
    assert nodes == tree.num_nodes
    assert (idx_mapping is None) == isinstance(tree, TreeTemplate)
    places = tree.depth + 1
    path = torch.empty(batch, places, dtype=torch.int64, device=sampled.device)
    token_ids = torch.empty_like(path)
    lengths = torch.empty(batch, dtype=torch.int32, device=sampled.device)
    lanes = triton.next_power_of_2(nodes + 1)
    _walk_kernel[(batch,)](
        path,
        token_ids,
        lengths,
        sampled.contiguous(),
        draft_token_ids.contiguous(),
        cu_num_logits.contiguous(),
        tree.parents,
        idx_mapping,
        NODES=nodes,
        PATH=places,
        LANES=lanes,
        PLACES=triton.next_power_of_2(places),
        ROUNDS=tree.depth.bit_length(),
        num_warps=_warps(lanes),
    )
    return WalkResult(path, token_ids, lengths)


def _warps(lanes: int) -> int:
    return min(8, max(1, lanes // 32))


@triton.jit
def _walk_kernel(
    path: tl.tensor,
    token_ids: tl.tensor,
    lengths: tl.tensor,
    sampled: tl.tensor,
    draft_token_ids: tl.tensor,
    cu_num_logits: tl.tensor,
    parents: tl.tensor,
    idx_mapping: tl.tensor | None,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    LANES: tl.constexpr,
    PLACES: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    """A program a request and a lane a row: whether its whole path agrees, then the deepest."""
    index = tl.program_id(0).to(tl.int64)
    if idx_mapping is not None:
        parents += tl.load(idx_mapping + index).to(tl.int64) * (NODES + 1)
    start = tl.load(cu_num_logits + index).to(tl.int64)
    num_rows = tl.load(cu_num_logits + index + 1).to(tl.int64) - start
    produced = sampled + start
    row = tl.arange(0, LANES)
    # Parents come first: where a node is scheduled, so are its ancestors.
    scheduled = (row > 0) & (row <= NODES) & (row < num_rows)
    parent = tl.load(parents + row, mask=scheduled, other=0).to(tl.int32)
    draft = tl.load(draft_token_ids + index * NODES + row - 1, mask=scheduled, other=-1)
    agrees = (draft >= 0) & (tl.load(produced + parent, mask=scheduled, other=-1) == draft)
    # The depth where all of a path agrees, else far below 0. Each round sees twice as much of it.
    depth = tl.where(agrees, 1, tl.where(row == 0, 0, _FAR))
    for _ in tl.static_range(ROUNDS):
        depth += tl.gather(depth, parent, 0)
        parent = tl.gather(parent, parent, 0)
    # The deepest, and of several the first, as one number.
    best = tl.max(tl.where(depth >= 0, depth * LANES + (LANES - 1 - row), 0), axis=0)
    last = LANES - 1 - best % LANES
    length = best // LANES + 1
    tl.store(lengths + index, length)
    place = tl.arange(0, PLACES)
    visited = tl.full([PLACES], -1, tl.int64)
    for step in range(length):
        visited = tl.where(place == length - 1 - step, last.to(tl.int64), visited)
        last = tl.load(parents + last).to(tl.int32)
    emitted = tl.load(produced + visited, mask=visited >= 0, other=-1)
    tl.store(path + index * PATH + place, visited, mask=place < PATH)
    tl.store(token_ids + index * PATH + place, emitted.to(tl.int64), mask=place < PATH)
