"""A draft model on Model Runner V2: a forward over the same rows of each request.

First come the rows of a request's head, the tokens that the cache lacks, which end where those that
look ahead begin. The mask is the same for all requests; a forward is only told how many of
a request's first rows are none. What has no slot is never written: keys and values of rows are the
forward's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.kernels.triton.attention.queries import TreeQueries
from vllm_recycle.kernels.triton.trees import DeviceTrees


def draft_forward_template(head_length: int, lookahead: TreeTemplate | None) -> TreeTemplate:
    """The rows of a request in a draft forward: a chain, and the lookahead rows below its end."""
    end = head_length - 1
    chain = [(row, 0) for row in range(end)]
    nodes = () if lookahead is None else lookahead.nodes
    lookahead_rows = [(end + parent, rank) for parent, rank in nodes]
    return TreeTemplate((*chain, *lookahead_rows), "draft forward")


class DraftForward:
    """Runs vLLM's draft model.

    Args:
        speculator: of vLLM, that has the model.
        head_length: rows of a head.
        lookahead: the rows that look ahead; None for none.

    Attributes:
        num_rows: of a request.

    """

    def __init__(
        self, speculator: Any, head_length: int, lookahead: TreeTemplate | None = None
    ) -> None:
        template = draft_forward_template(head_length, lookahead)
        device = speculator.device
        self.head_length, self.num_rows = head_length, len(template.depths)
        self.depths = template.depths.to(device)
        self.trees = DeviceTrees.of(template, speculator.max_num_reqs, device)
        self.layer_names = speculator.draft_attn_layer_names
        self.last_position = speculator.max_model_len - 1
        self.query_starts = speculator.arange_gpu
        self.run_model, self.compute_logits = speculator._run_model, speculator.model.compute_logits

    def run(
        self,
        heads: torch.Tensor,
        num_head: torch.Tensor,
        num_cached: torch.Tensor,
        row_token_ids: torch.Tensor,
        *,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor | None,
    ) -> torch.Tensor:
        """One forward.

        Args:
            heads: int64 [batch, head], at the end of each row.
            num_head: int64 [batch], how many tokens these are.
            num_cached: int64 [batch], the tokens before them.
            row_token_ids: int64 [batch, nodes], by the nodes that look ahead, -1 for none.
            block_table: int32 [batch, n].
            slot_mapping: int64 [batch, head - 1], where the first rows are to be written, -1 for
                nowhere; None where none are.

        Returns:
            [batch * (nodes + 1), vocab], the logits behind the head and each node.

        """
        batch, num_padding = len(heads), self.head_length - num_head
        positions = (num_cached - num_padding)[:, None] + self.depths
        rows = TreeQueries(
            ancestor_bits=self.trees.ancestor_bits,
            depths=self.trees.depths,
            idx_mapping=self.query_starts[:batch],  # one tree is as the other
            query_start_loc=self.query_starts[: batch + 1] * self.num_rows,
            seq_lens=(num_cached + self.num_rows).to(torch.int32),
            block_table=block_table,
            max_rows=self.num_rows,
            num_rows=batch * self.num_rows,
            num_padding=num_padding.to(torch.int32),
        )
        slot_mappings = {}
        if slot_mapping is not None:
            num_unwritten = self.num_rows - slot_mapping.shape[1]
            slots = pad(slot_mapping, (0, num_unwritten), value=PAD_SLOT_ID)
            slot_mappings = dict.fromkeys(self.layer_names, slots.flatten())
        token_ids = torch.cat((heads, row_token_ids), dim=1)
        hidden_states = self.run_model(
            token_ids.clamp(min=0).flatten().to(torch.int32),
            # Padding, and rows beyond what the model can see, are computed for nothing.
            positions.clamp(min=0, max=self.last_position).flatten(),
            dict.fromkeys(self.layer_names, rows),
            slot_mappings,
            None,
        )
        logit_states = hidden_states.view(batch, self.num_rows, -1)[:, self.head_length - 1 :]
        return self.compute_logits(logit_states.flatten(0, 1))
