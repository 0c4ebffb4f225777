"""Trees on vLLM's Model Runner V2, with the attention and the KV cache of its CPU engine.

V2 is the default of vLLM's CUDA engines and needs Triton; on a CPU it starts only under Triton's
interpreter. This runner is the slice of it that shows that one core serves both runners:

    covered      chunked prefill, mixed batches, prefix caching, preemption; greedy and seeded
                 sampling with temperature, min_p and logit_bias; logprobs
    not covered  structured output (refused), penalties, bad words, thinking budgets and custom
                 logits processors (vLLM's kernels for these take the drafts of a request for a
                 chain), prompt logprobs, asynchronous scheduling, CUDA

vLLM's host method is `ngram_gpu`, whose speculator is replaced by ours. All rows of a step are
sampled at once: V2 keys its noise by seed and position, so a row's token does not depend on what
was drawn before it. A request's sequence number is the index of its state in the runner.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.cpu.model_runner import CPUModelRunner
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_recycle.core import WalkResult
from vllm_recycle.integration.drafter import TreeDrafter
from vllm_recycle.integration.options import TOKEN_RECYCLING
from vllm_recycle.integration.tree_batch import TreeBatch
from vllm_recycle.integration.tree_rows import compact_kv_cache, prepare_trees


class TreeSpeculator(BaseSpeculator):
    """What V2 asks for drafts, in the place of the host method's speculator."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, drafter: TreeDrafter) -> None:
        self.drafter = drafter

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [batch, nodes], -1 where there is no draft."""
        sequences = input_batch.idx_mapping
        drafts = self.drafter.proposer.propose(sequences, last_sampled[sequences, 0])
        # A request in the middle of its prompt has no last token yet.
        return drafts.masked_fill_((num_sampled == 0)[:, None], -1)


class TreeCPUModelRunnerV2(CPUModelRunner):
    """vLLM's V2 runner on CPU, verifying trees instead of chains."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.drafter = TreeDrafter(vllm_config)
        self.tree = self.drafter.options.load_tree()
        self.speculator = TreeSpeculator(self.drafter)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.drafter.load_model(self.model)

    # Requests come and go.

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            index = self.req_states.req_id_to_index[request.req_id]
            # vLLM may schedule a full draft in a request's first step already.
            self.req_states.draft_tokens[index] = -1
            self.drafter.proposer.begin(index, torch.tensor(request.prefill_token_ids))

    def _remove_request(self, req_id: str) -> bool:
        index = self.req_states.req_id_to_index.get(req_id)
        removed = super()._remove_request(req_id)
        if removed:
            self.drafter.proposer.release([index])
        return removed

    # Before the forward: positions and attention metadata.

    def prepare_attn(self, input_batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        block_tables, self.slot_mappings = super().prepare_attn(input_batch)
        num_reqs, num_nodes = input_batch.num_reqs, input_batch.num_draft_tokens_per_req
        self.trees = TreeBatch.make(
            tree=self.tree,
            num_nodes=torch.zeros(num_reqs, dtype=torch.int64)
            if num_nodes is None
            else torch.from_numpy(num_nodes).long(),
            last_token_row=input_batch.query_start_loc[1 : num_reqs + 1].long() - 1,
            row_token_ids=input_batch.input_ids[input_batch.logits_indices].long(),
        )
        prepare_trees(
            self.trees,
            tree=self.tree,
            positions=input_batch.positions,
            input_ids=input_batch.input_ids,
            attn_groups=self.attn_groups,
        )
        return block_tables, self.slot_mappings

    # After the forward: learn, walk, move. vLLM then updates its states and asks for drafts.

    def sample(
        self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any
    ) -> tuple[SamplerOutput, torch.Tensor, torch.Tensor]:
        """In the place of vLLM's: its sampler for every row, with a draft or without, and the walk.

        Raises:
            NotImplementedError: a request follows a grammar.

        """
        if grammar_output is not None:
            raise NotImplementedError(
                f"{TOKEN_RECYCLING} does not support structured output on Model Runner V2; set "
                "VLLM_USE_V2_MODEL_RUNNER=0"
            )
        logits = self.model.compute_logits(hidden_states[input_batch.logits_indices])
        proposer = self.drafter.proposer
        proposer.observe(input_batch.expanded_idx_mapping, self.trees.row_token_ids, logits)
        sampled, _ = self.sampler.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            input_batch.positions[input_batch.logits_indices],
            self.trees.row_token_ids,
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
        )
        result = proposer.operations.walk(
            sampled[self.trees.logit_rows], self.trees.drafts, tree=self.tree
        )
        compact_kv_cache(
            self.trees,
            result.path,
            attn_groups=self.attn_groups,
            slot_mappings=self.slot_mappings,
            layers=self.compilation_config.static_forward_context,
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (result.path >= 0).sum(dim=1, dtype=torch.int32),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        output = SamplerOutput(
            sampled_token_ids=result.token_ids,
            logprobs_tensors=self._logprobs(logits, input_batch, result),
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def _logprobs(
        self, logits: torch.Tensor, input_batch: Any, result: WalkResult
    ) -> LogprobsTensors | None:
        """Of the visited rows, where a request asked for them."""
        dims = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np, include_token_ids=False)
        if dims is None:
            return None
        visited = result.path >= 0
        rows = (self.trees.first_logit_row[:, None] + result.path)[visited]
        return compute_topk_scores(
            logits[rows],
            dims[0],
            result.token_ids[visited],
            [0, *visited.sum(dim=1).cumsum(0).tolist()],
        )
