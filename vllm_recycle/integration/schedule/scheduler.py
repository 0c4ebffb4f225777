"""vLLM's schedulers with drafts that are trees: who gets how many rows, and what is counted.

vLLM schedules each step as if there were no drafts, which get what is left of its tokens and KV
blocks. So prompts start, and go on, as they do without. Under the scope `isolated` drafts come
first instead, in a room of their own. See `draft_room`. A scheduled draft is a prefix of the node
list, and so a tree by itself. KV slots, roll-back and preemption are vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_recycle.core.grow import LEVELS
from vllm_recycle.core.tree import depth_of, parents_among
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.base import TABLE
from vllm_recycle.integration.requests.parameters import looks_back, may_speculate, owner_of
from vllm_recycle.integration.schedule.draft_room import DraftRoom
from vllm_recycle.integration.schedule.draft_sizes import DraftSizes
from vllm_recycle.integration.schedule.grammar import GrammarMasks
from vllm_recycle.integration.schedule.step_note import StepNote
from vllm_recycle.integration.start.versions import FEATURES


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """Drafts of a step, as vLLM's runner gives them to its scheduler, and how they hang together.

    Attributes:
        parents: of each request, the parent row of each node of its draft; the root is row 0.
    """

    parents: list[list[int]]


class TreeScheduler(Scheduler):
    """Gives drafts what a step has left; drops the drafts that must not be used."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings = settings_of(vllm_config)
        options = settings.options
        # vLLM has taken it away again where it completed a copy of the configuration since.
        setattr(vllm_config.speculative_config, TABLE, settings.table)
        super().__init__(vllm_config, *args, **kwargs)
        self.room = DraftRoom(self, options)
        self.has_owners = options.has_owners
        self.set_aside: dict[str, list[int]] = {}  # drafts of the step, by request
        # The depth of each prefix of a draft, for Model Runner V2, which does not say it with each
        # draft; the most that it may be where trees are grown on the device.
        self.depth_of_nodes: list[int] = []
        if self.use_v2_model_runner:
            nodes = range(1, options.num_nodes + 1)
            self.depth_of_nodes = (
                [min(count, options.max_depth) for count in nodes]
                if options.is_dynamic
                else options.load_tree().depths.cummax(0).values[1:].tolist()
            )
        # A prefix that is as deep as it has nodes is a chain; so is all that is grown as one, of
        # which the later tokens are seldom right.
        depths = enumerate(self.depth_of_nodes, 1)
        self.chain_nodes = min(LEVELS, sum(depth == count for count, depth in depths))
        self.sizes: DraftSizes | None = None
        if settings.chooses_sizes:
            self.dynamic_sd_lookup = self.sizes = DraftSizes(self, vllm_config)
        self.masks = GrammarMasks(self.structured_output_manager)
        self.keeps_places = options.keeps_places
        # What a draft model writes ahead of the text: vLLM takes it for the whole tree.
        if options.has_own_model:
            self.num_lookahead_tokens = 0 if self.use_v2_model_runner else options.trunk_length
            # In steps whose drafts nobody could use the draft model reads what it has not read.
            self.can_skip_drafts = False
        elif options.trunk is not None:
            self.num_lookahead_tokens = min(vllm_config.num_lookahead_tokens, options.trunk_length)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as without drafts, and then the drafts that fit beside that."""
        self.set_aside = {
            request.request_id: request.spec_token_ids[: self.max_nodes(request)]
            for request in self.running
            if request.spec_token_ids
            and self.may_speculate(request)
            and self.will_know_draft(request)
        }
        for request in self.running:
            request.spec_token_ids = []
        with self.room.kept(map(len, self.set_aside.values())):
            output = super().schedule(*args, **kwargs)
        output.step_note = note = StepNote()
        if self.has_owners:
            new_req_ids = [request.req_id for request in output.scheduled_new_reqs]
            req_ids = chain(new_req_ids, output.scheduled_cached_reqs.resumed_req_ids)
            owners = {name: owner_of(self.requests[name]) for name in req_ids}
            note.owners = {name: owner for name, owner in owners.items() if owner is not None}
        if not self.use_v2_model_runner:  # whose trees are on the device
            note.parents = {
                name: self.requests[name].draft_parents[: len(draft)]
                for name, draft in output.scheduled_spec_decode_tokens.items()
            }
            starts = {req.request_id: self.masks.start(req) for req in self._structured(output)}
            note.grammar_starts = {
                name: start for name, start in starts.items() if start is not None
            }
            note.idle_sessions = [request.request_id for request in self.waiting_with_blocks]
        if self.sizes is not None:
            self.sizes.see_step(output)
            note.kind = self.sizes.kind
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in a step as vLLM does, and learn what trees are worth."""
        if self.sizes is not None:
            self.sizes.learn(scheduler_output, model_runner_output)
        for request in self._structured(scheduler_output):
            if not (self.use_v2_model_runner or self.masks.is_constrained(request)):
                index = model_runner_output.req_id_to_index[request.request_id]
                token_ids = model_runner_output.sampled_token_ids[index]
                self.masks.see_reasoning_end(request, token_ids)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.spec_decode_metrics_level != "none":
            self._send_metrics(outputs)
        return outputs

    def _send_metrics(self, outputs: dict[int, Any]) -> None:
        """Send the metrics of requests that a stop string may end, of which nobody here hears.

        Those of the others vLLM sends with their last tokens. Remove when it sends these.
        """
        for output in (output for reply in outputs.values() for output in reply.outputs):
            request = self.requests.get(output.request_id)
            if request is not None and request.sampling_params.stop:
                output.spec_decode_metrics = request.spec_decode_metrics

    def _make_cached_request_data(
        self,
        running_reqs: list[Any],
        resumed_reqs: list[Any],
        num_scheduled_tokens: dict[str, int],
        spec_decode_tokens: dict[str, list[int]],
        req_to_new_blocks: dict[str, Any],
    ) -> Any:
        # All else of the step is decided: what is free is for drafts, and nobody waits for them.
        # Where a step does not reach the end of a text, its draft has nothing to follow.
        drafting = [
            req
            for req in running_reqs
            if req.request_id in self.set_aside
            and req.num_computed_tokens + num_scheduled_tokens[req.request_id]
            == req.num_tokens + req.num_output_placeholders
        ]
        lengths = [len(self.set_aside[request.request_id]) for request in drafting]
        limits = self.room.limits(drafting, lengths, num_scheduled_tokens) if drafting else ()
        for request, limit in zip(drafting, limits, strict=True):
            name = request.request_id
            draft = self.set_aside.pop(name)[: max(0, limit)]
            tokens = num_scheduled_tokens[name] + len(draft)
            blocks = None
            if draft:
                blocks = self.kv_cache_manager.allocate_slots(
                    request, tokens, num_lookahead_tokens=self.num_lookahead_tokens
                )
            if blocks is not None:
                num_scheduled_tokens[name], spec_decode_tokens[name] = tokens, draft
                req_to_new_blocks[name] += blocks
        for request in self.running:  # that are not in this step
            request.spec_token_ids = self.set_aside.get(request.request_id, [])
        return super()._make_cached_request_data(
            running_reqs, resumed_reqs, num_scheduled_tokens, spec_decode_tokens, req_to_new_blocks
        )

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        tokens = scheduler_output.num_scheduled_tokens.values()
        scheduler_output.total_num_scheduled_tokens = sum(tokens)
        super()._update_after_schedule(scheduler_output)

    def add_request(self, request: Any) -> None:
        """As vLLM; and remember how long prompts are."""
        self.room.see_prompt(request.num_prompt_tokens)
        super().add_request(request)

    @property
    def waiting_with_blocks(self) -> Collection[Any]:
        """The requests that wait and have KV blocks, such as streams between two inputs."""
        if FEATURES.queues_block_holders:
            return self.kv_holding_waiting
        waiting = chain(self.waiting, self.skipped_waiting)
        return [request for request in waiting if request.num_computed_tokens]

    def may_speculate(self, request: Any) -> bool:
        """Whether the draft of a request may be verified.

        It may not while the request reasons ahead of what follows a grammar, or the grammar
        cannot come back from a branch; nor where a stream may go on behind a stop, which recurrent
        states cannot go back to.
        """
        if request.resumable and (self.has_mamba_layers or self._is_limited(request)):
            return False
        if request.use_structured_output and not (
            self.masks.is_constrained(request) and self.masks.comes_back(request)
        ):
            return False
        return may_speculate(request.sampling_params)

    def _is_limited(self, request: Any) -> bool:
        """Whether a seeded turn ends by another limit than its own. Remove with vLLM 0.30.

        There it ends by the limit of the first turn, which the worker does not know.
        """
        params = request.sampling_params
        return params.seed is not None and request.max_tokens < params.max_tokens

    def max_nodes(self, request: Any) -> int | None:
        """The most nodes of the draft of a request that are verified; None for any number."""
        is_chain = self.use_v2_model_runner and looks_back(request.sampling_params)
        return self.chain_nodes if is_chain else None

    def will_know_draft(self, request: Any) -> bool:
        """Whether the draft is here when masks are made of it, where that is needed."""
        return True

    def get_grammar_bitmask(self, scheduler_output: Any) -> GrammarOutput | None:
        """As vLLM's, for trees: a mask for each row of each request that follows a grammar."""
        if not (requests := self._structured(scheduler_output)):
            return None
        masks = self.masks.fill(requests, scheduler_output.scheduled_spec_decode_tokens)
        return GrammarOutput([request.request_id for request in requests], masks)

    def _structured(self, scheduler_output: Any) -> list[Any]:
        """The requests of a step that are sampled for and have a grammar."""
        if not scheduler_output.has_structured_output_requests:
            return []
        scheduled = [self.requests.get(name) for name in scheduler_output.num_scheduled_tokens]
        return [
            request
            for request in scheduled
            if request and request.use_structured_output and not request.is_prefill_chunk
        ]

    def _handle_stopped_request(self, request: Any) -> bool:
        # Scheduling step by step, vLLM drops the tokens of an accepted path that lie behind a stop,
        # and counts them as computed all the same: the input that comes next in a stream would
        # follow their KV. The token at the stop has none, as without speculation. Remove with
        # patches/0005.
        max_computed = request.num_tokens - 1 + request.num_output_placeholders
        request.num_computed_tokens = min(request.num_computed_tokens, max_computed)
        # The blocks that a step fills vLLM 0.32 puts into the prefix cache when it schedules the
        # next step, which does not come; 0.33 does it here. States in the middle of a draft are
        # none to go on from. Remove with 0.32.
        if not self.has_mamba_layers:
            self.kv_cache_manager.cache_blocks(
                request, request.num_computed_tokens - request.num_output_placeholders
            )
        return super()._handle_stopped_request(request)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count a tree: its scheduled nodes as draft tokens, its depths as positions."""
        if not self.log_stats or not num_draft_tokens:
            return None
        stats = spec_decoding_stats or SpecDecodingStats.new(self.num_spec_tokens)
        if self.depth_of_nodes:
            depth = self.depth_of_nodes[num_draft_tokens - 1]
        else:
            depth = depth_of(self.requests[request_id].draft_parents[:num_draft_tokens])
        stats.observe_draft(num_draft_tokens=depth, num_accepted_tokens=num_accepted_tokens)
        stats.num_draft_tokens += num_draft_tokens - depth
        return stats

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Store the drafts and their parents; on V1 without the nodes that a grammar forbids."""
        drafts = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        for index, (request_id, draft) in enumerate(drafts):
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                request.spec_token_ids = [] if request.is_prefill_chunk else draft
                if isinstance(draft_token_ids, TreeDraftTokenIds):
                    request.draft_parents = draft_token_ids.parents[index]
                    if not self.use_v2_model_runner:
                        self._prune(request)

    def _prune(self, request: Any) -> None:
        """Take out of the draft of a request what its grammar forbids, before it costs rows.

        On Model Runner V2 drafts are not here before their rows are on the device.
        """
        draft = request.spec_token_ids
        if not (draft and request.use_structured_output and self.may_speculate(request)):
            return
        rows = self.masks.allowed_rows(request)
        if self.keeps_places:
            rows = list(range(1, 1 + max(rows, default=0)))
        request.spec_token_ids = [draft[row - 1] for row in rows]
        request.draft_parents = parents_among(request.draft_parents, rows)


class AsyncTreeScheduler(TreeScheduler, AsyncScheduler):
    """The same for engines that schedule ahead, where drafts are placeholders in the scheduler.

    Where there is a grammar, vLLM lets sampling wait for the tokens of the step before, and brings
    what was drafted in it.
    """

    def will_know_draft(self, request: Any) -> bool:
        """Not what was drafted before that step, by which the device would go all the same."""
        return not request.use_structured_output or request.num_output_placeholders > 0

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Put the drafts in the place of their placeholders, for the masks."""
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        drafts = zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True)
        for index, (request_id, draft) in enumerate(drafts):
            request = self.requests.get(request_id)
            if request is not None and request_id in scheduled:
                scheduled[request_id] = draft[: len(scheduled[request_id])]
                request.draft_parents = draft_token_ids.parents[index]
