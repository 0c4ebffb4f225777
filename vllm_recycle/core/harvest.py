"""Phrases from what the target verified, accepted or not.

Ouroboros (arXiv 2402.13720), section 3.3 and Figure 4. The target's token at each row is right
wherever the draft's tokens before it are: so where the draft goes on as the target does for a
while, be it behind a mistake, the target's tokens there are a phrase. And a phrase that was tried
below the trunk and not used is replaced by what the target said at its rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_recycle.core.draft_shape import DraftShape
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
    said = sampled[rows].where(row < num_rows, NO_TOKEN)
    behind, length = shape.gamma + 1, shape.length
    trunk, said_there = drafts[:, :behind], said[:, :behind]
    if shape.num_runs:
        found = phrases_of_trunk(trunk, said_there, num_rows.flatten(), length=length)
    else:
        found = drafts[:, :0], drafts.new_empty(len(drafts), 0, length)
    # The newest first, as they were proposed; inserted last, it stays the newest.
    each = (len(drafts), shape.branches, length)
    tried = drafts[:, behind:].reshape(each).flip(1)
    owners, corrected = corrections_of_branches(
        trunk[:, -1],
        tried,
        said_there[:, -1],
        said[:, behind:].reshape(each).flip(1),
        (trunk[:, 1:] == said_there[:, :-1]).all(dim=1),
    )
    return Phrases(*found), Phrases(owners, corrected, tried)


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
    agrees = drafts[:, 1:] == sampled[:, :-1]
    coincides = agrees.unfold(1, length - 1, 1).all(dim=2)
    row = torch.arange(owners.shape[1], device=drafts.device)
    verified = row + length <= num_rows[:, None]
    return owners.where(coincides & verified & (owners >= 0), NO_TOKEN), phrases


def corrections_of_branches(
    last_token_ids: torch.Tensor,
    branches: torch.Tensor,
    sampled_there: torch.Tensor,
    sampled: torch.Tensor,
    is_accepted: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target said where phrases were tried: owners and phrases of `Phrases`, by branch.

    A phrase that it agrees with comes out as it was, and so becomes the newest.

    Args:
        last_token_ids: int64 [batch], the last token of the trunk, that they were tried below.
        branches: int64 [batch, branches, length], the phrases that were tried, -1 for none.
        sampled_there: int64 [batch], the target's token behind it.
        sampled: int64 [batch, branches, length], its token at each row of the branches.
        is_accepted: bool [batch], whether it is; else nothing was tried where it belongs.

    """
    first = sampled_there[:, None, None].expand(-1, branches.shape[1], 1)
    phrases = torch.cat((first, sampled[:, :, :-1]), dim=2)
    tried = (branches >= 0).all(dim=2) & is_accepted[:, None]
    owners = last_token_ids[:, None].where(tried, NO_TOKEN)
    return owners, phrases
