"""A speculator with a draft model, in the place of that of vLLM's `draft_model`.

A step that drafts nothing does not run the draft model. The first forward of a request's next round
takes in the tokens that the model's KV cache lacks. Where that forward has too few rows for them (a
whole prompt), each step before the round takes in as many as a step may have, in one forward.

Where a round has no room for a request, or none for so many, the request gets what the drafter has
without one. So do all requests of a step whose round does not pay, which the scheduler says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_recycle.core.curve import TRUNKS
from vllm_recycle.integration.cuda.ouroboros.cache import DraftCache
from vllm_recycle.integration.cuda.ouroboros.round import DraftForward, DraftGraphs, Round
from vllm_recycle.integration.cuda.ouroboros.round_starts import RoundStart
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingSpeculator
from vllm_recycle.integration.draft_blocks import DraftBlocks
from vllm_recycle.integration.ouroboros import group_of_draft_layers, refuse_shared_caches
from vllm_recycle.integration.schedule.step_note import note_of


class RoundSpeculator(TokenRecyclingSpeculator, StandaloneARSpeculator):
    """Runs rounds of vLLM's draft model, which vLLM loads and gives a KV cache.

    Args:
        drafter: has `head_length`, `lookahead` and `max_drafting`; in `run_round` it says what a
            round is, `leave_out` takes in who has none, and `propose` drafts behind them.
        may_speculate: bool [max_num_reqs], on the host, by `req_state_idx`; kept by the runner.

    Attributes:
        num_rows: of a request in a draft forward.
        forward: what runs the model.
        cache: what the model's KV cache has.
        start: where a round begins; its tensors are those that graphs were captured with.
        graphs: of rounds, where there are any.
        is_settled: whether all have a round in this step for whom there is room, or nobody is to.

    """

    num_extra_query_per_req = 0
    tree_drafter: Any
    kind = TRUNKS
    is_settled = True
    forward: DraftForward
    cache: DraftCache
    start: RoundStart
    graphs: DraftGraphs | None = None

    def __init__(self, drafter: Any, may_speculate: np.ndarray) -> None:
        StandaloneARSpeculator.__init__(self, drafter.vllm_config, drafter.device)
        TokenRecyclingSpeculator.__init__(self, drafter, may_speculate)
        self.req_states, self.max_drafting = drafter.req_states, drafter.max_drafting
        lookahead = drafter.lookahead
        self.num_rows = drafter.head_length + (0 if lookahead is None else lookahead.num_nodes)

    # The engine starts.

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        refuse_shared_caches(self.draft_attn_layer_names, self.vllm_config.compilation_config)

    def set_attn(self, model_state: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; NotImplementedError where the draft model's layers share no block table."""
        super().set_attn(model_state, kv_cache_config, *args, **kwargs)
        layers, head_length = self.draft_attn_layer_names, self.tree_drafter.head_length
        group = group_of_draft_layers(kv_cache_config, layers, self.max_model_len)
        self.kv_cache_group, tables = group, self.block_tables
        num_blocks = tables.input_block_tables[group].shape[1]
        self.start = RoundStart.make(self.max_drafting, head_length, num_blocks, self.device)
        blocks = DraftBlocks(kv_cache_config.num_blocks, tables.block_sizes[group])
        self.cache = DraftCache(self.max_num_reqs, blocks, self.device)
        # Here, since what is made with the weights goes with them when the engine sleeps.
        self.forward = DraftForward(self, head_length, self.tree_drafter.lookahead)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.graphs = None
        if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            self.graphs = DraftGraphs(
                self.vllm_config, self.device, rows=self.num_rows, max_drafting=self.max_drafting
            )

    @torch.inference_mode()
    def capture(self) -> None:
        if self.graphs is not None:
            self.start.clear()  # steps that warmed up have written to it
            self.graphs.capture_rounds(self._run_round)

    def alone_runs(self) -> dict[int, Callable[[], Any]]:
        self.tree_drafter.leave_out(self.no_drafts.new_zeros(1))
        return super().drafting_runs()

    def drafting_runs(self) -> dict[int, Callable[[], Any]]:
        """Rounds that draft for nobody: of one request, and of the most."""
        [(max_num_reqs, grow)] = self.alone_runs().items()
        self.start.clear()

        def run(batch: int) -> None:
            self._replay(batch)
            grow()

        if not self.max_drafting:
            return {max_num_reqs: grow}
        # Of more requests as many have a round.
        run_largest = partial(run, self.max_drafting)
        return {1: partial(run, 1), self.max_drafting: run_largest, max_num_reqs: run_largest}

    # A step.

    def update_requests(self, scheduler_output: Any) -> None:
        index_of = self.req_states.req_id_to_index
        self.cache.follow(scheduler_output, index_of, self.kv_cache_group)
        self.kind = note_of(scheduler_output).kind

    def prepare(
        self,
        input_batch: Any,
        *args: Any,
        drafts: bool,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        **kwargs: Any,
    ) -> None:
        if dummy_run:
            # Its requests are none: they have the states of others, and no KV slots.
            if skip_attn_for_dummy_run:
                self._run_largest_forwards()
            return
        num_new, min_computed, max_computed = self._computed(input_batch)
        self.cache.see(input_batch.idx_mapping_np, num_new, max_computed)
        if not drafts:
            return
        may_draft, indices = self._counted(input_batch), np.zeros(0, dtype=np.int64)
        if self.kind == TRUNKS:
            # Those behind the most of a round are not drafted for.
            self._catch_up(input_batch, may_draft.cumsum() <= self.max_drafting, min_computed)
            indices = self._take_round(input_batch, may_draft, min_computed)
        self.is_settled = self.kind != TRUNKS or len(indices) == min(
            may_draft.sum(), self.max_drafting
        )
        idx_mapping = input_batch.idx_mapping
        if not len(indices):
            self.tree_drafter.leave_out(idx_mapping)
            return
        if len(indices) < len(idx_mapping):
            other_indices = np.delete(np.arange(len(idx_mapping)), indices)
            order = async_tensor_h2d(np.concatenate((indices, other_indices)), device=self.device)
            idx_mapping = idx_mapping[order]
            self.tree_drafter.leave_out(idx_mapping[len(indices) :])
        self.draft(idx_mapping[: len(indices)])

    def _report(self, *args: Any) -> None:
        """Of trees some of which had to do without a trunk nothing is said."""
        if self.is_settled:
            super()._report(*args)

    def _computed(self, input_batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of each text that the target computed: in the step at most, in all at least.

        And in all at most.

        Each is int [num_reqs]. Where vLLM schedules ahead, it counts all drafts of the last step as
        accepted.
        """
        rows, nodes = input_batch.num_scheduled_tokens, input_batch.num_draft_tokens_per_req
        nodes = np.zeros_like(rows) if nodes is None else nodes
        ends = input_batch.num_computed_tokens_np + rows - nodes
        num_computed_prefill = np.minimum(ends, input_batch.prefill_len_np)
        max_accepted = np.minimum(nodes, self.tree_drafter.trees.depth)
        min_computed = np.maximum(num_computed_prefill, ends - self.num_speculative_steps)
        max_computed = np.minimum(ends + max_accepted, self.max_model_len)
        return rows - nodes + max_accepted, min_computed, max_computed

    def _catch_up(self, input_batch: Any, has_room: np.ndarray, min_computed: np.ndarray) -> None:
        """Take in what the first forward of a round would have no rows for, as far as it fits.

        Args:
            input_batch: of the step.
            has_room: bool [num_reqs], for whom a round has room.
            min_computed: int64 [num_reqs], tokens that the target has computed of each, at least.

        """
        states = input_batch.idx_mapping_np
        num_missing = self.cache.max_missing[states]
        is_late = self.may_speculate[states] & has_room & (num_missing >= self.forward.head_length)
        if is_late.any():
            ends = np.where(is_late, num_missing, 0).cumsum().clip(max=self.max_num_tokens)
            counts = np.diff(ends, prepend=0)
            self._take_in(input_batch, counts)
            self.cache.take(states, counts, min_computed)

    def _take_round(
        self, input_batch: Any, may_draft: np.ndarray, min_computed: np.ndarray
    ) -> np.ndarray:
        """The places in the step of those whose round is run, int64 [n]; it takes in their texts.

        Args:
            input_batch, min_computed: as for `_catch_up`.
            may_draft: bool [num_reqs], who may get drafts.

        """
        states = input_batch.idx_mapping_np
        fits = self.cache.max_missing[states] < self.forward.head_length
        # Warm-up steps ask for drafts in batches of any size.
        indices = np.flatnonzero(may_draft & fits)[: self.max_drafting]
        missing = self.cache.max_missing[states[indices]]
        self.cache.take(states[indices], missing, min_computed[indices])
        self.cache.mark(states, min_computed)
        return indices

    def draft(self, idx_mapping: torch.Tensor) -> None:
        """Run a round of these requests, int64 [batch]."""
        batch = len(idx_mapping)
        self.tree_drafter.num_rounds += batch
        tables = self.block_tables.block_tables[self.kv_cache_group].gpu
        self.start.first(batch).begin(idx_mapping, self.req_states, self.cache, tables)
        self._replay(batch)

    def _replay(self, batch: int) -> None:
        """A round from `start`, from its graph where there is one."""
        if self.graphs is None or not self.graphs.replay(batch):
            self._run_round(batch)

    def _run_round(self, batch: int) -> None:
        """The same, launched: on the device alone, and the same whatever `start` holds."""
        start = self.start.first(batch)
        model = Round(self.forward, start)
        self.tree_drafter.run_round(start.idx_mapping, start.last_token_ids, model)

    def _take_in(self, input_batch: Any, counts: np.ndarray) -> None:
        """A forward over the next tokens that the cache lacks.

        Args:
            input_batch: of the step.
            counts: int64 [num_reqs], tokens of each request.

        """
        num_reqs, num_rows = input_batch.num_reqs, int(counts.sum())
        starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
        slots = self._place_next(input_batch, counts, starts)
        metadata = self._build_attn_metadata(
            num_reqs,
            BatchExecutionDescriptor(CUDAGraphMode.NONE, num_rows, num_reqs),
            starts,
            input_batch.seq_lens_cpu_upper_bound,
            step=0,
            slot_mappings=slots,
        )
        slot_mappings = build_slot_mappings_by_layer(slots, self.kv_cache_config)
        buffers = self.input_buffers
        token_ids, positions = buffers.input_ids[:num_rows], buffers.positions[:num_rows]
        self._run_model(token_ids, positions, metadata, slot_mappings, None)

    def _place_next(self, input_batch: Any, counts: np.ndarray, starts: np.ndarray) -> torch.Tensor:
        """Fill `input_buffers` with the next tokens; returns their slots, int64 [groups, rows]."""
        buffers, idx_mapping = self.input_buffers, input_batch.idx_mapping
        owner = np.repeat(np.arange(len(counts)), counts)
        place = np.stack((owner, np.arange(len(owner)) - starts[owner]))
        owner, offset = async_tensor_h2d(place, device=self.device)
        num_tokens = async_tensor_h2d(counts, device=self.device)
        num_computed = self.req_states.num_computed_tokens.gpu[idx_mapping].long()
        first_tokens = self.cache.advance(idx_mapping, num_tokens, num_computed)
        token = first_tokens[owner] + offset
        query_start_loc = buffers.query_start_loc[: len(starts)]
        query_start_loc.copy_(async_tensor_h2d(starts, device=self.device))
        buffers.seq_lens[: len(counts)].copy_(first_tokens + num_tokens)
        positions = buffers.positions[: len(token)]
        positions.copy_(token.clamp(max=self.max_model_len - 1))
        texts = self.req_states.all_token_ids.gpu
        buffers.input_ids[: len(token)].copy_(texts[idx_mapping[owner], positions])
        # Rows behind the end of a short text are computed for nothing. They have KV too, in blocks
        # of the last step's drafts, which is written anew: attention may multiply it by 0.
        return self.block_tables.compute_slot_mappings(
            idx_mapping, query_start_loc, positions, len(token), out=self.expanded_slot_mappings
        )

    def _run_largest_forwards(self) -> None:
        """For vLLM to measure their memory; they read and write no KV cache."""
        num_rows = self.max_drafting * self.num_rows
        ids, positions = self.input_buffers.input_ids, self.input_buffers.positions
        for count in (self.max_num_tokens, num_rows) if num_rows else ():
            hidden_states = self._run_model(ids[:count], positions[:count], None, None, None)
        if num_rows:
            # Of the rows of a head only the last one has logits.
            self.model.compute_logits(hidden_states).max(dim=1)
