"""Ouroboros as published, on the V1 runner: a draft model that drafts by phrases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.paper.ouroboros import OuroborosProposer
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cpu.draft_model import DraftModel
from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.ouroboros import describe, make_proposer


class OuroborosV1Drafter(DraftModel, V1Drafter):
    """Drafts as the paper does; the target verifies the whole of it."""

    proposer: OuroborosProposer

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        self.proposer = make_proposer(vllm_config, device)
        lookahead = self.proposer.lookahead
        DraftModel.__init__(self, vllm_config, device, runner, lookahead=lookahead)
        V1Drafter.__init__(self, vllm_config)
        self.state = self.proposer.pool

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            self.proposer.begin(request.req_state_idx, torch.tensor(request.token_ids))

    def release(self, req_state_indices: Sequence[int]) -> None:
        self.proposer.release(req_state_indices)

    def observe(self, idx_mapping: torch.Tensor, step: StepLayout, logits: torch.Tensor) -> None:
        self.proposer.observe(idx_mapping, step.row_token_ids, logits, step.cu_num_logits)

    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        may_draft = torch.tensor(texts.max_depths) > 0
        room = torch.from_numpy(self.room(texts, block_tables)) + 1
        max_lengths = room.clamp(min=0).where(may_draft, 0)
        self.num_rounds += int((max_lengths > 0).sum())
        last_positions = torch.tensor(texts.ends.last_positions)[:, None].clamp(min=0)
        drafted = self.proposer.propose(
            texts.idx_mapping,
            texts.ends.token_ids.gather(1, last_positions).flatten().long(),
            draft_model=self.begin_round(texts, block_tables),
            max_lengths=max_lengths,
        )
        token_ids, parents = [], self.proposer.tree.parents[1:].tolist()
        for draft in drafted[:, :num_nodes].tolist():
            filled = (row for row, token in enumerate(draft, start=1) if token != NO_TOKEN)
            token_ids.append(draft[: max(filled, default=0)])
        return Drafts(token_ids, [parents[: len(draft)] for draft in token_ids])

    def describe(self) -> str:
        return describe(self.proposer, self.vllm_config)

    @property
    def num_forwards(self) -> int:
        return self.proposer.num_forwards
