"""The walk in one launch, a lane per row: the twin of `core.verification.walk`.

The host does not wait for it, so a CUDA graph can capture it. Every rank computes the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.kernels.triton.trees import DeviceTrees

# Added up once for each row of the longest path, it is still above the least int32.
_FAR = tl.constexpr(-(1 << 20))


def walk(
    sampled: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    trees: Trees | DeviceTrees,
    idx_mapping: torch.Tensor | None = None,
) -> WalkResult:
    """Accept of each draft what the target agrees with; see `vllm_recycle.core.verification.walk`.

    Args:
        sampled: int64 [logit rows].
        draft_token_ids: int64 [batch, nodes], -1 where a node was not filled; with `idx_mapping`
            those of all requests, int64 [max_num_reqs, nodes].
        cu_num_logits: integer [batch + 1].
        trees: as the drafts, of the batch or of all requests; on the same device.
        idx_mapping: integer [batch], where the requests of the batch are among all; None where
            drafts and trees are those of the batch.

    """
    if idx_mapping is None:
        idx_mapping = torch.arange(len(draft_token_ids), device=sampled.device)
    batch, nodes = len(idx_mapping), draft_token_ids.shape[1]
    assert nodes == trees.num_nodes
    assert trees.parents.stride(1) == 1
    places = trees.depth + 1
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
        trees.parents,
        trees.parents.stride(0),
        idx_mapping.contiguous(),
        NODES=nodes,
        PATH=places,
        LANES=lanes,
        PATH_LANES=triton.next_power_of_2(places),
        ROUNDS=trees.depth.bit_length(),
        num_warps=num_warps(lanes),
    )
    return WalkResult(path, token_ids, lengths)


def num_warps(lanes: int) -> int:
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
    parents_stride: int,
    idx_mapping: tl.tensor,
    NODES: tl.constexpr,
    PATH: tl.constexpr,
    LANES: tl.constexpr,
    PATH_LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    """A program serves a request: of the rows whose whole path agrees it walks to the deepest."""
    index = tl.program_id(0).to(tl.int64)
    request = tl.load(idx_mapping + index).to(tl.int64)
    parents += request * parents_stride
    start = tl.load(cu_num_logits + index).to(tl.int64)
    num_rows = tl.load(cu_num_logits + index + 1).to(tl.int64) - start
    sampled_tokens = sampled + start
    row = tl.arange(0, LANES)
    # Parents come first: where a node is scheduled, so are its ancestors.
    is_scheduled = (row > 0) & (row <= NODES) & (row < num_rows)
    parent = tl.load(parents + row, mask=is_scheduled, other=0).to(tl.int32)
    draft = tl.load(draft_token_ids + request * NODES + row - 1, mask=is_scheduled, other=-1)
    agrees = (draft >= 0) & (tl.load(sampled_tokens + parent, mask=is_scheduled, other=-1) == draft)
    # The depth where all of a path agrees, else far below 0. Each round sees twice as much of it.
    depth = tl.where(agrees, 1, tl.where(row == 0, 0, _FAR))
    for _ in tl.static_range(ROUNDS):
        depth += tl.gather(depth, parent, 0)
        parent = tl.gather(parent, parent, 0)
    # The deepest, and of several the first, as one number.
    best_key = tl.max(tl.where(depth >= 0, depth * LANES + (LANES - 1 - row), 0), axis=0)
    last_row = LANES - 1 - best_key % LANES
    length = best_key // LANES + 1
    tl.store(lengths + index, length)
    place = tl.arange(0, PATH_LANES)
    visited_row = tl.full([PATH_LANES], -1, tl.int64)
    for step in range(length):
        visited_row = tl.where(place == length - 1 - step, last_row.to(tl.int64), visited_row)
        last_row = tl.load(parents + last_row).to(tl.int32)
    emitted_token = tl.load(sampled_tokens + visited_row, mask=visited_row >= 0, other=-1)
    tl.store(path + index * PATH + place, visited_row, mask=place < PATH)
    tl.store(token_ids + index * PATH + place, emitted_token.to(tl.int64), mask=place < PATH)
