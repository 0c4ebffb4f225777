"""How much of each text the draft model's KV cache has, and lacks, on a GPU.

Which blocks it has is in `DraftBlocks`. The device knows how many tokens these are, the host how
many are missing at most: that suffices to make forwards that have enough rows, without waiting.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.integration.draft_blocks import DraftBlocks


class DraftCache:
    """The record of all running requests.

    Args:
        max_num_reqs: every `req_state_idx` is below this.
        blocks: that the cache has.
        device: where `num_cached` lives.

    Attributes:
        num_cached: int64 [max_num_reqs], on the device: tokens of each text that are in the cache.
        max_missing: int64 [max_num_reqs]: how many more the target has computed, at most.
        min_cached: int64 [max_num_reqs]: tokens of each text that are in the cache, at least.

    """

    def __init__(self, max_num_reqs: int, blocks: DraftBlocks, device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self.num_cached = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.max_missing, self.min_cached = np.zeros((2, max_num_reqs), dtype=np.int64)

    def follow(self, scheduler_output: Any, index_of: dict[str, int], group: int) -> None:
        """Take in which requests start; see `DraftBlocks.follow`."""
        new_requests = self.blocks.follow(scheduler_output, index_of, group)
        for state, num_cached, num_computed in new_requests:
            self.max_missing[state], self.min_cached[state] = num_computed - num_cached, num_cached
        if new_requests:
            states, num_cached, _ = async_tensor_h2d(np.array(new_requests).T, device=self.device)
            self.num_cached[states] = num_cached

    def see(self, states: np.ndarray, num_new: np.ndarray, max_computed: np.ndarray) -> None:
        """Count what the target has computed, in a step and in all at most, as missing.

        Each is int64 [n].
        """
        num_missing = self.max_missing[states] + num_new
        self.max_missing[states] = np.minimum(num_missing, max_computed - self.min_cached[states])

    def take(self, states: np.ndarray, counts: np.ndarray, num_computed: np.ndarray) -> None:
        """Count tokens that are taken in as missing no longer.

        Args:
            states: int64 [n], the `req_state_idx` of some requests.
            counts: int64 [n], how many of each.
            num_computed: int64 [n], tokens that the target has computed of each, at least.

        """
        self.max_missing[states] -= counts
        num_cached = np.minimum(self.min_cached[states] + counts, num_computed)
        self.min_cached[states] = np.maximum(self.min_cached[states], num_cached)

    def advance(
        self, idx_mapping: torch.Tensor, counts: torch.Tensor, num_computed: torch.Tensor
    ) -> torch.Tensor:
        """Count the next tokens of some texts as taken in.

        Args:
            idx_mapping: int64 [batch].
            counts: int64 [batch], how many of each; where fewer are missing, some are taken in
                once more.
            num_computed: int64 [batch], tokens of each that the target has computed.

        Returns:
            int64 [batch], the first of them.

        """
        num_cached = self.num_cached[idx_mapping]
        starts = num_cached.minimum(num_computed - counts).clamp(min=0)
        ends = (starts + counts).minimum(num_computed)
        self.num_cached[idx_mapping] = num_cached.maximum(ends)
        return starts

    def mark(self, states: np.ndarray, num_computed: np.ndarray) -> None:
        """Mark the blocks that are full, where the target has computed so much of each text."""
        self.blocks.mark(states, num_computed - self.max_missing[states])
