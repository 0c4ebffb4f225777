"""What Model Runner V2 takes for a speculator, where there is no draft model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.drafter import TreeV2Drafter
from vllm_recycle.integration.cuda.dynamic_drafter import DynamicV2Drafter


class TreeSpeculator(BaseSpeculator):
    """What V2 asks for drafts by Token Recycling, in the place of `ngram_gpu`'s speculator."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, drafter: TreeV2Drafter | DynamicV2Drafter) -> None:
        self.drafter = drafter

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [batch, nodes], -1 where there is no draft.

        A request in the middle of its prompt gets drafts too, which are never scheduled.
        """
        if num_speculative_tokens == 0:
            shape = (input_batch.num_reqs, self.drafter.tree.num_nodes)
            return last_sampled.new_full(shape, NO_TOKEN)
        return self.drafter.propose(input_batch.idx_mapping, last_sampled)
