"""Trees on vLLM's V1 model runner, which its CPU engine uses.

A step with trees differs from vLLM's in the inputs (positions, while slots stay linear, and what
attention must know), in the walk that takes the place of rejection sampling, in the KV moves after
it, and in drafting. What is drafted is up to a drafter (`drafters`); where rows lie is in
`step_layout`. How the nodes of a draft hang together goes to the scheduler with it, and comes back
with the step that verifies it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.thinking_budget_state import maybe_create_thinking_budget_state_holder
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.req_states import ReqStateIndices
from vllm_recycle.core.tree import Trees
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cpu.accepted_step import AcceptedSteps
from vllm_recycle.integration.cpu.backend import hand_over
from vllm_recycle.integration.cpu.drafters import DRAFTERS
from vllm_recycle.integration.cpu.grammar_ahead import GrammarsAhead
from vllm_recycle.integration.cpu.lora import keep_base_rows_plain
from vllm_recycle.integration.cpu.recurrent import RecurrentGroup
from vllm_recycle.integration.cpu.sampling import rows_are_independent, walk_by_depth
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.requests.parameters import may_speculate, new_request, with_holes
from vllm_recycle.integration.schedule.grammar import rows_of_masks
from vllm_recycle.integration.schedule.scheduler import TreeDraftTokenIds
from vllm_recycle.integration.schedule.step_note import note_of
from vllm_recycle.kernels.cpu.calls import walk


class TreeCPUModelRunner(AcceptedSteps):
    """vLLM's CPU model runner, verifying trees instead of chains.

    Attributes:
        idx_mapping: int64 [batch], of the step.
        roots: the ends of its texts, up to each root; of no token where nothing is sampled.
        argmax: int64 [logit rows], of the raw logits, where they are what is sampled from.
        draft_parents: of each request of the step, the parent row of each node of its new draft.
        start_time: when the step began.
        recurrent_groups: layers whose states cannot go back by themselves.

    """

    idx_mapping: torch.Tensor
    roots: Ends
    argmax: torch.Tensor | None
    draft_parents: list[list[int]]
    start_time: float
    recurrent_groups: list[RecurrentGroup]
    speculative_config: Any  # vLLM's

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        options = settings_of(vllm_config).options
        self.tree_drafter = DRAFTERS[options.source](vllm_config, device, self)
        if isinstance(self.tree_drafter, SpecDecodeBaseProposer):
            self.drafter = self.tree_drafter
        # Drafts are made after vLLM's bookkeeping, when the tokens of the step are on the host.
        # vLLM's proposers were made before, and refuse the flag.
        self.speculative_config.disable_padded_drafter_batch = True
        self.grammars = GrammarsAhead(vllm_config, waits=options.isolates)
        self.grows = options.grows
        self.req_state_indices = ReqStateIndices(vllm_config.scheduler_config.max_num_seqs)
        # vLLM leaves out min_p and logit_bias under speculation; the walk applies them as they
        # are. Remove when vLLM asks the method (patches/0003).
        self.input_batch.logitsprocs = LogitsProcessors(
            processor(vllm_config, device, False) for processor in BUILTIN_LOGITS_PROCESSORS
        )
        self._count_thinking_by_row()

    def may_reinitialize_input_batch(self, *args: Any, **kwargs: Any) -> None:
        super().may_reinitialize_input_batch(*args, **kwargs)
        self._count_thinking_by_row()

    def _count_thinking_by_row(self) -> None:
        """Count budgets of thinking as without drafts: the walk has the path so far as output."""
        self.input_batch.thinking_budget_state_holder = maybe_create_thinking_budget_state_holder(
            self.vllm_config.reasoning_config, self.max_num_reqs, 0, self.device, False
        )

    def _ends(self, last_positions: list[int]) -> Ends:
        """The ends of the texts of the batch, by the places of their last tokens."""
        batch = self.input_batch
        is_token = batch.is_token_ids_tensor if self.enable_prompt_embeds else None
        return Ends(batch.token_ids_cpu_tensor, last_positions, is_token)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Without vLLM's rejection sampler, in whose place the walk is: in vLLM 0.30 it does not run
        # on a CPU. Remove when 0.30 is dropped.
        config, self.speculative_config = self.speculative_config, None
        try:
            return super()._dummy_sampler_run(hidden_states)
        finally:
            self.speculative_config = config

    def load_lora_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        model = super().load_lora_model(*args, **kwargs)
        keep_base_rows_plain(model.lora_manager.modules.values())
        return model

    def initialize_metadata_builders(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_metadata_builders(*args, **kwargs)
        # A step of the target attends in none of a draft model's layers.
        for groups in self.attn_groups:
            for group in groups:
                if self.tree_drafter.attention_layers >= set(group.layer_names):
                    group.get_metadata_builder().is_idle = True
        layers = self.compilation_config.static_forward_context
        self.recurrent_groups = [
            RecurrentGroup(group, layers)
            for groups in self.attn_groups
            for group in groups
            if isinstance(group.kv_cache_spec, MambaSpec)
        ]
        self.calculate_reorder_batch_threshold()  # again, by what these changed

    def _get_mamba_bufs(self) -> Any:
        # What is for drafts has no kernels on CPU.
        buffers = super()._get_mamba_bufs()
        buffers.postprocess_align = None
        return buffers

    def _update_states_after_model_execute(self, *args: Any) -> None:
        """Nothing, where vLLM notes how far recurrent states are to go back: `_sample` did it."""

    # Requests come and go.

    def _update_states(self, scheduler_output: Any) -> Callable | None:
        new_ids = [request.req_id for request in scheduler_output.scheduled_new_reqs]
        resumed_ids = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        note, ended_ids = note_of(scheduler_output), set(scheduler_output.finished_req_ids)
        ended_ids.update(scheduler_output.preempted_req_ids or (), note.idle_sessions)
        # Sorted: sets have no order that tensor-parallel ranks share. A request whose input is
        # streamed comes as a new one again and again.
        freed_indices = self.req_state_indices.free(sorted(ended_ids.union(resumed_ids, new_ids)))
        if freed_indices:
            self.tree_drafter.release(freed_indices)
        self.grammars.end([*scheduler_output.finished_req_ids, *new_ids])
        result = super()._update_states(scheduler_output)
        new_requests = []
        for request_id in [*new_ids, *sorted(resumed_ids)]:
            request = self.requests[request_id]
            prompt = request.prompt_token_ids or [NO_TOKEN] * request.num_prompt_tokens
            token_ids = with_holes(
                [*prompt, *request.output_token_ids],
                request,
                is_encoder_decoder=self.model_config.is_encoder_decoder,
            )
            req_state_idx = self.req_state_indices.assign(request_id)
            params, owner = request.sampling_params, note.owners.get(request_id)
            new_requests.append(
                new_request(req_state_idx, token_ids, params, owner, self.model_config)
            )
            self.tree_drafter.num_undrafted += not may_speculate(params)
            if self.grows:
                self.grammars.begin(request_id, params)
        self.tree_drafter.add_requests(new_requests)
        self.tree_drafter.follow(scheduler_output, self.req_state_indices)
        return result

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.start_time = time.perf_counter()
        return super().execute_model(*args, **kwargs)

    # Before the forward: positions, and what attention needs to know.

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        inputs = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.logits_indices, _, _ = inputs
        num_reqs = self.input_batch.num_reqs
        batch, names = self.input_batch, self.input_batch.req_ids
        starts = self.query_start_loc.np[: num_reqs + 1].tolist()
        self.idx_mapping = torch.from_numpy(
            np.array([self.req_state_indices[name] for name in names])
        )
        # As the scheduler has cut the drafts, by grammars and to what fits.
        parents = note_of(scheduler_output).parents
        drafts = [parents.get(name, ()) for name in names]
        input_ids = self.input_ids.np[: starts[-1]]
        self.step = StepLayout.make(
            trees=Trees.from_drafts(drafts),
            num_nodes=[*map(len, drafts)],
            last_token_row=[end - 1 for end in starts[1:]],
            row_token_ids=input_ids[self.logits_indices.numpy()],
        )
        computed = batch.num_computed_tokens_cpu[:num_reqs].tolist()
        rows = zip(computed, self.step.first_token_row, starts[:-1], strict=True)
        roots = [num_computed + row - start for num_computed, row, start in rows]
        # In the middle of a prompt, which goes on as it does: nothing is learnt there. Else where
        # others made a prompt be cut would be seen in what is drafted for it.
        for index, discarded in enumerate(self.discard_request_mask.np[:num_reqs].tolist()):
            if discarded:
                self.step.row_token_ids[self.step.cu_num_logits[index]] = roots[index] = NO_TOKEN
        self.roots = self._ends(roots)
        mrope = [self.mrope_positions.gpu] if self.uses_mrope else []
        self.step.place([self.positions, *mrope], input_ids)
        hand_over(self.step, self.attn_groups)
        return inputs

    # After the forward: learn, walk, move, draft.

    def sample_tokens(self, grammar_output: Any) -> Any:
        if (state := self.execute_model_state) is not None:
            # Here the logits are raw; the grammar and the sampler change them in place.
            best = self.tree_drafter.observe(self.idx_mapping, self.step, state.logits)
            self.argmax = None if grammar_output is not None else best
            if grammar_output is not None:
                self._mask(state.logits, grammar_output)
        return super().sample_tokens(None)

    def _mask(self, logits: torch.Tensor, output: Any) -> None:
        """Forbid, in logits [logit rows, vocab], what grammars do."""
        rows = rows_of_masks(output, self.input_batch.req_ids, self.step.cu_num_logits.tolist())
        apply_grammar_bitmask(
            SimpleNamespace(scheduled_spec_decode_tokens={}),
            SimpleNamespace(
                grammar_bitmask=output.grammar_bitmask, structured_output_request_ids=rows
            ),
            SimpleNamespace(req_ids=range(len(logits))),
            logits,
        )

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        sampling_metadata, step = self.input_batch.sampling_metadata, self.step
        if rows_are_independent(sampling_metadata):
            sampled = self.argmax
            if sampled is None:
                sampled = self.sampler(logits, sampling_metadata).sampled_token_ids.flatten().long()
            result = walk(sampled, step.drafts, step.cu_num_logits, trees=step.trees)
            logprobs = None
        else:
            result, logprobs = walk_by_depth(
                logits,
                step,
                sampler=self.sampler,
                sampling_metadata=sampling_metadata,
                discarded=self.discard_request_mask.np[: self.input_batch.num_reqs],
                requests=[self.requests[name] for name in self.input_batch.req_ids],
            )
        self.tree_drafter.accept(self.idx_mapping, step, result, self.roots)
        self._compact_kv_cache(result.path)
        for group in self.recurrent_groups:
            group.go_back(result.lengths)
        return SamplerOutput(result.token_ids.to(torch.int32), logprobs)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM rewinds the generators of requests whose sample it throws away. Ours did not draw
        # for these, and CPU generators cannot rewind. Remove with patches/0001.
        generators, discarded = self.input_batch.generators, self.discard_request_mask.np
        discarded_generators = {i: generators.pop(i) for i in [*generators] if discarded[i]}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(discarded_generators)

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        # The scheduler cuts each tree at max_model_len.
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any
    ) -> list[list[int]]:
        self.proposing = scheduler_output, sampled_token_ids, *args
        batch, scheduled = self.input_batch, scheduler_output.num_scheduled_tokens
        # By the size of the batch, from num_speculative_tokens_per_batch_size.
        num_nodes = scheduler_output.num_spec_tokens_to_schedule
        num_computed = batch.num_computed_tokens_cpu[: batch.num_reqs].tolist()
        ends = batch.num_tokens_no_spec[: batch.num_reqs].tolist()
        # In the middle of a prompt a request gets no token, with drafts of others or without.
        tokens = sum(max(1, len(token_ids)) for token_ids in sampled_token_ids)
        is_alone = scheduler_output.total_num_scheduled_tokens == len(self.step.row_token_ids)
        seconds = time.perf_counter() - self.start_time if is_alone else None
        context = sum(num_computed) / len(num_computed)
        self.tree_drafter.record_step(self.step, context, tokens=tokens, seconds=seconds)
        computed, max_depths = [], []
        for index, name in enumerate(batch.req_ids):
            request, has_token = self.requests[name], bool(sampled_token_ids[index])
            params = request.sampling_params
            # Tokens that a request may still have; one of them comes without a draft.
            max_new_tokens = params.max_tokens - len(request.output_token_ids)
            # Of those that were sampled for, without the draft tokens that were not accepted.
            computed.append(ends[index] - 1 if has_token else num_computed[index] + scheduled[name])
            may_draft = has_token and num_nodes > 0 and may_speculate(params)
            max_depths.append(max(max_new_tokens - 1, 0) if may_draft else 0)
        starts = note_of(scheduler_output).grammar_starts.items()
        compiled_grammars = self.grammars.follow(
            {name: self.requests[name].output_token_ids[start:] for name, start in starts}
        )
        grammars = [compiled_grammars.get(name) for name in batch.req_ids]
        texts = TextEnds(self.idx_mapping, self._ends(computed), max_depths, grammars=grammars)
        drafts = self.tree_drafter.draft(texts, num_nodes, batch.block_table)
        self.proposing = ()  # hidden states are not kept
        self.draft_parents = drafts.parents
        return drafts.token_ids

    def take_draft_token_ids(self) -> TreeDraftTokenIds | None:
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        return TreeDraftTokenIds(drafts.req_ids, drafts.draft_token_ids, self.draft_parents)

    def price_rows(self) -> str | None:
        """See `V1Drafter.price`."""
        return self.tree_drafter.price(self)
