"""The room that drafts have in a step: what nobody else needs of its tokens and KV blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from vllm_recycle.integration.options import MethodOptions

# A step counts the KV blocks that requests need which wait, but of so many at most. And it leaves
# blocks for so many prompts that may come before the next one, as long as the longest of late.
MOST_LOOKED_AT, MOST_COMING = 32, 8
# The part of the free blocks that drafts may have whoever may come.
LEAST_SHARE = 1 / 8


class DraftRoom:
    """How long the drafts of a step may be, of a scheduler of vLLM's.

    Under the scope `isolated` each draft has a room of its own, by the number of requests alone;
    what vLLM schedules beside them has the rest. Otherwise drafts have what vLLM leaves.

    Attributes:
        max_draft_tokens: the most draft tokens of a step.
        longest_prompt: tokens of the longest prompt that came lately.

    """

    def __init__(self, scheduler: Any, options: MethodOptions) -> None:
        self.scheduler = scheduler
        self.max_draft_tokens = options.max_draft_tokens(scheduler.max_num_scheduled_tokens)
        self.isolates = options.isolates
        self.longest_prompt = 0
        spec = scheduler.vllm_config.speculative_config
        self.draft_slots = spec.max_num_new_slots_for_drafting
        groups = scheduler.kv_cache_config.kv_cache_groups
        self.specs = [group.kv_cache_spec for group in groups]
        self.block_sizes = [spec.block_size for spec in self.specs]
        self._own_limit = 0  # of a draft in this step, where each has its own room

    def see_prompt(self, num_tokens: int) -> None:
        """Take in how long a prompt is. What was longest counts less with each that comes."""
        self.longest_prompt = max(num_tokens, self.longest_prompt - self.longest_prompt // 16)

    @contextmanager
    def kept(self, lengths: Iterable[int]) -> Iterator[None]:
        """Keep drafts of these lengths their own room while vLLM schedules, where they have one."""
        scheduler = self.scheduler
        tokens, running = scheduler.max_num_scheduled_tokens, scheduler.running
        if self.isolates and running:
            # Who decodes comes first, before prompts take what is left.
            running.sort(key=lambda request: request.is_prefill_chunk)
            rows = len(running) * (1 + self.draft_slots)
            if not scheduler.scheduler_config.enable_chunked_prefill:
                rows += scheduler.max_model_len  # any prompt fits
            room = max(0, min(self.max_draft_tokens, tokens - rows))
            self._own_limit = limit = room // len(running)
            scheduler.max_num_scheduled_tokens -= sum(min(limit, length) for length in lengths)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = tokens

    def limits(
        self, drafting: Sequence[Any], lengths: Sequence[int], num_scheduled: Mapping[str, int]
    ) -> list[int]:
        """The longest draft that each of some requests may have.

        Args:
            drafting: the requests, at least one.
            lengths: of their drafts.
            num_scheduled: tokens that vLLM has scheduled, by the names of all requests of the step.

        """
        scheduler, ahead = self.scheduler, self.scheduler.num_lookahead_tokens
        if self.isolates:
            limit, share = self._own_limit, self._guaranteed_blocks()
        else:
            step_tokens = sum(num_scheduled.values())
            max_batched_tokens = scheduler.scheduler_config.max_num_batched_tokens
            max_batched_tokens -= self.draft_slots * len(num_scheduled)
            token_budget = min(scheduler.max_num_scheduled_tokens, max_batched_tokens) - step_tokens
            limit = even_limit(lengths, max(0, min(self.max_draft_tokens, token_budget)))
            share = self._unclaimed_blocks(num_scheduled)
            share //= len(scheduler.running) * len(self.block_sizes)
        if scheduler.need_mamba_block_aligned_split and not scheduler.use_v2_model_runner:
            # The states at the end of a block are those that prefix caching keeps. On a GPU vLLM
            # finds them among those of a draft.
            share = 0
        # The rest of a request's last block, and a share of other blocks. Tokens whose ids are on
        # the device yet have slots too, and so has what a draft model writes ahead.
        size, limits = min(self.block_sizes), []
        for request in drafting:
            tokens = request.num_computed_tokens + num_scheduled[request.request_id]
            slots = -(tokens + ahead) % size + share * size
            # The next step may be scheduled before it is known what is accepted of this one.
            limits.append(min(limit, slots, scheduler.max_model_len - 2 - tokens))
        return limits

    def _unclaimed_blocks(self, num_scheduled: Mapping[str, int]) -> int:
        """Free KV blocks that nobody is known to need before long.

        Requests need those of their text and one more, and so do those that wait and may come into
        the next step.
        """
        scheduler = self.scheduler
        seats = scheduler.max_num_running_reqs - len(scheduler.running)
        needs = []
        waiting = islice(scheduler.waiting, 1 + min(seats, MOST_LOOKED_AT))
        for request in chain(scheduler.running, waiting):
            num_computed = request.num_computed_tokens + num_scheduled.get(request.request_id, 0)
            needs.append((num_computed, request.num_tokens + request.num_output_placeholders))
        claimed_blocks = sum(
            max(0, -(-num_tokens // size) - -(-num_computed // size)) + 1
            for num_computed, num_tokens in needs
            for size in self.block_sizes
        )
        prompt_blocks = min(seats, MOST_COMING) * sum(
            -(-self.longest_prompt // size) for size in self.block_sizes
        )
        free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() - claimed_blocks
        return max(0, free_blocks - prompt_blocks, int(LEAST_SHARE * free_blocks))

    def _guaranteed_blocks(self) -> int:
        """KV blocks of a group that each request is sure of, whatever others have; or none."""
        scheduler = self.scheduler
        max_blocks = [
            spec.max_num_blocks_per_req(scheduler.vllm_config, scheduler.max_model_len)
            for spec in self.specs
        ]
        num_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one is vLLM's
        # Streamed prompts that wait for more have blocks too.
        num_reqs = len(scheduler.running) + len(scheduler.waiting_with_blocks)
        return max(max_blocks) if num_reqs * sum(max_blocks) <= num_blocks else 0


def even_limit(lengths: Sequence[int], budget: int) -> int:
    """The largest n for which drafts of these lengths, cut to at most n, fit a budget of tokens."""
    remaining = sorted(lengths)
    for index, length in enumerate(remaining):
        share = budget // (len(remaining) - index)
        if length > share:
            return share
        budget -= length
    return remaining[-1] if remaining else 0
