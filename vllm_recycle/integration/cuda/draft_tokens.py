"""Drafts on their way to the scheduler, which makes masks of them where there is a grammar."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_recycle.integration.schedule.scheduler import TreeDraftTokenIds
from vllm_recycle.kernels.triton.trees import DeviceTrees


class TreeDraftTokensHandler(DraftTokensHandler):
    """vLLM's, which copies drafts for steps with a grammar; their topology travels with them.

    Args:
        device: that they are on.
        trees: of all requests, by `req_state_idx`.

    Attributes:
        num_scheduled: as in `V2Speculator`; vLLM then hands on all nodes that there are.

    """

    num_scheduled: int | None = None

    def __init__(self, device: torch.device, trees: DeviceTrees) -> None:
        super().__init__(device)
        self.trees = trees

    def set_draft_tokens(self, input_batch: Any, draft_tokens: torch.Tensor) -> None:
        """Take drafts, int64 [num_reqs, nodes]."""
        draft_tokens = draft_tokens[:, : self.num_scheduled]
        num_nodes = draft_tokens.shape[1]
        if input_batch.has_structured_output_reqs:
            parents = self.trees.parents[input_batch.idx_mapping, 1 : 1 + num_nodes]
            draft_tokens = torch.cat((draft_tokens, parents), dim=1)
        super().set_draft_tokens(input_batch, draft_tokens)
        self.num_draft_tokens = num_nodes

    def get_draft_tokens(self) -> DraftTokenIds | None:
        """The drafts, and of steps with a grammar what they are."""
        drafts = super().get_draft_tokens()
        if self.draft_tokens_np is None:
            return drafts
        rows, nodes = drafts.draft_token_ids, self.num_draft_tokens
        return TreeDraftTokenIds(
            drafts.req_ids, [row[:nodes] for row in rows], [row[nodes:] for row in rows]
        )
