"""Phrases from what the target verified, accepted or not.

Ouroboros (arXiv 2402.13720), section 3.3 and Figure 4. The target's token at each row is right
wherever the draft's tokens before it are: so where the draft goes on as the target does for a
while, be it behind a mistake, the target's tokens there are a phrase. And a phrase that was tried
below the trunk and not used is replaced by what the target said at its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_recycle.core.paper.draft_shape import DraftShape
from vllm_recycle.core.verification import NO_TOKEN


class Phrases(NamedTuple):
    """What is to enter the pool.

    Attributes:
        owners: int64 [batch, n], the token that each phrase follows, -1 for none.
        phrases: int64 [batch, n, length].
        replaced: int64 [batch, n, length], what is to go for each; None where nothing is.

    """

    owners: torch.Tensor
    phrases: torch.Tensor
    replaced: torch.Tensor | None = None


def harvest(
    shape: DraftShape, token_ids: torch.Tensor, sampled: torch.Tensor, cu_num_logits: torch.Tensor
) -> tuple[Phrases, Phrases]:
    """Phrases of the trunk and of the branches of every request, verified whole or in part.

    Args:
        shape: of the drafts.
        token_ids: int64 [logit rows], -1 where a row was not filled.
        sampled: int64 [logit rows], the target's token at each.
        cu_num_logits: integer [batch + 1]; the rows of a request are the root, and then the nodes
            of the tree that were verified.

    """
    row = torch.arange(shape.num_nodes + 1, device=token_ids.device)
    num_rows = cu_num_logits.diff()[:, None]
    rows = cu_num_logits[:-1, None] + row.minimum(num_rows - 1)
    drafts = token_ids[rows].where(row < num_rows, NO_TOKEN)
    outputs = sampled[rows].where(row < num_rows, NO_TOKEN)
    trunk_rows, length = shape.gamma + 1, shape.length
    runs = max(0, trunk_rows + 1 - length)  # of a phrase's length that a trunk may hold
    trunk, trunk_outputs = drafts[:, :trunk_rows], outputs[:, :trunk_rows]
    is_match = trunk[:, 1:] == trunk_outputs[:, :-1]
    owners, phrases = trunk[:, :runs], drafts.new_empty(len(drafts), 0, length)
    if runs:  # those of the target's tokens along which the draft agreed
        phrases = trunk_outputs.unfold(1, length, 1)
        is_run = is_match.unfold(1, length - 1, 1).all(dim=2)
        is_verified = row[:runs] + length <= num_rows
        owners = owners.where(is_run & is_verified & (owners >= 0), NO_TOKEN)
    # The newest first, as they were proposed; inserted last, it stays the newest.
    branches, branch_outputs = (
        rows_of_nodes[:, trunk_rows:].reshape(len(drafts), shape.branches, length).flip(1)
        for rows_of_nodes in (drafts, outputs)
    )
    # What the target said where phrases were tried: a phrase that it agrees with comes out as it
    # was, and so becomes the newest. Behind a trunk that is wrong nothing was tried.
    first_token_ids = trunk_outputs[:, -1:, None].expand(-1, shape.branches, 1)
    corrections = torch.cat((first_token_ids, branch_outputs[:, :, :-1]), dim=2)
    is_tried = (branches >= 0).all(dim=2) & is_match.all(dim=1, keepdim=True)
    branch_owners = trunk[:, -1:].where(is_tried, NO_TOKEN)
    return Phrases(owners, phrases), Phrases(branch_owners, corrections, branches)
