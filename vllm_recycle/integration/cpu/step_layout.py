"""Where the trees of a step are among its flat rows: the one place that does this arithmetic.

It is index arithmetic on a few dozen numbers, in Python and numpy: torch's calls cost more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        num_nodes: scheduled nodes of each request.
        first_token_row: token row of each root.
        cu_num_logits: int64 [batch + 1], logit row of each root, and the number of logit rows.
        row_token_ids: int64 [logit rows], input token of each logit row, -1 where a node was not
            filled, and at roots that nothing is sampled for.
        drafts: int64 [batch, nodes], -1 where not filled or not scheduled.

    """

    trees: Trees
    num_nodes: Sequence[int]
    first_token_row: Sequence[int]
    cu_num_logits: torch.Tensor
    row_token_ids: torch.Tensor
    drafts: torch.Tensor

    @classmethod
    def make(
        cls,
        *,
        trees: Trees,
        num_nodes: Sequence[int],
        last_token_row: Sequence[int],
        row_token_ids: np.ndarray,
    ) -> StepLayout:
        """Lay out a step.

        Args:
            trees: of the requests.
            num_nodes: scheduled nodes of each request.
            last_token_row: the last token row of each request.
            row_token_ids: integer [logit rows], input token of each logit row.

        """
        row_token_ids = row_token_ids.astype(np.int64)
        rows = 1 + trees.num_nodes
        if len(row_token_ids) == len(num_nodes) * rows:  # all of all trees
            table = row_token_ids.reshape(-1, rows)
        else:
            table = np.full((len(num_nodes), rows), -1)
            table[_is_scheduled(num_nodes, rows)] = row_token_ids
        starts = [0, *accumulate(1 + count for count in num_nodes)]
        return cls(
            trees,
            num_nodes,
            [row - count for row, count in zip(last_token_row, num_nodes, strict=True)],
            torch.from_numpy(np.array(starts)),
            torch.from_numpy(row_token_ids),
            torch.from_numpy(table)[:, 1:],
        )

    def place(self, positions: Sequence[torch.Tensor], input_ids: np.ndarray) -> None:
        """Turn the inputs that were prepared for chains into those of trees.

        To be called after the slots were computed from the positions, since slots stay linear.

        Args:
            positions: each int64 [tokens], or [dimensions, tokens] of M-RoPE, corrected in place to
                prefix + depth.
            input_ids: integer [tokens]; nodes that were not filled get a token in place.

        """
        if not self.trees.are_chains:  # else the step is as vLLM prepares it
            is_scheduled = _is_scheduled(self.num_nodes, 1 + self.trees.num_nodes)
            requests, rows = np.nonzero(is_scheduled & is_scheduled[:, 1:2])
            token_rows = np.array(self.first_token_row)[requests] + rows
            shifts = self.trees.depths.numpy()[requests, rows] - rows
            for tensor in positions:
                tensor.numpy()[..., token_rows] += shifts
        # A node that was not filled still has a row; any token will do for it.
        np.maximum(input_ids, 0, out=input_ids)

    def moves(self, path: torch.Tensor) -> list[tuple[int, int]]:
        """Token rows to move after a walk, so that the accepted KV lies in the first slots.

        Args:
            path: int64 [batch, path], the accepted rows of each tree, padded with -1.

        Returns:
            Token rows to read and to write; a row moves only if it must.

        """
        return [
            (root + row, root + place)
            for root, visited in zip(self.first_token_row, path.tolist(), strict=True)
            for place, row in enumerate(visited)
            if row > place
        ]


def _is_scheduled(num_nodes: Sequence[int], rows: int) -> np.ndarray:
    """bool [batch, rows], which rows of trees with so many nodes there are."""
    return np.arange(rows) <= np.array(num_nodes)[:, None]
