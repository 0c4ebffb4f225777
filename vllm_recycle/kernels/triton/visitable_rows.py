"""Which rows of trees can be visited at all, known before any token is sampled.

A walk visits a few rows of a tree, and sampling reads and writes the logits of each row several
times. But the token of a draft, to be sampled at the row above, has to come before every token that
is more probable there, each with the noise that it is sampled with: whatever is cut off the
improbable end (top-k, top-p, min-p) keeps the more probable ones too. Against the best few of a row
that is quickly seen, and it leaves the path and hardly anything beside it.

Rows that are left out are not lost: a walk that would reach one ends above it, as if it had not
been drafted. So the tokens are right whatever is chosen here. There is no word to the host.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_recycle.kernels.triton.trees import DeviceTrees


def choose_rows(
    logits: torch.Tensor,
    successors: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    trees: DeviceTrees,
    idx_mapping: torch.Tensor,
    cu_num_logits: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    noised_argmax: Any,
    use_fp64: bool,
    most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rows of each tree that can be visited.

    Args:
        logits: floating [logit rows, vocab].
        successors: int32 [logit rows, k], the most probable tokens, best first.
        draft_token_ids: int64 [max_num_reqs, nodes], -1 where a node was not filled.
        trees: of all requests.
        idx_mapping: integer [batch].
        cu_num_logits: integer [batch + 1].
        positions: int64 [tokens].
        logits_indices: int64 [logit rows], where each logit row is among the tokens.
        temperatures: float32 [max_num_reqs], 0 for no noise.
        seeds: int64 [max_num_reqs].
        noised_argmax: a function of Triton, vLLM's `gumbel_noised_argmax`: where the maximum of
            logits with their noise is, along the first axis.
        use_fp64: whether the noise has 64 bits.
        most: rows of a request, at least 1.

    Returns:
        int64 [batch, most], indices of logit rows, filled up with the root's; and the drafts of
        these rows, int64 [batch, nodes], -1 elsewhere.

    """
    batch, k = len(idx_mapping), successors.shape[1]
    nodes = trees.num_nodes
    assert draft_token_ids.shape[1] == nodes
    assert logits.stride(1) == 1
    assert successors.is_contiguous()
    assert draft_token_ids.is_contiguous()
    rows = torch.empty(batch, most, dtype=torch.int64, device=logits.device)
    drafts = torch.empty(batch, nodes, dtype=torch.int64, device=logits.device)
    lanes = triton.next_power_of_2(nodes + 1)
    _choose_rows_kernel[(batch,)](
        rows,
        drafts,
        logits,
        logits.stride(0),
        successors,
        draft_token_ids,
        trees.parents,
        idx_mapping.contiguous(),
        cu_num_logits.contiguous(),
        positions.contiguous(),
        logits_indices.contiguous(),
        temperatures,
        seeds,
        NODES=nodes,
        LANES=lanes,
        K=k,
        CANDIDATES=triton.next_power_of_2(k + 1),
        MOST=most,
        PLACES=triton.next_power_of_2(most),
        ROUNDS=trees.depth.bit_length(),
        NOISED_ARGMAX=noised_argmax,
        USE_FP64=use_fp64,
        num_warps=min(8, max(1, lanes // 32)),
    )
    return rows, drafts


@triton.jit
def _choose_rows_kernel(
    rows: tl.tensor,
    drafts: tl.tensor,
    logits: tl.tensor,
    row_stride: int,
    successors: tl.tensor,
    draft_token_ids: tl.tensor,
    parents: tl.tensor,
    idx_mapping: tl.tensor,
    cu_num_logits: tl.tensor,
    positions: tl.tensor,
    logits_indices: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    NODES: tl.constexpr,
    LANES: tl.constexpr,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
    ROUNDS: tl.constexpr,
    NOISED_ARGMAX: tl.constexpr,
    USE_FP64: tl.constexpr,
) -> None:
    """A program a request and a lane a row, whose draft is the last of its candidates."""
    index = tl.program_id(0).to(tl.int64)
    request = tl.load(idx_mapping + index).to(tl.int64)
    temperature = tl.load(temperatures + request)
    seed = tl.load(seeds + request)
    start = tl.load(cu_num_logits + index).to(tl.int64)
    num_rows = tl.load(cu_num_logits + index + 1).to(tl.int64) - start
    row = tl.arange(0, LANES)
    scheduled = (row > 0) & (row <= NODES) & (row < num_rows)
    parent = tl.load(parents + request * (NODES + 1) + row, mask=scheduled, other=0).to(tl.int32)
    draft = tl.load(draft_token_ids + request * NODES + row - 1, mask=scheduled, other=-1)
    drafted = draft >= 0
    above = start + parent

    candidate = tl.arange(0, CANDIDATES)[:, None]
    token = tl.load(
        successors + above[None, :] * K + candidate,
        mask=drafted[None, :] & (candidate < K),
        other=0,
    ).to(tl.int64)
    token = tl.where((candidate == K) & drafted[None, :], draft[None, :], token)
    of_row = logits + above * row_stride
    low = float("-inf")
    logit = tl.load(of_row[None, :] + token, mask=drafted[None, :], other=low).to(tl.float32)
    own = tl.load(of_row + draft, mask=drafted, other=low).to(tl.float32)
    counts = (candidate == K) | ((candidate < K) & (logit > own[None, :]))
    logit = tl.where(counts, logit, low)
    position = tl.load(logits_indices + above, mask=drafted, other=0)
    position = tl.load(positions + position, mask=drafted, other=0)
    _, best = NOISED_ARGMAX(
        logit,
        token,
        counts,
        seed,
        position[None, :],
        temperature,
        False,  # noise of the target, not of a draft model
        USE_FP64,
    )
    misses = tl.where((drafted & (best == K)) | (row == 0), 0, 1)
    # Each round sees twice as much of a path.
    for _ in tl.static_range(ROUNDS):
        misses += tl.gather(misses, parent, 0)
        parent = tl.gather(parent, parent, 0)

    can_be_visited = (misses == 0).to(tl.int32)
    place = tl.cumsum(can_be_visited, axis=0) - 1
    chosen = (can_be_visited > 0) & (place < MOST)
    first = rows + index * MOST
    tl.store(first + place, start + row, mask=chosen)
    rest = tl.arange(0, PLACES)
    is_rest = (rest >= tl.sum(chosen.to(tl.int32), axis=0)) & (rest < MOST)
    tl.store(first + rest, start + tl.zeros([PLACES], tl.int64), mask=is_rest)
    tl.store(
        drafts + index * NODES + row - 1,
        tl.where(chosen, draft, -1),
        mask=(row > 0) & (row <= NODES),
    )
