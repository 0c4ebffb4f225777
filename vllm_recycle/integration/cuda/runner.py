"""Trees on vLLM's Model Runner V2, with nothing on the host that the device can do.

A step differs from vLLM's in four places, each a short override: after the slots are known, the
rows of trees get the positions of their depths, and attention learns how many trees there are;
vLLM's sampler samples all rows, and the drafter learns from them; the walk takes the place of
rejection sampling, and the accepted KV moves; our drafter drafts. V2 keys its noise by seed and
position, so a row's token does not depend on what was drawn before it, and seeded output is that
without speculation. No step waits for the device, but with LoRA.

Where only chains are drafted, attention and graphs are vLLM's, and no KV moves; recurrent layers
keep the states behind each row, and vLLM is told how many were accepted. Penalties look
back along the path to each row. Bad words and thinking budgets look back in vLLM's kernels along
the rows before a row, so requests with these have chains beside the trees of others. Where a
request follows a grammar, drafts go to the scheduler, as those of vLLM do. The speculator of vLLM's
host method is replaced by ours. In V2's batch order requests with a draft come first.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_recycle.integration.cuda.backend import TreeMetadataBuilder, warm_up_tiles
from vllm_recycle.integration.cuda.draft_tokens import TreeDraftTokensHandler
from vllm_recycle.integration.cuda.drafter import V2Drafter, V2Speculator
from vllm_recycle.integration.cuda.drafters import drafter_class
from vllm_recycle.integration.cuda.grammar_rows import GrammarRows
from vllm_recycle.integration.cuda.graphs import (
    plan_full_graphs,
    prefer_graphs,
    replace_full_graphs,
)
from vllm_recycle.integration.cuda.lora import TreeLoraState
from vllm_recycle.integration.cuda.sampling import (
    logprobs_of_paths,
    penalise_along_paths,
    sample_rows,
)
from vllm_recycle.integration.cuda.time_steps import (
    describe_capture,
    describe_times,
    find_graph_times,
)
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.requests.parameters import (
    looks_back,
    may_speculate,
    new_request,
    with_holes,
)
from vllm_recycle.integration.schedule.draft_sizes import sizes_of
from vllm_recycle.integration.schedule.step_note import note_of
from vllm_recycle.integration.start.refusals import has_states
from vllm_recycle.integration.start.shims import without_experts_load
from vllm_recycle.integration.start.versions import FEATURES
from vllm_recycle.kernels.triton.compile_times import describe_compiling
from vllm_recycle.kernels.triton.inputs import place_tree_rows
from vllm_recycle.kernels.triton.kv_cache import compact_path
from vllm_recycle.kernels.triton.paged_layers import PagedLayers
from vllm_recycle.kernels.triton.walk import walk


class TreeModelRunner(GPUModelRunner):
    """vLLM's V2 runner, verifying trees instead of chains."""

    tree_drafter: V2Drafter
    speculator: V2Speculator
    decode_query_len: int
    graph_report: str | None = None  # once there are full ones

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.lora_state = TreeLoraState(self.max_num_reqs)
        # Whether the scheduler may take a draft for a request, by its req_state_idx.
        self.may_speculate = np.zeros(self.max_num_reqs, dtype=bool)
        self.settings = settings_of(vllm_config)
        options = self.settings.options
        self.verifies_trees = options.has_trees
        self.has_states = has_states(vllm_config.model_config)
        self.tree_drafter = drafter_class(options)(vllm_config, device, self.req_states)
        self.speculator = self.tree_drafter.make_speculator(self.may_speculate)
        self.draft_tokens_handler = TreeDraftTokensHandler(device, self.tree_drafter.trees)
        # Where each request of a step has its tree, for graphs, which read it where it always was.
        self.tree_indices = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        # Nodes that trees may have by the number of requests, and most rows of all of a step.
        self.sizes_of_batch = sizes_of(vllm_config)
        rows = [batch * (1 + max(n)) for batch, n in enumerate(self.sizes_of_batch) if n]
        self.max_tree_rows = min(max(rows, default=0), self.max_num_tokens)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # As many as the scheduler lets a step have.
        share = self.settings.options.budget_share
        num_rows = self.max_num_reqs + int(share * self.max_num_tokens)
        self.grammar_rows = GrammarRows(self.structured_outputs_worker, num_rows)
        penalise_along_paths(self.sampler, self.tree_drafter.trees)

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any
    ) -> None:
        # A cache that vLLM made to measure graphs, and has dropped, must not live on here.
        self.paged_layers: dict[int, PagedLayers] = {}  # by KV cache group
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if not self.verifies_trees:  # what chains need is vLLM's
            return
        sizes = self.compilation_config.cudagraph_capture_sizes
        if sizes:
            chooses = self.settings.chooses_sizes
            shapes = plan_full_graphs(self.sizes_of_batch, sizes, has_plain_requests=chooses)
            replace_full_graphs(self.cudagraph_manager, shapes)
        builders = (group.get_metadata_builder() for groups in self.attn_groups for group in groups)
        # A head's layers have vLLM's attention.
        self.tree_builders = [
            builder for builder in builders if isinstance(builder, TreeMetadataBuilder)
        ]
        for builder in self.tree_builders:
            builder.take_trees(self.tree_drafter.trees, self.tree_indices)
        if not is_profiling:
            layers = self.compilation_config.static_forward_context
            # A draft model's layers see no trees of the target's.
            target_names = layers.keys() - self.speculator.draft_attn_layer_names
            caches_of = {
                index: [layers[name].kv_cache for name in group.layer_names if name in target_names]
                for index, group in enumerate(kv_cache_config.kv_cache_groups)
            }
            self.paged_layers = {
                index: PagedLayers.make(caches) for index, caches in caches_of.items() if caches
            }

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile what is served and vLLM's warm-up has not run."""
        self.tree_drafter.warm_up()
        for run in self.speculator.drafting_runs().values():
            run()
        if self.verifies_trees:
            self._warm_up_attention()

    def _warm_up_attention(self) -> None:
        """Tree attention for all trees that there may be, once for each kind of layer."""
        layers, kinds = self.compilation_config.static_forward_context, {}
        tables = self.block_tables.get_dummy_block_tables(1)
        for table, group in zip(tables, self.kv_cache_config.kv_cache_groups, strict=True):
            for name in set(group.layer_names) - self.speculator.draft_attn_layer_names:
                impl, kv_cache = layers[name].impl, layers[name].kv_cache
                shape = (impl.num_heads, kv_cache.shape, kv_cache.stride())
                kinds[shape, impl.window, impl.sinks is None] = (layers[name], table)
        for layer, table in kinds.values():
            warm_up_tiles(layer, table, self.tree_drafter.trees, self.tree_indices)

    def capture_model(self, **kwargs: Any) -> int:
        start = time.perf_counter()
        num_bytes = super().capture_model(**kwargs)
        seconds = time.perf_counter() - start
        self.graph_report = describe_capture(self.cudagraph_manager, seconds, num_bytes)
        return num_bytes

    def price_rows(self) -> str | None:
        """Measure what steps cost, where the scheduler is to know; returns what the start took."""
        step_report = self._time_steps() if self.settings.chooses_sizes else None
        reports = (describe_compiling(), self.graph_report, step_report)
        return "; ".join(filter(None, reports)) or None

    @torch.inference_mode()
    def _time_steps(self) -> str:
        start = time.perf_counter()
        with self.tree_drafter.as_if_serving(), without_experts_load(self):
            times = find_graph_times(self)
        self.speculator.take_report()  # steps that warmed up have left one
        self.speculator.times = times
        if times.graphs:
            prefer_graphs(self.cudagraph_manager, times.preference)
        return describe_times(times, time.perf_counter() - start)

    def shutdown(self) -> None:
        self.paged_layers = {}
        super().shutdown()

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        super()._dummy_sampler_run(hidden_states)
        # vLLM samples one row a request when it measures memory. As many more as trees can have,
        # and the copy in float32 that sampling parameters need:
        num_rows = min(self.max_num_reqs + self.max_tree_rows, self.max_num_tokens)
        rows = hidden_states[:1].expand(num_rows, -1)
        logits = self.model.compute_logits(rows.contiguous())
        logits[: get_max_chunk_logits(logits.shape[1])].to(torch.float32, copy=True)

    # Requests come and go.

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        new_reqs = scheduler_output.scheduled_new_reqs
        if new_reqs:
            indices = [self.req_states.req_id_to_index[request.req_id] for request in new_reqs]
            text_of = partial(with_holes, is_encoder_decoder=self.is_encoder_decoder)
            owners = note_of(scheduler_output).owners
            self.tree_drafter.add_requests(
                [
                    new_request(
                        index,
                        text_of(request.prefill_token_ids, request),
                        request.sampling_params,
                        owners.get(request.req_id),
                        self.model_config,
                    )
                    for index, request in zip(indices, new_reqs, strict=True)
                ]
            )
            chains = [looks_back(request.sampling_params) for request in new_reqs]
            states, are_chains = async_tensor_h2d([indices, chains], device=self.device)
            self.tree_drafter.trees.are_chains[states] = are_chains.bool()
            drafting = [may_speculate(request.sampling_params) for request in new_reqs]
            self.may_speculate[indices] = drafting
            self.tree_drafter.num_undrafted += drafting.count(False)

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        if not FEATURES.v2_hosts:
            num_scheduled = scheduler_output.num_spec_tokens_to_schedule
            self.speculator.num_scheduled = self.draft_tokens_handler.num_scheduled = num_scheduled
        self.speculator.update_requests(scheduler_output)

    def _remove_request(self, req_id: str) -> bool:
        req_state_idx = self.req_states.req_id_to_index.get(req_id)
        was_removed = super()._remove_request(req_id)
        if was_removed:
            self.tree_drafter.release(req_state_idx)
        return was_removed

    # Before the forward: positions, and what attention needs to know.

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM sorts a part of a prompt that is as long as a whole draft before requests without a
        # draft, whose states its kernels then do not find. By length alone these come first.
        decode_query_len = self.decode_query_len
        self.decode_query_len = 0 if self.has_states else decode_query_len
        try:
            return super().gather_batch_req_state(*args, **kwargs)
        finally:
            self.decode_query_len = decode_query_len

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        block_tables, self.slot_mappings = super().prepare_attn(input_batch)
        self.lora_state.num_logits = np.diff(input_batch.cu_num_logits_np)
        # After the slots, which stay linear. Without drafts it tells learning what the rows are.
        self.row_token_ids = place_tree_rows(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            input_batch.expanded_local_pos,
            trees=self.tree_drafter.trees,
            idx_mapping=input_batch.idx_mapping,
            expanded_idx_mapping=input_batch.expanded_idx_mapping,
            tree_indices=self.tree_indices,
        )
        num_nodes = input_batch.num_draft_tokens_per_req
        if num_nodes is not None and self.verifies_trees:
            # Without prompts all are trees, with those that only fill up a CUDA graph.
            num_trees = (
                int(np.count_nonzero(num_nodes))
                if input_batch.has_prefill
                else input_batch.num_reqs_after_padding
            )
            for builder in self.tree_builders:
                builder.num_trees = num_trees
        return block_tables, self.slot_mappings

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As for all; what the step before has reported goes to the scheduler with the tokens."""
        report = self.speculator.take_report()
        output = super().sample_tokens(grammar_output)
        if report is not None and output is not None:
            output.model_runner_output.draft_report = report
        return output

    # After the forward: learn, walk, move. vLLM then updates its states and asks for drafts.

    def sample(
        self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """In the place of vLLM's: its sampler for the rows, and the walk."""
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        # Here the logits are raw; the grammar changes them in place.
        self.tree_drafter.observe(input_batch, self.row_token_ids, logits)
        if grammar_output is not None:
            self.grammar_rows.mask(logits, input_batch, grammar_output)
        path = None
        if input_batch.num_draft_tokens == 0:
            output = self.sampler(logits, input_batch)
        else:
            best = self.tree_drafter.best_token_ids if grammar_output is None else None
            output, path = self._sample_trees(logits, input_batch, best)
        self.tree_drafter.accept(input_batch, self.row_token_ids, output, path)
        return output, output.num_sampled, output.num_rejected

    def _sample_trees(
        self, logits: torch.Tensor, input_batch: Any, best: torch.Tensor | None
    ) -> tuple[SamplerOutput, torch.Tensor]:
        """What was sampled, and the visited rows, int64 [num_reqs, path]."""
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        sampled, scores = sample_rows(self.sampler, logits, input_batch, self.row_token_ids, best)
        cu_num_logits = input_batch.cu_num_logits
        result = walk(
            sampled,
            self.req_states.draft_tokens,
            cu_num_logits,
            trees=self.tree_drafter.trees,
            idx_mapping=input_batch.idx_mapping,
        )
        for group, layers in self.paged_layers.items():
            compact_path(
                layers,
                self.slot_mappings[group],
                input_batch.logits_indices,
                cu_num_logits,
                result.path,
            )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            result.lengths,
            input_batch.seq_lens,
            cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        output = SamplerOutput(
            sampled_token_ids=result.token_ids,
            logprobs_tensors=logprobs_of_paths(
                self.sampler, scores, input_batch, sampled, result.path
            ),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, result.path
