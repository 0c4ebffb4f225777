"""vLLM's scheduler with drafts that are trees: who gets how many rows, and what is counted.

A scheduled draft is a prefix of the node list and so a tree by itself; vLLM's own cuts (token
budget, `max_model_len`) rely on that. KV slots, roll-back and preemption are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_recycle.integration.engine_config import OPT_OUT, get_options


class TreeScheduler(Scheduler):
    """Cuts trees so that they never starve a batch; drops the drafts that must not be used."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        options = get_options(vllm_config)
        # Depth of each prefix, by its number of nodes; a constant of the tree.
        self.depth_of_nodes = options.load_tree().depths.cummax(0).values.tolist()
        self.max_draft_tokens = int(options.budget_share * self.max_num_scheduled_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Cut the drafts of all running requests to one length that fits, then schedule."""
        # Each running request needs a row beside its draft.
        budget = min(self.max_draft_tokens, self.max_num_scheduled_tokens - len(self.running))
        limit = even_limit([len(r.spec_token_ids) for r in self.running], max(0, budget))
        # A draft is worth less than another request's KV cache: none may cost a preemption. So it
        # has the rest of its request's last block, and an even share of the free blocks.
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks()
        free_slots = free_blocks // max(1, len(self.running)) * self.block_size
        for request in self.running:
            room = -request.num_tokens % self.block_size + free_slots
            del request.spec_token_ids[min(limit, room) :]
        return super().schedule(*args, **kwargs)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Store the drafts, except for requests that opted out or follow a grammar.

        A tree is not cut at its first ungrammatical node, as vLLM would cut a chain.
        """
        for request_id, draft in zip(
            draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True
        ):
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            request.spec_token_ids = draft if _may_speculate(request) else []

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count a tree: its scheduled rows as draft tokens, its depths as positions."""
        if not self.log_stats or not num_draft_tokens:
            return None
        stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
        depth = self.depth_of_nodes[num_draft_tokens]
        stats.observe_draft(num_draft_tokens=depth, num_accepted_tokens=num_accepted_tokens)
        stats.num_draft_tokens += num_draft_tokens - depth
        return stats


def even_limit(lengths: Sequence[int], budget: int) -> int:
    """The largest n for which drafts cut to at most n tokens fit the budget together.

    Args:
        lengths: of the drafts.
        budget: tokens for all of them.

    """
    remaining = sorted(lengths)
    for index, length in enumerate(remaining):
        share = budget // (len(remaining) - index)
        if length > share:
            return share
        budget -= length
    return remaining[-1] if remaining else 0


def _may_speculate(request: Any) -> bool:
    if request.is_prefill_chunk or request.use_structured_output:
        return False
    return bool((request.sampling_params.extra_args or {}).get(OPT_OUT, True))
