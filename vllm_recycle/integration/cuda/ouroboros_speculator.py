"""What V2 asks for drafts by Ouroboros, in the place of the speculator of vLLM's `draft_model`.

The draft's layers share the block table with the target's, and their cache holds what the target's
holds, in the same slots, and nothing beyond it. Rows of the step that are no tree's are taken in
before a round, by a forward with the metadata that the target's own layers had.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.draft_model import DraftForward
from vllm_recycle.integration.cuda.draft_rounds import DraftGraphs, Round, RoundStart
from vllm_recycle.integration.cuda.drafter import OuroborosV2Drafter
from vllm_recycle.integration.row_budget import largest_drafting_batch


class OuroborosSpeculator(StandaloneARSpeculator):
    """vLLM's draft model with its loading and KV cache, in rounds of Ouroboros.

    Args:
        drafter: the proposer, whose rounds it runs.
        vllm_config: of the engine.
        device: where the draft model is.
        may_speculate: bool [max_num_reqs], on the host, by req_state_idx; kept by the runner.

    Attributes:
        draft_model: runs the model.
        max_drafting: requests of the largest forward.
        sampled_token_ids: int64 [num_reqs, n], what the step sampled, set by the runner.
        start: where a round begins; its tensors are those that graphs were captured with.
        drafts: int64 [batch, nodes], what rounds end with.
        graphs: of rounds, where there are any.

    """

    num_extra_query_per_req = 0
    sampled_token_ids: torch.Tensor
    draft_model: DraftForward
    start: RoundStart
    graphs: DraftGraphs | None = None

    def __init__(
        self,
        drafter: OuroborosV2Drafter,
        vllm_config: Any,
        device: torch.device,
        *,
        may_speculate: np.ndarray,
    ) -> None:
        super().__init__(vllm_config, device)
        self.drafter, self.may_speculate = drafter, may_speculate
        table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        self.max_drafting = largest_drafting_batch(table, self.max_num_reqs)
        self.drafts = torch.empty(
            self.max_drafting, self.num_speculative_steps, dtype=torch.int64, device=device
        )

    # The engine starts.

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.draft_model = DraftForward(self, self.drafter.proposer.shape)

    def set_attn(self, model_state: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """As for all.

        Raises:
            NotImplementedError: a draft model whose layers do not share one block table.

        """
        super().set_attn(model_state, kv_cache_config, *args, **kwargs)
        groups = kv_cache_config.kv_cache_groups
        holding = [i for i, names in enumerate(groups) if self._are_drafts(names.layer_names)]
        if len(holding) != 1:
            raise NotImplementedError(
                f"ouroboros: the draft model's layers are in {len(holding)} KV cache groups, "
                "expected one; use a draft model whose layers have the same kind of attention"
            )
        self.kv_cache_group = holding[0]
        num_blocks = self.block_tables.input_block_tables[holding[0]].shape[1]
        head = self.draft_model.head_length
        self.start = RoundStart.make(self.max_drafting, head, num_blocks, self.device)

    def _are_drafts(self, layer_names: list[str]) -> bool:
        return not self.draft_attn_layer_names.isdisjoint(layer_names)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.graphs = None
        if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            self.graphs = DraftGraphs(
                self.vllm_config,
                self.device,
                num_rows=self.draft_model.num_rows,
                max_drafting=self.max_drafting,
            )

    @torch.inference_mode()
    def capture(self) -> None:
        if self.graphs is not None:
            self.start.clear()  # of what steps that warmed up have left
            self.graphs.capture_rounds(self._run_round)

    # A step.

    @torch.inference_mode()
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
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Take in what the target has computed in the step, and draft behind it.

        Returns:
            int64 [num_reqs, nodes], -1 where there is no draft.

        """
        num_reqs = input_batch.num_reqs
        shape = (num_reqs, self.num_speculative_steps)
        drafts = torch.full(shape, NO_TOKEN, dtype=torch.int64, device=self.device)
        if dummy_run:
            # Its requests are none: they have the states of others, and no KV slots.
            if skip_attn_for_dummy_run:
                self._run_largest_forwards()
            return drafts
        num_nodes = input_batch.num_draft_tokens_per_req
        has_tree = np.zeros(num_reqs, dtype=bool) if num_nodes is None else num_nodes > 0
        # Warm-up steps ask for drafts in batches of any size.
        is_drafting = bool(num_speculative_tokens) and num_reqs <= self.max_drafting
        chosen = has_tree
        if is_drafting:
            computed = input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
            is_whole = computed >= input_batch.prefill_len_np
            chosen = has_tree | (is_whole & self.may_speculate[input_batch.idx_mapping_np])
        is_plain = ~has_tree & (~chosen | (input_batch.num_scheduled_tokens > 1))
        if is_plain.any():
            self._take_in_plain_rows(input_batch, attn_metadata, slot_mappings)
        if chosen.any():
            index = async_tensor_h2d(np.flatnonzero(chosen), device=self.device)
            start = self._start(input_batch, slot_mappings, index, num_sampled, last_sampled)
            if is_drafting:
                drafts[index] = self._drafts_of_round(start)
            else:
                Round(self.draft_model, start).take_in(start.last_token_ids[:, None])
        return drafts

    def _drafts_of_round(self, start: RoundStart) -> torch.Tensor:
        """int64 [batch, nodes]."""
        batch = len(start.idx_mapping)
        self.drafter.num_rounds += batch
        self.start.first(batch).copy_(start)
        if self.graphs is None or not self.graphs.replay(batch):
            self._run_round(batch)
        return self.drafts[:batch]

    def _run_round(self, batch: int) -> None:
        """From `start` to `drafts`; on the device alone, and the same whatever they hold."""
        start = self.start.first(batch)
        self.drafts[:batch] = self.drafter.proposer.propose(
            start.idx_mapping, start.last_token_ids, draft_model=Round(self.draft_model, start)
        )

    def _take_in_plain_rows(self, input_batch: Any, attn_metadata: Any, slot_mappings: Any) -> None:
        """The rows of requests without a tree, which come behind those with one."""
        names = self.draft_attn_layer_names
        steps = {name: getattr(attn_metadata[name], "tree_step", None) for name in names}
        metadata = {
            name: attn_metadata[name] if step is None else step.others
            for name, step in steps.items()
        }
        step = next(iter(steps.values()))
        rows = slice(0 if step is None else step.num_tree_tokens, input_batch.num_tokens)
        num_rows = rows.stop - rows.start
        self._run_model(
            # Compiled code wants them aligned.
            self.input_buffers.input_ids[:num_rows].copy_(input_batch.input_ids[rows]),
            self.input_buffers.positions[:num_rows].copy_(input_batch.positions[rows]),
            metadata,
            {name: slot_mappings[name][rows] for name in names},
            None,
        )

    def _start(
        self,
        input_batch: Any,
        slot_mappings: Any,
        index: torch.Tensor,
        num_sampled: torch.Tensor,
        last_sampled: torch.Tensor,
    ) -> RoundStart:
        """Heads of all that the target has computed since the root of each tree.

        Without a tree the last row of a request is a root. The newest token comes with the first
        forward.

        Args:
            input_batch: of the step.
            slot_mappings: of the step, by layer.
            index: int64 [batch], the requests' places in the step.
            num_sampled: int32 [num_reqs].
            last_sampled: int64 [max_num_reqs, 1].

        """
        roots = input_batch.logits_indices[input_batch.cu_num_logits[index]].long()
        head = self.draft_model.head_length
        place = torch.arange(head, device=self.device)
        num_head = num_sampled[index].long()
        sampled = self.sampled_token_ids[index].long()
        tokens = torch.cat((input_batch.input_ids[roots][:, None].long(), sampled), dim=1)
        # How far behind the root each row will be when the newest token is the last one.
        behind = place[:-1] - (head - 1 - num_head)[:, None]
        slot_mapping = slot_mappings[next(iter(self.draft_attn_layer_names))]
        slots = slot_mapping[roots[:, None] + behind.clamp(min=0)].where(behind >= 0, PAD_SLOT_ID)
        # And how far it is now.
        behind = place - (head - num_head)[:, None]
        idx_mapping = input_batch.idx_mapping[index]
        return RoundStart(
            idx_mapping=idx_mapping,
            last_token_ids=last_sampled[idx_mapping, 0],
            heads=tokens.gather(1, behind.clamp(min=0, max=tokens.shape[1] - 1)),
            num_head=num_head,
            num_cached=input_batch.positions[roots],
            block_table=self.block_tables.input_block_tables[self.kv_cache_group][index],
            slot_mapping=slots,
        )

    def _run_largest_forwards(self) -> None:
        """For vLLM to see what memory they take; they read and write no cache."""
        num_rows = self.max_drafting * self.draft_model.num_rows
        for count in (self.max_num_tokens, num_rows):
            ids, positions = self.input_buffers.input_ids, self.input_buffers.positions
            if count:
                hidden_states = self._run_model(ids[:count], positions[:count], None, None, None)
        if num_rows:
            self.draft_model.outputs(hidden_states, self.max_drafting)
