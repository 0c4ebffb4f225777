"""Ouroboros as published, on the V1 runner: a draft model that drafts by phrases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.ouroboros import OuroborosProposer
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
        self.proposer = make_proposer(vllm_config, device, stops_early=True)
        lookahead = self.proposer.lookahead
        DraftModel.__init__(self, vllm_config, device, runner, lookahead=lookahead)
        V1Drafter.__init__(self, vllm_config)
        self.state = self.proposer.pool

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        for request in requests:
            text = torch.tensor(request.token_ids)
            self.proposer.begin(torch.full_like(text, request.req_state_idx), text)

    def release(self, req_state_indices: Sequence[int]) -> None:
        self.proposer.release(req_state_indices)

    def observe(self, idx_mapping: torch.Tensor, step: StepLayout, logits: torch.Tensor) -> None:
        owners = idx_mapping.repeat_interleave(step.cu_num_logits.diff())
        self.proposer.observe(owners, step.row_token_ids, logits, step.cu_num_logits)

    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        ends = np.array(texts.ends.last_positions)
        room = self.room(texts, block_tables)
        chosen = np.nonzero((np.array(texts.max_depths) > 0) & (room >= 0))[0]
        drafting = self.begin_round(texts, block_tables)
        drafting.catch_up(texts.idx_mapping.numpy()[chosen])
        tree = self.proposer.tree
        drafts: list[list[int]] = [[] for _ in ends]
        if len(chosen):
            drafted = self.proposer.propose(
                texts.idx_mapping[chosen],
                texts.ends.token_ids[chosen, ends[chosen]].long(),
                draft_model=drafting,
                room=torch.from_numpy(room[chosen]),
            )
            for index, draft in zip(chosen, drafted[:, :num_nodes].tolist(), strict=True):
                filled = (row for row, token in enumerate(draft, start=1) if token != NO_TOKEN)
                drafts[index] = draft[: max(filled, default=0)]
        parents = tree.parents[1:].tolist()
        return Drafts(drafts, [parents[: len(draft)] for draft in drafts])

    def describe(self) -> str:
        return describe(self.proposer, self.vllm_config)

    @property
    def num_rounds(self) -> int:  # type: ignore[override]
        return self.proposer.num_rounds

    @property
    def num_forwards(self) -> int:
        return self.proposer.num_forwards
