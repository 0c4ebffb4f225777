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
        is_scheduled: bool [batch, rows], which rows of the trees there are.

    """

    trees: Trees
    are_chains: bool
    num_nodes: torch.Tensor
    first_token_row: torch.Tensor
    cu_num_logits: torch.Tensor
    row_token_ids: torch.Tensor
    drafts: torch.Tensor
    is_scheduled: np.ndarray

    @classmethod
    def make(
        cls,
        *,
        trees: Trees,
        num_nodes: np.ndarray,
        last_token_row: np.ndarray,
        row_token_ids: np.ndarray,
    ) -> StepLayout:
        """Lay out a step.

        Args:
            trees: of the requests.
            num_nodes: int64 [batch], scheduled nodes of each request.
            last_token_row: integer [batch], the last token row of each request.
            row_token_ids: integer [logit rows], input token of each logit row.

        """
        row = np.arange(trees.num_nodes + 1)
        is_scheduled = row <= num_nodes[:, None]
        drafts = np.full(is_scheduled.shape, -1)
        drafts[is_scheduled] = row_token_ids
        is_branch = (trees.parents.numpy()[:, 1:] != row[:-1]) & is_scheduled[:, 1:]
        arrays = {
            "num_nodes": num_nodes,
            "first_token_row": last_token_row - num_nodes,
            "cu_num_logits": np.concatenate(([0], (num_nodes + 1).cumsum())),
            "row_token_ids": row_token_ids.astype(np.int64),
            "drafts": drafts[:, 1:],
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return cls(trees, not is_branch.any(), is_scheduled=is_scheduled, **tensors)

    def tree_rows(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of all rows of requests that have a draft: whose, which of its tree, and token row."""
        has_draft = self.num_nodes.numpy()[:, None] > 0
        requests, rows = np.nonzero(self.is_scheduled & has_draft)
        return requests, rows, self.first_token_row.numpy()[requests] + rows

    def place(self, positions: Sequence[torch.Tensor], input_ids: np.ndarray) -> None:
        """Turn the inputs that were prepared for chains into those of trees.

        To be called after the slots were computed from the positions, since slots stay linear.

        Args:
            positions: each int64 [tokens], or [dimensions, tokens] of M-RoPE, corrected in place to
                prefix + depth.
            input_ids: integer [tokens]; nodes that were not filled get a token in place.

        """
        if not self.are_chains:
            requests, rows, token_rows = self.tree_rows()
            shifts = self.trees.depths.numpy()[requests, rows] - rows
            for of_rows in positions:
                of_rows.numpy()[..., token_rows] += shifts
        # A node that was not filled still has a row; any token will do for it.
        np.maximum(input_ids, 0, out=input_ids)

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
