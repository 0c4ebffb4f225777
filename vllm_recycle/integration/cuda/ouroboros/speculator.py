"""The speculator of Ouroboros as published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.ouroboros.round_speculator import RoundSpeculator
from vllm_recycle.integration.cuda.ouroboros.rounds import Round

if TYPE_CHECKING:
    from vllm_recycle.integration.cuda.ouroboros.drafter import OuroborosV2Drafter


class OuroborosSpeculator(RoundSpeculator):
    """Runs rounds of Ouroboros's proposer.

    Args:
        drafter: has the proposer.
        may_speculate: bool [max_num_reqs], on the host, by req_state_idx; kept by the runner.

    Attributes:
        drafts: int64 [batch, nodes], what rounds end with.

    """

    tree_drafter: OuroborosV2Drafter

    def __init__(self, drafter: OuroborosV2Drafter, may_speculate: np.ndarray) -> None:
        shape, max_drafting = drafter.proposer.shape, drafter.max_drafting
        super().__init__(
            drafter,
            may_speculate,
            head_length=drafter.options.head_length,
            max_drafting=max_drafting,
            lookahead=shape.lookahead(),
        )
        drafts = (max_drafting, self.num_speculative_steps)
        self.drafts = torch.empty(drafts, dtype=torch.int64, device=self.device)

    def run_round(self, batch: int) -> None:
        start = self.start.first(batch)
        self.drafts[:batch] = self.tree_drafter.proposer.propose(
            start.idx_mapping,
            start.last_token_ids,
            draft_model=Round(self.forward, start),
        )

    def take_report(self) -> None:
        """Nobody knows what these drafts are worth."""

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft behind what the target has computed, where the step is one that drafts.

        Returns:
            int64 [num_reqs, nodes], -1 where there is no draft.

        """
        indices = self.ready(input_batch, drafts=bool(num_speculative_tokens), **kwargs)
        if len(indices) == input_batch.num_reqs:
            self.draft(input_batch.idx_mapping)
            return self.drafts[: len(indices)]
        shape = (input_batch.num_reqs, self.num_speculative_steps)
        drafts = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=self.device)
        if len(indices):
            device_indices = async_tensor_h2d(indices, device=self.device)
            self.draft(input_batch.idx_mapping[device_indices])
            drafts[device_indices] = self.drafts[: len(indices)]
        return drafts
