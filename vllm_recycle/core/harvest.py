"""Phrases from what the target verified, accepted or not.

Ouroboros (arXiv 2402.13720), section 3.3 and Figure 4. The target's token at each row is right
wherever the draft's tokens before it are: so where the draft goes on as the target does for a
while, be it behind a mistake, the target's tokens there are a phrase. And a phrase that was tried
below the trunk and not used is replaced by what the target said at its rows.
"""

from __future__ import annotations

import torch

from vllm_recycle.core.verification import NO_TOKEN


def phrases_of_trunk(
    drafts: torch.Tensor, sampled: torch.Tensor, num_rows: torch.Tensor, *, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of the target's tokens along which the draft agreed.

    Args:
        drafts: int64 [batch, rows], the last token and the trunk.
        sampled: int64 [batch, rows], the target's token at each of these rows.
        num_rows: int64 [batch], how many of them were verified.
        length: tokens of a phrase, at most `rows`.

    Returns:
        The token that each phrase follows, int64 [batch, n], -1 for none, and the phrases, int64
        [batch, n, length]; n is rows - length + 1.

    """
    phrases = sampled.unfold(1, length, 1)
    owners = drafts[:, : phrases.shape[1]]
    agrees = drafts[:, 1:] == sampled[:, :-1]
    if length > 1:
        coincides = agrees.unfold(1, length - 1, 1).all(dim=2)
    else:
        coincides = torch.ones_like(owners, dtype=torch.bool)
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
    """What the target said where phrases were tried below an accepted row of the trunk.

    A phrase that it agrees with comes out as it was, and so becomes the newest.

    Args:
        last_token_ids: int64 [batch], the row's token.
        branches: int64 [batch, branches, length], the phrases that were tried, -1 for none.
        sampled_there: int64 [batch], the target's token at that row.
        sampled: int64 [batch, branches, length], its token at each row of the branches.
        is_accepted: bool [batch]; else nothing was tried where it belongs.

    Returns:
        The token that each phrase follows, int64 [batch, branches], -1 for none, and the phrases,
        int64 [batch, branches, length], each to replace the branch of its place.

    """
    first = sampled_there[:, None, None].expand(-1, branches.shape[1], 1)
    phrases = torch.cat((first, sampled[:, :, :-1]), dim=2)
    tried = (branches >= 0).all(dim=2) & is_accepted[:, None]
    owners = last_token_ids[:, None].where(tried, NO_TOKEN)
    return owners, phrases
