"""Ouroboros on Model Runner V2: the proposer; what runs its rounds is the speculator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.core.ouroboros import OuroborosProposer
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.integration.cuda.drafter import V2Drafter, V2Speculator
from vllm_recycle.integration.cuda.ouroboros.speculator import OuroborosSpeculator
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.limits import largest_drafting_batch
from vllm_recycle.integration.ouroboros import describe, make_proposer
from vllm_recycle.kernels.triton.trees import DeviceTrees

# Tokens of prompts that are taken in at once, but for one that is longer.
MAX_PROMPT_TOKENS = 1 << 16


class OuroborosV2Drafter(V2Drafter):
    """Holds the proposer.

    Attributes:
        max_drafting: the most requests of a round.

    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_drafting = largest_drafting_batch(settings_of(vllm_config).table, max_num_reqs)
        self.proposer: OuroborosProposer = make_proposer(vllm_config, device, stops_early=False)
        self.state = self.proposer.pool
        self.trees = DeviceTrees.of(self.proposer.tree, max_num_reqs, device)

    def make_speculator(self, may_speculate: np.ndarray) -> V2Speculator:
        return OuroborosSpeculator(self, may_speculate)

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        req_state_indices = [request.req_state_idx for request in requests]
        lengths = [len(request.token_ids) for request in requests]
        all_token_ids = self.req_states.all_token_ids.gpu
        for group in groups_of(lengths, MAX_PROMPT_TOKENS):
            indices = [req_state_indices[index] for index in group]
            counts = [lengths[index] for index in group]
            pairs = zip(indices, counts, strict=True)
            prompts = [all_token_ids[index, :count] for index, count in pairs]
            token_indices = async_tensor_h2d(np.repeat(indices, counts), device=self.device)
            self.proposer.begin(token_indices, torch.cat(prompts).to(torch.int64))

    def observe(self, input_batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        self.proposer.observe(
            input_batch.expanded_idx_mapping, row_token_ids, logits, input_batch.cu_num_logits
        )

    def release(self, req_state_idx: int) -> None:
        self.proposer.release([req_state_idx])

    def describe(self) -> str:
        return describe(self.proposer, self.vllm_config)

    @property
    def num_forwards(self) -> int:
        return self.num_rounds * self.proposer.max_forwards


def groups_of(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices of some texts in order, in groups of at most so many tokens, or of one text."""
    group: list[int] = []
    num_tokens = 0
    for index, length in enumerate(lengths):
        if group and num_tokens + length > max_tokens:
            yield group
            group, num_tokens = [], 0
        group.append(index)
        num_tokens += length
    if group:
        yield group
