"""Ouroboros on Model Runner V2: what a round of the draft model is, and what it leads to.

As published, and as Token Recycling along the trunk of a draft model. The speculator runs rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.paper.ouroboros import OuroborosProposer
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.along_trunks import AlongTrunks
from vllm_recycle.integration.cuda.drafter import V2Drafter, V2Speculator
from vllm_recycle.integration.cuda.ouroboros.round import LARGEST_BATCH, Round
from vllm_recycle.integration.cuda.ouroboros.speculator import RoundSpeculator
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.limits import MAX_DRAFT_ROWS_ON_GPU, largest_drafting_batch
from vllm_recycle.integration.ouroboros import describe, describe_draft_model, make_proposer
from vllm_recycle.kernels.triton.trees import DeviceTrees


class OuroborosV2Drafter(V2Drafter):
    """Drafts as published.

    Attributes:
        head_length: tokens that a draft forward may have to take in before it looks ahead.
        lookahead: the rows of a draft forward that look ahead.
        max_drafting: the most requests of a round.
        drafts: int64 [max_num_reqs, nodes], what the last round ended with, -1 where there is none.

    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        table = settings_of(vllm_config).table
        self.proposer: OuroborosProposer = make_proposer(vllm_config, device)
        shape = self.proposer.shape
        self.head_length, self.lookahead = self.options.head_length, shape.lookahead()
        self.max_drafting = largest_drafting_batch(table, max_num_reqs)
        self.state = self.proposer.pool
        self.trees = DeviceTrees.of(self.proposer.tree, max_num_reqs, device)
        self.drafts = torch.full((max_num_reqs, shape.num_nodes), NO_TOKEN, device=device)

    def make_speculator(self, may_speculate: np.ndarray) -> V2Speculator:
        return RoundSpeculator(self, may_speculate)

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        all_token_ids = self.req_states.all_token_ids.gpu
        for request in requests:
            index, length = request.req_state_idx, len(request.token_ids)
            self.proposer.begin(index, all_token_ids[index, :length])

    def observe(self, input_batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        nodes = input_batch.num_draft_tokens_per_req
        if nodes is None:
            return
        # Requests with a draft come first. Of the others there is nothing to harvest.
        batch = int(np.count_nonzero(nodes))
        rows = int(input_batch.cu_num_logits_np[batch])
        idx_mapping, starts = input_batch.idx_mapping[:batch], input_batch.cu_num_logits
        self.proposer.observe(idx_mapping, row_token_ids[:rows], logits[:rows], starts[: batch + 1])

    def release(self, req_state_idx: int) -> None:
        self.proposer.release([req_state_idx])

    def run_round(
        self, idx_mapping: torch.Tensor, last_token_ids: torch.Tensor, model: Round
    ) -> None:
        """Draft behind some texts.

        Args:
            idx_mapping, last_token_ids: int64 [batch], of the texts.
            model: the draft model.

        """
        drafts = self.proposer.propose(idx_mapping, last_token_ids, draft_model=model)
        self.drafts[idx_mapping] = drafts

    def leave_out(self, idx_mapping: torch.Tensor) -> None:
        """Some requests, int64 [n], have no draft."""
        self.drafts[idx_mapping] = NO_TOKEN

    def propose(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """int64 [batch, nodes], -1 where there is no draft."""
        return self.drafts[idx_mapping]

    def describe(self) -> str:
        return describe(self.proposer, self.vllm_config)

    @property
    def num_forwards(self) -> int:
        return self.num_rounds * self.proposer.max_forwards


class TrunkV2Drafter(AlongTrunks):
    """Grows trees along what vLLM's draft model drafts.

    A round has a forward for each token of a trunk: which of them could be saved only the device
    knows. The attributes are those of `OuroborosV2Drafter`.
    """

    lookahead = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        options, scheduler = settings_of(vllm_config).options, vllm_config.scheduler_config
        super().__init__(vllm_config, device, req_states, length=options.trunk_length)
        self.head_length = options.head_length
        rows = min(MAX_DRAFT_ROWS_ON_GPU, scheduler.max_num_batched_tokens)
        self.max_drafting = min(scheduler.max_num_seqs, rows // self.head_length, LARGEST_BATCH)

    def make_speculator(self, may_speculate: np.ndarray) -> V2Speculator:
        return RoundSpeculator(self, may_speculate)

    def run_round(
        self, idx_mapping: torch.Tensor, last_token_ids: torch.Tensor, model: Round
    ) -> None:
        """As that of `OuroborosV2Drafter`; counts what followed the trunks before."""
        self.count_trunks(idx_mapping)
        new_token_ids, row_token_ids = last_token_ids[:, None], last_token_ids[:, None][:, :0]
        steps = []
        for _ in range(self.length):
            steps.append(model.choose(idx_mapping, new_token_ids, row_token_ids, CHOICES))
            new_token_ids = steps[-1][0][:, 0, :1]
        trunks = Trunks(*(torch.cat(values, dim=1) for values in zip(*steps, strict=True)))
        self.take_trunks(idx_mapping, trunks)

    def describe(self) -> str:
        return f"{describe_draft_model(self.vllm_config, self.length)}; {super().describe()}"

    @property
    def num_forwards(self) -> int:
        return self.num_rounds * self.length
