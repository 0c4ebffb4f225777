"""Turning the inputs of a step, which vLLM prepares for chains, into those of its trees."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.kernels.triton.trees import DeviceTrees

ROWS = 128  # of one program


def place_tree_rows(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    *,
    trees: DeviceTrees,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    tree_indices: torch.Tensor,
) -> torch.Tensor:
    """Put every row of a tree at the position of its depth, and give every row some token.

    To be called after the slots were computed from the positions, since slots stay linear. A node
    that was not filled has a row in the forward all the same, and any token will do for it.

    Args:
        input_ids: int32 [tokens], -1 where a node was not filled; changed in place to 0 there.
        positions: int64 [tokens], of chains; changed in place to prefix + depth.
        logits_indices: int64 [logit rows], where each logit row is among the tokens, each once.
        expanded_local_pos: int32 [logit rows], the row of its tree that each is, 0 for a root.
        trees: of all requests.
        idx_mapping: integer [batch], each request has a logit row or more.
        expanded_idx_mapping: integer [logit rows], whose tree each row is of.
        tree_indices: int64 [max_num_reqs], of which the first are changed to `idx_mapping`: graphs
            read there which trees are those of a step.

    Returns:
        int64 [logit rows], the token of each row, -1 where it was not filled.

    """
    num_rows = logits_indices.shape[0]
    assert len(idx_mapping) <= num_rows
    assert input_ids.is_contiguous()
    assert positions.is_contiguous()
    row_token_ids = torch.empty(num_rows, dtype=torch.int64, device=input_ids.device)
    _place_tree_rows_kernel[(triton.cdiv(num_rows, ROWS),)](
        row_token_ids,
        input_ids,
        positions,
        logits_indices.contiguous(),
        expanded_local_pos.contiguous(),
        trees.depths,
        idx_mapping.contiguous(),
        expanded_idx_mapping.contiguous(),
        tree_indices,
        len(idx_mapping),
        num_rows,
        TREE_ROWS=trees.num_nodes + 1,
        ROWS=ROWS,
        num_warps=4,
    )
    return row_token_ids


@triton.jit(do_not_specialize=["batch", "num_rows"])
def _place_tree_rows_kernel(
    row_token_ids: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    logits_indices: tl.tensor,
    expanded_local_pos: tl.tensor,
    depths: tl.tensor,
    idx_mapping: tl.tensor,
    expanded_idx_mapping: tl.tensor,
    tree_indices: tl.tensor,
    batch: int,
    num_rows: int,
    TREE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    token_row = tl.load(logits_indices + row, mask=is_row, other=0)
    tree_row = tl.load(expanded_local_pos + row, mask=is_row, other=0)
    request = tl.load(expanded_idx_mapping + row, mask=is_row, other=0).to(tl.int64)
    depth = tl.load(depths + request * TREE_ROWS + tree_row, mask=is_row, other=0)
    shift = depth - tree_row
    token_id = tl.load(input_ids + token_row, mask=is_row, other=0)
    position = tl.load(positions + token_row, mask=is_row, other=0)
    tl.store(row_token_ids + row, token_id.to(tl.int64), mask=is_row)
    tl.store(positions + token_row, position + shift, mask=is_row)
    tl.store(input_ids + token_row, tl.maximum(token_id, 0), mask=is_row)
    index = tl.load(idx_mapping + row, mask=row < batch, other=0)
    tl.store(tree_indices + row, index.to(tl.int64), mask=row < batch)
