"""Turning the inputs of a step, which vLLM prepares for chains, into those of its trees.

This is the reference; `triton.tree_inputs` does it in one launch.
"""

from __future__ import annotations

import torch

from vllm_recycle.core.tree import TreeTemplate


def place_tree_rows(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor,
    tree_rows: torch.Tensor,
    *,
    tree: TreeTemplate,
) -> torch.Tensor:
    """Put every row of a tree at the position of its depth, and give every row some token.

    To be called after the slots were computed from the positions, since slots stay linear. A node
    that was not filled has a row in the forward all the same, and any token will do for it.

    Args:
        input_ids: int32 [tokens], -1 where a node was not filled; changed in place to 0 there.
        positions: int64 [tokens], of chains; changed in place to prefix + depth.
        token_rows: int64 [logit rows], where each logit row is among the tokens, each once.
        tree_rows: int32 [logit rows], the row of the template that each is, 0 for a root.
        tree: the template, its tables on the device of the others.

    Returns:
        int64 [logit rows], the token of each row, -1 where it was not filled.

    """
    token_ids = input_ids[token_rows]
    positions[token_rows] += tree.shifts[tree_rows]
    input_ids[token_rows] = token_ids.clamp(min=0)
    return token_ids.long()
