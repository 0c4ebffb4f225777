"""Token Recycling as a proposer: drafts from the adjacency matrix, learns from every row.

arXiv 2408.08696, section 3. The matrix is in `adjacency`, the tree in `tree`; this module ties
the two together and holds what the method reads off the target's logits and the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_recycle.core.adjacency import AdjacencyMatrix
from vllm_recycle.core.operations import REFERENCE, Operations
from vllm_recycle.core.tree import TreeTemplate


class TokenRecyclingProposer:
    """See `vllm_recycle.core.proposer.Proposer`.

    Args:
        matrix: the adjacency matrix.
        tree: the template; its ranks must be below the matrix's k.
        seed_from_prompt: whether the prompt's bigrams enter the matrix before decoding.
        operations: what fills and updates.

    """

    def __init__(
        self,
        matrix: AdjacencyMatrix,
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

    def propose(self, sequences: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix
        return self.operations.fill_tree(
            matrix.table, sequences, last_token_ids, tree=self.tree, layout=matrix.layout
        )

    def observe(
        self, sequences: torch.Tensor, token_ids: torch.Tensor, logits: torch.Tensor
    ) -> None:
        # Every row updates the matrix; the rejected ones are the point (section 3.1).
        matrix = self.matrix
        self.operations.update_from_logits(
            matrix.table, sequences, token_ids, logits, layout=matrix.layout
        )

    def begin(self, sequence: int, prompt_token_ids: torch.Tensor) -> None:
        if not self.seed_from_prompt or prompt_token_ids.numel() < 2:
            return
        tokens, followers = recent_followers(prompt_token_ids, self.matrix.k)
        sequences = torch.full_like(tokens, sequence)
        known = self.matrix.rows_of(sequences, tokens).to(followers.dtype)
        self.matrix.update(sequences, tokens, merge_rows(followers, known))

    def release(self, sequences: Sequence[int]) -> None:
        self.matrix.clear_overlays(sequences)


def recent_followers(token_ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each token of a text, the distinct tokens that followed it, the latest first.

    Args:
        token_ids: int64 [length], length at least 2.
        k: at most this many followers a token.

    Returns:
        The distinct tokens with a follower, int64 [n], and their followers, int64 [n, k], padded
        with -1.

    """
    first, second = token_ids[:-1].flip(0), token_ids[1:].flip(0)
    # Latest pair first; of equal pairs keep the first of that order, hence the latest.
    pairs = torch.stack((first, second), dim=1)
    _, inverse = pairs.unique(dim=0, return_inverse=True)
    place = torch.arange(len(pairs))
    earliest = torch.full_like(place, len(pairs)).scatter_reduce(0, inverse, place, "amin")
    keep = earliest[inverse] == place
    first, second = first[keep], second[keep]
    by_token, order = first.sort(stable=True)
    tokens, group, size = by_token.unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(by_token)) - (size.cumsum(0) - size)[group]
    followers = token_ids.new_full((len(tokens), k), -1)
    inside = rank < k
    followers[group[inside], rank[inside]] = second[order][inside]
    return tokens, followers


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
