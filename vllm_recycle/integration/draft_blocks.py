"""Which blocks of vLLM's prefix cache a draft model has taken in.

Its layers share the block table with the target's, and what they hold of a token is in the slot of
the same number. A text is taken in from its first token on, and a draft sees what was taken in and
nothing behind it. Blocks that a request finds in the prefix cache count where all of their tokens
were taken in since they were given out; behind the first one that does not, the request takes its
text in anew. So what was never written, or was another text's, is never read, though steps that
draft nothing do not run the draft model.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class DraftBlocks:
    """The record of all blocks, and of which are whose.

    Args:
        num_blocks: of the cache.
        block_size: tokens of each.

    Attributes:
        is_marked: bool [num_blocks], those that are full, and whose tokens were all taken in.

    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.is_marked = np.zeros(num_blocks, dtype=bool)
        # By req_state_idx: of each request, and how many of the first are marked.
        self._blocks: dict[int, list[int]] = {}
        self._num_marked: dict[int, int] = {}

    def follow(
        self, scheduler_output: Any, index_of: dict[str, int], group: int
    ) -> list[tuple[int, int, int]]:
        """Take in which requests start in a step, and which blocks are given out.

        Args:
            scheduler_output: of the step, vLLM's.
            index_of: the `req_state_idx` of each request.
            group: which of vLLM's KV cache groups the blocks are of.

        Returns:
            Of each request that starts its `req_state_idx`, and the tokens of its text that the
            draft model's layers have, and the target's.

        """
        running = scheduler_output.scheduled_cached_reqs
        starting = [
            (request.req_id, request.block_ids, request.num_computed_tokens)
            for request in scheduler_output.scheduled_new_reqs
        ]
        running_reqs = zip(
            running.req_ids, running.new_block_ids, running.num_computed_tokens, strict=True
        )
        for req_id, block_ids, num_computed in running_reqs:
            if req_id in running.resumed_req_ids:
                starting.append((req_id, block_ids, num_computed))
            elif block_ids is not None:
                self.is_marked[block_ids[group]] = False
                self._blocks[index_of[req_id]] += block_ids[group]
        # First all of them: one may find what another one computes in this step.
        for _, block_ids, num_computed in starting:
            self.is_marked[block_ids[group][num_computed // self.block_size :]] = False
        return [
            self._begin(index_of[req_id], block_ids[group], num_computed)
            for req_id, block_ids, num_computed in starting
        ]

    def _begin(self, state: int, block_ids: list[int], num_computed: int) -> tuple[int, int, int]:
        computed_block_ids = block_ids[: num_computed // self.block_size]
        num_marked = int(self.is_marked[computed_block_ids].cumprod().sum())
        self._blocks[state], self._num_marked[state] = [*block_ids], num_marked
        return state, num_marked * self.block_size, num_computed

    def mark(self, states: np.ndarray, num_cached: np.ndarray) -> None:
        """Mark the blocks of which all tokens were taken in.

        Args:
            states: int64 [n], the `req_state_idx` of some requests.
            num_cached: int64 [n], tokens of each text that were taken in, at least.

        """
        full = num_cached // self.block_size
        for state, end in zip(states.tolist(), full.tolist(), strict=True):
            if end > (start := self._num_marked[state]):
                self.is_marked[self._blocks[state][start:end]] = True
                self._num_marked[state] = end
