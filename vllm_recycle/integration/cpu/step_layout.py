"""Where the trees of a step are among its flat rows: the one place that does this arithmetic.

It is index arithmetic on a few dozen numbers, done in numpy, whose calls cost a third of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_recycle.core.tree import Trees


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step's requests and their drafts, in batch order.

    "Token rows" are the rows of the forward, "logit rows" those that logits were computed for:
    of each request the root and its nodes (a request without a draft is a root alone).

    Attributes:
        trees: of the requests, of which each has a prefix.
        are_chains: whether each node is the only child of the row before it, in all of them: such
            a step is as vLLM prepares it.
        num_nodes: int64 [batch], scheduled nodes of each request.
        first_token_row: int64 [batch], token row of each root.
        cu_num_logits: int64 [batch + 1], logit row of each root, and the number of logit rows.
        row_token_ids: int64 [logit rows], input token of each logit row, -1 where a node was not
            filled, and at roots that nothing is sampled for.
        drafts: int64 [batch, nodes], -1 where not filled or not scheduled.
        request_of_logit_row: int64 [logit rows], the request that each logit row belongs to.
        tree_token_rows: int64 [n], token rows of all requests that have a draft.
        tree_rows: int64 [n], the row of its tree that each of these is.
        tree_requests: int64 [n], whose each of these is.

    """

    trees: Trees
    are_chains: bool
    num_nodes: torch.Tensor
    first_token_row: torch.Tensor
    cu_num_logits: torch.Tensor
    row_token_ids: torch.Tensor
    drafts: torch.Tensor
    request_of_logit_row: torch.Tensor
    tree_token_rows: torch.Tensor
    tree_rows: torch.Tensor
    tree_requests: torch.Tensor

    @classmethod
    def make(
        cls,
        *,
        trees: Trees,
        num_nodes: torch.Tensor,
        last_token_row: torch.Tensor,
        row_token_ids: torch.Tensor,
    ) -> StepLayout:
        """Lay out a step.

        Args:
            trees: of the requests.
            num_nodes: int64 [batch], scheduled nodes of each request.
            last_token_row: int64 [batch], the last token row of each request.
            row_token_ids: int64 [logit rows], input token of each logit row.

        """
        nodes = num_nodes.numpy()
        cu_num_logits = np.concatenate(([0], np.cumsum(nodes + 1)))
        first_token_row = last_token_row.numpy() - nodes
        row = np.arange(trees.num_nodes + 1)
        column = nodes[:, None]
        node_rows = cu_num_logits[:-1, None] + np.minimum(row[1:], column)
        drafts = np.where(row[1:] <= column, row_token_ids.numpy()[node_rows], -1)
        in_tree = (row <= column) & (column > 0)
        are_chains = not (trees.parents.numpy()[:, 1:] != row[:-1])[in_tree[:, 1:]].any()
        tree_token_rows = (first_token_row[:, None] + row)[in_tree]
        arrays = {
            "first_token_row": first_token_row,
            "cu_num_logits": cu_num_logits,
            "drafts": drafts,
            "request_of_logit_row": np.repeat(np.arange(len(nodes)), nodes + 1),
            "tree_token_rows": tree_token_rows,
            "tree_rows": np.broadcast_to(row, in_tree.shape)[in_tree],
            "tree_requests": np.nonzero(in_tree)[0],
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls(trees, are_chains, num_nodes, row_token_ids=row_token_ids, **tensors)

    def place(self, positions: Sequence[torch.Tensor], input_ids: torch.Tensor) -> None:
        """Turn the inputs that were prepared for chains into those of trees.

        To be called after the slots were computed from the positions, since slots stay linear.

        Args:
            positions: each int64 [tokens], or [dimensions, tokens] of M-RoPE, corrected in place to
                prefix + depth.
            input_ids: integer [tokens]; nodes that were not filled get a token in place.

        """
        if not self.are_chains:
            depths = self.trees.depths[self.tree_requests, self.tree_rows]
            for of_rows in positions:
                of_rows[..., self.tree_token_rows] += depths - self.tree_rows
        # A node that was not filled still has a row; any token will do for it.
        input_ids.clamp_(min=0)

    def moves(self, path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token rows to move after a walk, so that the accepted KV lies in the first slots.

        Args:
            path: int64 [batch, path], the accepted rows of each tree, padded with -1.

        Returns:
            Token rows to read and to write, int64 [n] each; a row moves only if it must.

        """
        rows = path.numpy()
        place = np.arange(rows.shape[1])
        moved = rows > place
        first = self.first_token_row.numpy()[:, None]
        return torch.from_numpy((first + rows)[moved]), torch.from_numpy((first + place)[moved])
