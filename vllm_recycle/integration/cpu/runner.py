"""Trees on vLLM's V1 model runner, which its CPU engine uses.

A step with trees differs from vLLM's in four places, each a short override: the inputs (positions,
while slots stay linear, and what attention must know), the walk in the place of rejection
sampling, the KV moves after it, and drafting. What the walk and the proposer do is in `core`,
where rows lie in `tree_batch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_recycle.core import ReqStateIndices
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.config import get_options
from vllm_recycle.integration.cpu.drafter import Ends, PricedV1Drafter, Texts
from vllm_recycle.integration.cpu.lora import keep_base_rows_plain
from vllm_recycle.integration.cpu.ouroboros import OuroborosV1Drafter
from vllm_recycle.integration.cpu.sampling import rows_are_independent, walk_by_depth
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import find_step_times
from vllm_recycle.integration.cpu.token_recycling import TokenRecyclingV1Drafter
from vllm_recycle.integration.cpu.tree_rows import compact_kv_cache, prepare_trees
from vllm_recycle.integration.options import OUROBOROS
from vllm_recycle.integration.requests import opts_out
from vllm_recycle.integration.scheduler import TreeDraftTokenIds


class TreeCPUModelRunner(CPUModelRunner):
    """vLLM's CPU model runner, verifying trees instead of chains."""

    drafter: TokenRecyclingV1Drafter | OuroborosV1Drafter
    draft_parents: list[list[int]]
    argmax: torch.Tensor | None  # of the raw logits, where they are what is sampled from

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        if get_options(vllm_config).method == OUROBOROS:
            self.drafter = OuroborosV1Drafter(vllm_config, device, self)
            # Ours drafts after bookkeeping, when the tokens of the step are on the host. vLLM's,
            # which was made before it, refuses this.
            self.speculative_config.disable_padded_drafter_batch = True
        self.req_state_indices = ReqStateIndices(vllm_config.scheduler_config.max_num_seqs)
        # vLLM leaves out min_p and logit_bias under speculation; the walk applies them as they
        # are. Remove when vLLM asks the method (patches/0003).
        self.input_batch.logitsprocs = LogitsProcessors(
            processor(vllm_config, device, False) for processor in BUILTIN_LOGITS_PROCESSORS
        )

    def load_lora_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = super().load_lora_model(*args, **kwargs)
        keep_base_rows_plain(model.lora_manager.modules.values())
        return model

    def initialize_metadata_builders(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_metadata_builders(*args, **kwargs)
        # A step of the target attends in none of a draft model's layers.
        for groups in self.attn_groups:
            for group in groups:
                if self.drafter.attention_layers >= set(group.layer_names):
                    group.get_metadata_builder().is_idle = True

    # Requests come and go.

    def _update_states(self, scheduler_output: Any) -> Callable | None:
        new = [request.req_id for request in scheduler_output.scheduled_new_reqs]
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        ended = {*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())}
        ended.update(scheduler_output.idle_sessions)
        # Sorted: sets have no order that tensor-parallel ranks share. A request whose input is
        # streamed comes as a new one again and again.
        freed = self.req_state_indices.free(sorted(ended.union(resumed, new)))
        if freed:
            self.drafter.proposer.release(freed)
        result = super()._update_states(scheduler_output)
        for request_id in [*new, *sorted(resumed)]:
            request = self.requests[request_id]
            known = torch.tensor([*request.prompt_token_ids, *request.output_token_ids])
            req_state_idx = self.req_state_indices.assign(request_id)
            self.drafter.begin(req_state_idx, known, request.num_computed_tokens)
        return result

    # Before the forward: positions, and what attention needs to know.

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        logits_indices, metadata, _ = prepared
        num_reqs = self.input_batch.num_reqs
        self.idx_mapping = torch.tensor(
            [self.req_state_indices[request_id] for request_id in self.input_batch.req_ids]
        )
        # Of drafts that follow a grammar only what it allows was scheduled.
        index_of, rows = self.input_batch.req_id_to_index, scheduler_output.draft_rows
        kept = {index_of[name]: of_nodes for name, of_nodes in rows.items()}
        trees = self.trees = StepLayout.make(
            trees=self.drafter.trees_of(self.idx_mapping).keep(kept),
            num_nodes=torch.tensor(metadata.num_draft_tokens),
            last_token_row=self.query_start_loc.cpu[1 : num_reqs + 1].long() - 1,
            row_token_ids=self.input_ids.gpu[logits_indices].long(),
        )
        # In the middle of a prompt, which goes on as it does: nothing is learnt there. Else where
        # others made a prompt be cut would be seen in what is drafted for it.
        discarded = torch.from_numpy(self.discard_request_mask.np[:num_reqs])
        trees.row_token_ids[trees.cu_num_logits[:-1][discarded]] = NO_TOKEN
        mrope = [self.mrope_positions.gpu] if self.uses_mrope else []
        prepare_trees(
            trees,
            positions=[self.positions, *mrope],
            input_ids=self.input_ids.gpu[: scheduler_output.total_num_scheduled_tokens],
            attn_groups=self.attn_groups,
        )
        return prepared

    # After the forward: learn, walk, move, draft.

    def sample_tokens(self, grammar_output: Any) -> Any:
        if (state := self.execute_model_state) is not None:
            # Here the logits are raw; the grammar and the sampler change them in place.
            best = self.drafter.observe(self.idx_mapping, self.trees, state.logits)
            self.argmax = None if grammar_output is not None else best
        return super().sample_tokens(grammar_output)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        sampling_metadata = self.input_batch.sampling_metadata
        if rows_are_independent(sampling_metadata):
            sampled = self.argmax
            if sampled is None:
                sampled = self.sampler(logits, sampling_metadata).sampled_token_ids.flatten().long()
            result = self.drafter.proposer.operations.walk(
                sampled, self.trees.drafts, self.trees.cu_num_logits, tree=self.trees.trees
            )
            logprobs = None
        else:
            result, logprobs = walk_by_depth(
                logits,
                self.trees,
                sampler=self.sampler,
                sampling_metadata=sampling_metadata,
                discarded=self.discard_request_mask.np[: self.input_batch.num_reqs],
                output_token_ids=[
                    self.requests[request_id].output_token_ids
                    for request_id in self.input_batch.req_ids
                ],
            )
        self.drafter.accept(
            self.idx_mapping,
            self.trees,
            result,
            Ends(
                self.input_batch.token_ids_cpu,
                np.arange(len(self.trees.num_nodes)),
                self.positions[self.trees.first_token_row].numpy(),
            ),
        )
        compact_kv_cache(
            self.trees,
            result.path,
            attn_groups=self.attn_groups,
            slot_mappings=[
                table.slot_mapping.gpu for table in self.input_batch.block_table.block_tables
            ],
            layers=self.compilation_config.static_forward_context,
            others=self.drafter.attention_layers,
        )
        return SamplerOutput(result.token_ids.to(torch.int32), logprobs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM rewinds the generators of requests whose sample it throws away. Ours did not draw
        # for these, and CPU generators cannot rewind. Remove with patches/0001.
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]
        hidden = {int(i): generators.pop(int(i)) for i in discarded if int(i) in generators}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(hidden)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # The scheduler cuts each tree at max_model_len.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        batch = self.input_batch
        scheduled = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
        # By the size of the batch, from num_speculative_tokens_per_batch_size.
        num_nodes = scheduler_output.num_spec_tokens_to_schedule
        goes_on = np.array([bool(token_ids) for token_ids in sampled_token_ids])
        computed = batch.num_computed_tokens_cpu[: batch.num_reqs] + scheduled
        texts = Texts(
            idx_mapping=self.idx_mapping,
            token_ids=batch.token_ids_cpu,
            # Of those that were sampled for, without the draft tokens that were not accepted.
            num_computed_tokens=np.where(
                goes_on, batch.num_tokens_no_spec[: batch.num_reqs] - 1, computed
            ),
            wants_draft=goes_on
            & [num_nodes > 0 and self._may_speculate(name) for name in batch.req_ids],
            max_depths=np.array([self._max_depth(name) for name in batch.req_ids]),
            num_nodes=num_nodes,
        )
        drafts = self.drafter.draft(texts, batch.block_table)[:, :num_nodes].tolist()
        for draft in drafts:
            # Rows behind the last filled node would be verified for nothing.
            while draft and draft[-1] < 0:
                draft.pop()
        parents = self.drafter.trees_of(self.idx_mapping).parents[:, 1:].tolist()
        self.draft_parents = [
            of_nodes[: len(draft)] for of_nodes, draft in zip(parents, drafts, strict=True)
        ]
        return drafts

    def take_draft_token_ids(self) -> TreeDraftTokenIds | None:
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        return TreeDraftTokenIds(drafts.req_ids, drafts.draft_token_ids, self.draft_parents)

    def price_rows(self) -> str | None:
        """Measure what rows cost, where drafts depend on it; to be called without requests.

        Returns:
            What was found, if anything was measured.

        """
        drafter = self.drafter
        if not isinstance(drafter, PricedV1Drafter) or drafter.row_cost is not None:
            return None
        drafter.step_times, step_seconds, found = find_step_times(self)
        return found if step_seconds is None else found + drafter.judge(step_seconds)

    def _max_depth(self, request_id: str) -> int:
        """Tokens that a request may still have, but for the one that it gets without a draft."""
        request = self.requests[request_id]
        return max(0, request.sampling_params.max_tokens - len(request.output_token_ids) - 1)

    def _may_speculate(self, request_id: str) -> bool:
        """Whether the scheduler will take a draft for this request, as far as is known here."""
        request = self.requests[request_id]
        params = request.sampling_params
        is_finished = len(request.output_token_ids) >= params.max_tokens
        return not (is_finished or opts_out(params))
