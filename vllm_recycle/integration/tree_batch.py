"""Where the trees of a step are among its flat rows: the one place that does this arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_recycle.core.tree import TreeTemplate


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """A step's requests and their drafts, in batch order.

    "Token rows" are the rows of the forward, "logit rows" those that logits were computed for:
    of each request the root and its nodes (a request without a draft is a root alone).

    Attributes:
        num_nodes: int64 [batch], scheduled nodes of each request.
        first_token_row: int64 [batch], token row of each root.
        first_logit_row: int64 [batch], logit row of each root.
        row_token_ids: int64 [logit rows], input token of each logit row, -1 where not filled.
        drafts: int64 [batch, nodes], -1 where not filled or not scheduled.
        logit_rows: int64 [batch, rows], the logit row of each tree row; a row that is not
            scheduled repeats the last one that is.
        tree_token_rows: int64 [n], token rows of all requests that have a draft.
        tree_rows: int64 [n], the row of the template that each of these is.

    """

    num_nodes: torch.Tensor
    first_token_row: torch.Tensor
    first_logit_row: torch.Tensor
    row_token_ids: torch.Tensor
    drafts: torch.Tensor
    logit_rows: torch.Tensor
    tree_token_rows: torch.Tensor
    tree_rows: torch.Tensor

    @classmethod
    def make(
        cls,
        *,
        tree: TreeTemplate,
        num_nodes: torch.Tensor,
        last_token_row: torch.Tensor,
        row_token_ids: torch.Tensor,
    ) -> TreeBatch:
        """Lay out a step.

        Args:
            tree: the template.
            num_nodes: int64 [batch], scheduled nodes of each request.
            last_token_row: int64 [batch], the last token row of each request.
            row_token_ids: int64 [logit rows], input token of each logit row.

        """
        size = num_nodes + 1
        first_logit_row = size.cumsum(0) - size
        first_token_row = last_token_row - num_nodes
        row = torch.arange(tree.num_nodes + 1)[None]
        scheduled = row <= num_nodes[:, None]
        logit_rows = first_logit_row[:, None] + row.minimum(num_nodes[:, None])
        drafts = row_token_ids[logit_rows[:, 1:]].masked_fill_(~scheduled[:, 1:], -1)
        in_tree = scheduled & (num_nodes > 0)[:, None]
        return cls(
            num_nodes=num_nodes,
            first_token_row=first_token_row,
            first_logit_row=first_logit_row,
            row_token_ids=row_token_ids,
            drafts=drafts,
            logit_rows=logit_rows,
            tree_token_rows=(first_token_row[:, None] + row)[in_tree],
            tree_rows=row.expand_as(in_tree)[in_tree],
        )

    def moves(self, path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token rows to move after a walk, so that the accepted KV lies in the first slots.

        Args:
            path: int64 [batch, path], the accepted rows of each tree, padded with -1.

        Returns:
            Token rows to read and to write, int64 [n] each; a row moves only if it must.

        """
        place = torch.arange(path.shape[1])[None]
        moved = path > place
        first = self.first_token_row[:, None]
        return (first + path)[moved], (first + place)[moved]
