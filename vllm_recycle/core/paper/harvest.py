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
    row_token_ids: torch.Tensor,
    sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    shape: DraftShape,
) -> tuple[Phrases, Phrases]:
    """Phrases of the trunk and of the branches of every request, verified whole or in part.

    Args:
        row_token_ids: int64 [logit rows], -1 where a row was not filled.
        sampled: int64 [logit rows], the target's token at each.
        cu_num_logits: integer [batch + 1]; the rows of a request are the root, and then the nodes
            of the tree that were verified.
        shape: of the drafts.

    """
    row = torch.arange(shape.num_nodes + 1, device=row_token_ids.device)
    num_rows = cu_num_logits.diff()[:, None]
    rows = cu_num_logits[:-1, None] + row.minimum(num_rows - 1)
    drafts = row_token_ids[rows].where(row < num_rows, NO_TOKEN)
    outputs = sampled[rows].where(row < num_rows, NO_TOKEN)
    trunk_rows, length = shape.gamma + 1, shape.length
    trunk, trunk_outputs = drafts[:, :trunk_rows], outputs[:, :trunk_rows]
    if shape.num_runs:
        trunk_phrases = phrases_of_trunk(trunk, trunk_outputs, num_rows.flatten(), length=length)
    else:
        trunk_phrases = drafts[:, :0], drafts.new_empty(len(drafts), 0, length)
    # The newest first, as they were proposed; inserted last, it stays the newest.
    branch_shape = (len(drafts), shape.branches, length)
    branches = drafts[:, trunk_rows:].reshape(branch_shape).flip(1)
    owners, corrections = corrections_of_branches(
        trunk[:, -1],
        branches,
        trunk_outputs[:, -1],
        outputs[:, trunk_rows:].reshape(branch_shape).flip(1),
        (trunk[:, 1:] == trunk_outputs[:, :-1]).all(dim=1),
    )
    return Phrases(*trunk_phrases), Phrases(owners, corrections, branches)


def phrases_of_trunk(
    drafts: torch.Tensor, sampled: torch.Tensor, num_rows: torch.Tensor, *, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of the target's tokens along which the draft agreed: owners and phrases of `Phrases`.

    Args:
        drafts: int64 [batch, rows], the last token and the trunk.
        sampled: int64 [batch, rows], the target's token at each of these rows.
        num_rows: int64 [batch], how many of them were verified.
        length: tokens of a phrase, 2 to `rows`; there are rows - length + 1 phrases.

    """
    phrases = sampled.unfold(1, length, 1)
    owners = drafts[:, : phrases.shape[1]]
    is_match = drafts[:, 1:] == sampled[:, :-1]
    is_run = is_match.unfold(1, length - 1, 1).all(dim=2)
    row = torch.arange(owners.shape[1], device=drafts.device)
    is_verified = row + length <= num_rows[:, None]
    return owners.where(is_run & is_verified & (owners >= 0), NO_TOKEN), phrases


def corrections_of_branches(
    last_token_ids: torch.Tensor,
    branches: torch.Tensor,
    next_token_ids: torch.Tensor,
    sampled: torch.Tensor,
    is_accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target said where phrases were tried: owners and phrases of `Phrases`, by branch.

    A phrase that it agrees with comes out as it was, and so becomes the newest.

    Args:
        last_token_ids: int64 [batch], the last token of the trunk, that they were tried below.
        branches: int64 [batch, branches, length], the phrases that were tried, -1 for none.
        next_token_ids: int64 [batch], the target's token behind it.
        sampled: int64 [batch, branches, length], its token at each row of the branches.
        is_accepted: bool [batch], whether it is; else nothing was tried where it belongs.

    """
    first_token_ids = next_token_ids[:, None, None].expand(-1, branches.shape[1], 1)
    phrases = torch.cat((first_token_ids, sampled[:, :, :-1]), dim=2)
    is_tried = (branches >= 0).all(dim=2) & is_accepted[:, None]
    owners = last_token_ids[:, None].where(is_tried, NO_TOKEN)
    return owners, phrases
