"""What the draft model's KV cache has of each text, where steps that draft nothing do not feed it.

Its layers share the block table with the target's, and what they hold of a token is in the slot of
the same number. A text is taken in from its first token on, and a draft sees what was taken in and
nothing behind it. Blocks that a request finds in the prefix cache count where all of their tokens
were taken in since they were given out; behind the first one that does not, the request takes its
text in anew. So what was never written, or was another text's, is never read.

The device knows how many tokens these are, the host how many are missing at most: that suffices to
make forwards that have enough rows, without waiting.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


class DraftCache:
    """The record of all running requests and of all blocks.

    Args:
        max_num_reqs: every `req_state_idx` is below this.
        num_blocks: of the cache.
        block_size: tokens of each.
        device: where `num_cached` lives.

    Attributes:
        num_cached: int64 [max_num_reqs], on the device: tokens of each text that are in the cache.
        missing: int64 [max_num_reqs]: how many more the target has computed, at most.
        least: int64 [max_num_reqs]: tokens of each text that are in the cache, at least.

    """

    def __init__(
        self, max_num_reqs: int, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size, self.device = block_size, device
        self.num_cached = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.missing, self.least = np.zeros((2, max_num_reqs), dtype=np.int64)
        # Of each request, and how many of the first are marked.
        self.blocks: dict[int, list[int]] = defaultdict(list)
        self.num_marked = np.zeros(max_num_reqs, dtype=np.int64)
        # Blocks that are full, and all of whose tokens the cache has.
        self.is_marked = np.zeros(num_blocks, dtype=bool)

    def follow(self, scheduler_output: Any, index_of: dict[str, int], group: int) -> None:
        """Take in which requests start, and which blocks are given out.

        Args:
            scheduler_output: of the step, vLLM's.
            index_of: the `req_state_idx` of each request.
            group: which of vLLM's KV cache groups the blocks are of.

        """
        running = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids in zip(running.req_ids, running.new_block_ids, strict=True):
            if block_ids is not None:
                self.is_marked[block_ids[group]] = False
                self.blocks[index_of[req_id]] += block_ids[group]
        new = scheduler_output.scheduled_new_reqs
        # First all of them: one may find what another one computes in this step.
        for request in new:
            found = request.num_computed_tokens // self.block_size
            self.is_marked[request.block_ids[group][found:]] = False
        begun = [
            (index_of[one.req_id], self._begin(index_of[one.req_id], one, group)) for one in new
        ]
        if begun:
            states, num_cached = async_tensor_h2d(np.array(begun).T, device=self.device)
            self.num_cached[states] = num_cached

    def _begin(self, state: int, request: Any, group: int) -> int:
        """How many tokens of a new request's text the cache has."""
        blocks = list(request.block_ids[group])
        found = request.num_computed_tokens // self.block_size
        num_marked = int(self.is_marked[blocks[:found]].cumprod().sum())
        self.blocks[state], self.num_marked[state] = blocks, num_marked
        num_cached = num_marked * self.block_size
        self.missing[state] = request.num_computed_tokens - num_cached
        self.least[state] = num_cached
        return num_cached

    def see(self, states: np.ndarray, in_step: np.ndarray, most: np.ndarray) -> None:
        """Count what the target has computed, in a step and in all at most, as missing.

        Each is int64 [n].
        """
        missing = self.missing[states] + in_step
        self.missing[states] = np.minimum(missing, most - self.least[states])

    def take(self, states: np.ndarray, counts: np.ndarray, num_computed: np.ndarray) -> None:
        """Count tokens that are taken in as missing no longer.

        Args:
            states: int64 [n], the `req_state_idx` of some requests.
            counts: int64 [n], how many of each.
            num_computed: int64 [n], tokens that the target has computed of each, at least.

        """
        self.missing[states] -= counts
        taken = np.minimum(self.least[states] + counts, num_computed)
        self.least[states] = np.maximum(self.least[states], taken)

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
        first = num_cached.minimum(num_computed - counts).clamp(min=0)
        ends = (first + counts).minimum(num_computed)
        self.num_cached[idx_mapping] = num_cached.maximum(ends)
        return first

    def mark(self, states: np.ndarray, num_computed: np.ndarray) -> None:
        """Mark the blocks that the cache has all of.

        Args:
            states: int64 [n], the `req_state_idx` of some requests.
            num_computed: int64 [n], tokens that the target has computed of each, at least.

        """
        full = (num_computed - self.missing[states]) // self.block_size
        for index in np.flatnonzero(full > self.num_marked[states]):
            state, end = states[index], full[index]
            self.is_marked[self.blocks[state][self.num_marked[state] : end]] = True
            self.num_marked[state] = end
