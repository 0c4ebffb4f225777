"""The tree walk: from the tokens that the target produced at the rows to the accepted path.

The drafts are deterministic, so sampling each visited row with the request's own sampler and
following the child that equals the sample is ancestral sampling from the target: no rejection
correction is needed, and greedy decoding is a special case (Token Recycling, section 3.2, gives
the greedy walk).

`walk` takes a token for every row at once; `step_down` goes one level, for samplers whose next
row depends on what was emitted before it (penalties, generators).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_recycle.core.tree import Trees

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class WalkResult:
    """What a walk accepted.

    Attributes:
        path: int64 [batch, path], the visited rows from the root down, padded with -1.
        token_ids: int64 [batch, path], the token produced at each visited row (the last one is
            the free token), padded with -1.
        lengths: int32 [batch], visited rows of each request, the root included.

    """

    path: torch.Tensor
    token_ids: torch.Tensor
    lengths: torch.Tensor


def walk(
    sampled: torch.Tensor,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    *,
    trees: Trees,
) -> WalkResult:
    """Follow the drafts as far as the target agrees with them.

    Args:
        sampled: int64 [logit rows], the token that the target produced at each row: of every
            request its root and then its scheduled nodes.
        draft_token_ids: int64 [batch, nodes], -1 where a node was not filled; such a node matches
            nothing, as one that is not scheduled. Where siblings are equal, the path is the deepest
            one, of several the first.
        cu_num_logits: integer [batch + 1], where the rows of each request begin, and the end.
        trees: what the drafts are indexed by.

    """
    batch = len(draft_token_ids)
    depth = trees.depth
    row = torch.arange(trees.num_nodes + 1, device=sampled.device)
    last_rows = cu_num_logits[1:, None] - 1
    rows = cu_num_logits[:-1, None] + row
    produced_ids = sampled[rows.minimum(last_rows)]
    is_match = produced_ids.gather(1, trees.parents[:, 1:]) == draft_token_ids
    is_match &= rows[:, 1:] <= last_rows
    # A node is reached when it and all its ancestors agree; the root always is.
    is_missed = (trees.ancestor_mask[:, 1:, 1:] & ~is_match[:, None]).any(dim=2)
    depth_reached = trees.depths[:, 1:].masked_fill(is_missed, 0)
    max_depth, node = depth_reached.max(dim=1)
    end = torch.where(max_depth > 0, node + 1, 0)
    is_on_path = trees.ancestor_mask[torch.arange(batch, device=end.device), end]
    # One place more than a path has, for the rows that are not on it.
    place = trees.depths.where(is_on_path, depth + 1)
    path = row.new_full((batch, depth + 2), -1).scatter_(1, place, row.expand(batch, -1))
    path = path[:, :-1]
    token_ids = produced_ids.gather(1, path.clamp(min=0)).where(path >= 0, NO_TOKEN)
    return WalkResult(path, token_ids, max_depth.to(torch.int32) + 1)


def step_down(
    reached: torch.Tensor,
    sampled: torch.Tensor,
    draft_token_ids: torch.Tensor,
    *,
    trees: Trees,
) -> torch.Tensor:
    """The children of the reached rows that carry the token sampled there, bool [batch, rows].

    Args:
        reached: bool [batch, rows], all of one depth and one text; none where a walk has ended.
        sampled: int64 [batch], the token produced at these rows.
        draft_token_ids, trees: as for `walk`.

    """
    parents = trees.parents[:, 1:]
    children = reached.gather(1, parents) & (draft_token_ids == sampled[:, None])
    return torch.nn.functional.pad(children, (1, 0))
