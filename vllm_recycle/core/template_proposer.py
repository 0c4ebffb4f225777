"""Token Recycling as a proposer: drafts from the adjacency matrix, learns from every row.

arXiv 2408.08696, section 3. The matrix is in `adjacency`, the tree in `tree`; this module ties
the two together and holds what the method reads off the target's logits and the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core.operations import REFERENCE, Operations
from vllm_recycle.core.runs import run_starts
from vllm_recycle.core.template_matrix import TemplateMatrix
from vllm_recycle.core.tree import TreeTemplate


class TemplateProposer:
    """See `vllm_recycle.core.proposer.Proposer`.

    Args:
        matrix: the adjacency matrix.
        tree: the template; its ranks must be below the matrix's k.
        seed_from_prompt: whether the prompt's bigrams enter the matrix before decoding.
        operations: what fills and updates.

    """

    def __init__(
        self,
        matrix: TemplateMatrix,
        tree: TreeTemplate,
        *,
        seed_from_prompt: bool = False,
        operations: Operations = REFERENCE,
    ) -> None:
        tree.check_ranks(matrix.k)
        self.operations = operations
        self.matrix = matrix
        self.tree = tree
        self.seed_from_prompt = seed_from_prompt

    def propose(self, idx_mapping: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        return self.operations.fill_tree(
            matrix.table, idx_mapping, last_token_ids, tree=self.tree, layout=matrix.layout
        )

    def observe(
        self,
        expanded_idx_mapping: torch.Tensor,
        token_ids: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
    ) -> None:
        # Every row updates the matrix; the rejected ones are the point (section 3.1).
        matrix = self.matrix
        self.operations.update_from_logits(
            matrix.table, expanded_idx_mapping, token_ids, logits, layout=matrix.layout
        )

    def begin(self, expanded_idx_mapping: torch.Tensor, prompt_token_ids: torch.Tensor) -> None:
        if not self.seed_from_prompt or prompt_token_ids.numel() < 2:
            return
        owners, tokens, followers = recent_followers(
            expanded_idx_mapping, prompt_token_ids, self.matrix.k
        )
        known = self.matrix.rows_of(owners, tokens).to(followers.dtype)
        self.matrix.update(owners, tokens, merge_rows(followers, known))

    def release(self, req_state_indices: Sequence[int]) -> None:
        self.matrix.clear_overlays(req_state_indices)


def recent_followers(
    expanded_idx_mapping: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each token of some texts, the distinct tokens that followed it, the latest first.

    No shape depends on a value, so that nothing waits for the device.

    Args:
        expanded_idx_mapping: int64 [length], of each token; the tokens of a text lie together.
        token_ids: int64 [length], length at least 2.
        k: at most this many followers a token.

    Returns:
        Each request's distinct tokens with a follower: whose they are, int64 [length - 1], the
        tokens, int64 [length - 1], padded with -1, and their followers, int64 [length - 1, k],
        padded with -1.

    """
    # A request and its token in one number, -1 where the next token is another's.
    key = expanded_idx_mapping << 32 | token_ids
    is_pair = expanded_idx_mapping[1:] == expanded_idx_mapping[:-1]
    first = key[:-1].where(is_pair, -1).flip(0)  # the latest pair first
    second = token_ids[1:].flip(0)
    order = second.argsort(stable=True)
    order = order[first[order].argsort(stable=True)]
    is_new = run_starts(first[order]) | run_starts(second[order])
    is_latest = torch.empty_like(is_new).scatter_(0, order, is_new) & (first >= 0)
    # Of each token the pairs to keep come first, the latest first.
    order = (first * 2 + ~is_latest).argsort(stable=True)
    first, second, is_latest = first[order], second[order], is_latest[order]
    starts = run_starts(first)
    group = starts.cumsum(0) - 1
    place = torch.arange(len(first), device=token_ids.device)
    rank = place - place.where(starts, 0).cummax(0).values
    key = torch.full_like(first, -1).scatter_(0, group, first)
    # One place more than there are, for the pairs that have none.
    nowhere = len(first) * k
    followers = first.new_full((nowhere + 1,), -1)
    target = (group * k + rank).where(is_latest & (rank < k), nowhere)
    followers.scatter_(0, target, second)
    tokens = torch.where(key >= 0, key & 0xFFFFFFFF, -1)
    return (key >> 32).clamp(min=0), tokens, followers[:-1].view(-1, k)


def merge_rows(fresh: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Put fresh successors before the known ones, without repeating any.

    Args:
        fresh: int64 [n, k], padded with -1.
        known: int64 [n, k], padded with -1.

    Returns:
        int64 [n, k], padded with -1.

    """
    repeated = (known[:, :, None] == fresh[:, None, :]).any(dim=2)
    both = torch.cat((fresh, known.masked_fill(repeated, -1)), dim=1)
    order = (both < 0).sort(dim=1, stable=True).indices
    return both.gather(1, order)[:, : fresh.shape[1]]
