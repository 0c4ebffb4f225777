"""Turning the inputs of a step, which vLLM prepares for chains, into those of its trees."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_recycle.core.tree import TreeTemplate

ROWS = 128  # of one program


def place_tree_rows(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    *,
    tree: TreeTemplate,
) -> torch.Tensor:
    """Put every row of a tree at the position of its depth, and give every row some token.

    To be called after the slots were computed from the positions, since slots stay linear. A node
    that was not filled has a row in the forward all the same, and any token will do for it.

    Args:
        input_ids: int32 [tokens], -1 where a node was not filled; changed in place to 0 there.
        positions: int64 [tokens], of chains; changed in place to prefix + depth.
        logits_indices: int64 [logit rows], where each logit row is among the tokens, each once.
        expanded_local_pos: int32 [logit rows], the row of the template that each is, 0 for a root.
        tree: the template, its tables on the device of the others.

    Returns:
        int64 [logit rows], the token of each row, -1 where it was not filled.

    """
    num_rows = logits_indices.shape[0]
    assert input_ids.is_contiguous()
    assert positions.is_contiguous()
    row_token_ids = torch.empty(num_rows, dtype=torch.int64, device=input_ids.device)
    _place_tree_rows_kernel[(triton.cdiv(num_rows, ROWS),)](
        row_token_ids,
        input_ids,
        positions,
        logits_indices.contiguous(),
        expanded_local_pos.contiguous(),
        tree.shifts,
        num_rows,
        ROWS=ROWS,
        num_warps=4,
    )
    return row_token_ids


@triton.jit(do_not_specialize=["num_rows"])
def _place_tree_rows_kernel(
    row_token_ids: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    logits_indices: tl.tensor,
    expanded_local_pos: tl.tensor,
    shifts: tl.tensor,
    num_rows: int,
    ROWS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < num_rows
    token_row = tl.load(logits_indices + row, mask=real, other=0)
    shift = tl.load(
        shifts + tl.load(expanded_local_pos + row, mask=real, other=0), mask=real, other=0
    )
    token_id = tl.load(input_ids + token_row, mask=real, other=0)
    position = tl.load(positions + token_row, mask=real, other=0)
    tl.store(row_token_ids + row, token_id.to(tl.int64), mask=real)
    tl.store(positions + token_row, position + shift, mask=real)
    tl.store(input_ids + token_row, tl.maximum(token_id, 0), mask=real)
