"""Ouroboros on Model Runner V2: vLLM's draft model, drafting by lookahead forwards of one shape.

The draft's layers share the block table with the target's, and their cache holds what the target's
holds, in the same slots, and nothing beyond it: what is drafted in a round is computed again in
each of its forwards, as a chain in front of the lookahead rows. So nothing is written ahead of the
text, nothing is taken back, and a block that another request may read is the target's and the
draft's alike.

A forward has the same rows of each request: first those of its head, the tokens that the cache
lacks, which end where the lookahead rows begin. The mask is one for all; of a request it is only
told how many of the first rows are none. The first forward of a round writes what the target has
computed in the step, its head's tokens but the newest. Rows of the step that are no tree's are
taken in before it, by a forward with the metadata that the target's own layers had.

The number of forwards is fixed and all that differs between requests is in tensors, so nothing
waits for the device, and a whole round is one CUDA graph where the target has such graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_recycle.core.draft_shape import DraftShape
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.draft_rounds import DraftGraphs, Round
from vllm_recycle.integration.cuda.drafter import TemplateV2Drafter
from vllm_recycle.integration.ouroboros_drafter import OuroborosDrafter
from vllm_recycle.integration.row_budget import head_length, largest_drafting_batch
from vllm_recycle.kernels.triton.operations import OPERATIONS
from vllm_recycle.kernels.triton.paged_rows import PagedTreeRows
from vllm_recycle.kernels.triton.topology import ancestor_bits


def draft_forward_template(shape: DraftShape) -> TreeTemplate:
    """The rows of a request in a draft forward: a chain, and the lookahead rows below its end."""
    end = head_length(shape) - 1
    chain = [(row, 0) for row in range(end)]
    below = [(end + parent, rank) for parent, rank in shape.lookahead().nodes]
    return TreeTemplate((*chain, *below), "draft forward")


class OuroborosSpeculator(OuroborosDrafter, TemplateV2Drafter, StandaloneARSpeculator):
    """vLLM's draft model with its loading and KV cache; and Ouroboros, which drives it.

    Args:
        vllm_config: of the engine.
        device: where the draft model is.
        may_speculate: bool [max_num_reqs], on the host, by req_state_idx; kept by the runner.

    Attributes:
        template: the rows of a request in a forward.
        max_drafting: requests of the largest forward.
        sampled_token_ids: int64 [num_reqs, n], what the step sampled, set by the runner.
        start: where a round begins; its tensors are those that graphs were captured with.
        round: where the one that is run stands.
        drafts: int64 [batch, nodes], what rounds end with.
        graphs: of rounds, where there are any.

    """

    num_extra_query_per_req = 0
    sampled_token_ids: torch.Tensor
    start: Round
    round: Round
    graphs: DraftGraphs | None = None

    def __init__(
        self, vllm_config: Any, device: torch.device, *, may_speculate: np.ndarray
    ) -> None:
        StandaloneARSpeculator.__init__(self, vllm_config, device)
        self.may_speculate = may_speculate
        self.make_proposer(OPERATIONS, device, stops_early=False)
        shape = self.proposer.shape
        template = draft_forward_template(shape)
        self.ancestor_bits = ancestor_bits(template.ancestor_mask).to(device)
        self.template, self.head_length = template.to(device), head_length(shape)
        table = vllm_config.speculative_config.num_speculative_tokens_per_batch_size
        self.max_drafting = largest_drafting_batch(table, self.max_num_reqs)
        self.drafts = torch.empty(
            self.max_drafting, self.num_speculative_steps, dtype=torch.int64, device=device
        )
        self.num_rounds = 0

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
        self.start = Round.make(self.max_drafting, self.head_length, num_blocks, self.device)

    def _are_drafts(self, layer_names: list[str]) -> bool:
        return not self.draft_attn_layer_names.isdisjoint(layer_names)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.graphs = None
        if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            self.graphs = DraftGraphs(
                self.vllm_config,
                self.device,
                num_rows=len(self.template.depths),
                max_drafting=self.max_drafting,
            )

    @torch.inference_mode()
    def capture(self) -> None:
        if self.graphs is not None:
            self.start.clear()  # of what steps that warmed up have left
            self.graphs.capture_rounds(self._run_round)
            self.__dict__.pop("round", None)  # it is in the graphs' memory

    def statistics(self) -> dict[str, int]:
        # A round that is replayed counts nothing.
        return {
            "rounds": self.num_rounds,
            "forwards": self.num_rounds * self.proposer.max_forwards,
        }

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
                self.round = start
                self._take_in(start.last_token_ids[:, None])
        return drafts

    def _drafts_of_round(self, start: Round) -> torch.Tensor:
        """int64 [batch, nodes]."""
        batch = len(start.idx_mapping)
        self.num_rounds += batch
        self.start.first(batch).copy_(start)
        if self.graphs is None or not self.graphs.replay(batch):
            self._run_round(batch)
        return self.drafts[:batch]

    def _run_round(self, batch: int) -> None:
        """From `start` to `drafts`; on the device alone, and the same whatever they hold."""
        self.round = self.start.first(batch)
        self.drafts[:batch] = self.proposer.propose(
            self.round.idx_mapping, self.round.last_token_ids
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
    ) -> Round:
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
        place = torch.arange(self.head_length, device=self.device)
        num_head = num_sampled[index].long()
        sampled = self.sampled_token_ids[index].long()
        tokens = torch.cat((input_batch.input_ids[roots][:, None].long(), sampled), dim=1)
        # How far behind the root each row will be when the newest token is the last one.
        behind = place[:-1] - (self.head_length - 1 - num_head)[:, None]
        slot_mapping = slot_mappings[next(iter(self.draft_attn_layer_names))]
        slots = slot_mapping[roots[:, None] + behind.clamp(min=0)].where(behind >= 0, PAD_SLOT_ID)
        # And how far it is now.
        behind = place - (self.head_length - num_head)[:, None]
        idx_mapping = input_batch.idx_mapping[index]
        return Round(
            idx_mapping=idx_mapping,
            last_token_ids=last_sampled[idx_mapping, 0],
            heads=tokens.gather(1, behind.clamp(min=0, max=tokens.shape[1] - 1)),
            num_head=num_head,
            num_cached=input_batch.positions[roots],
            block_table=self.block_tables.input_block_tables[self.kv_cache_group][index],
            slot_mapping=slots,
        )

    # A forward.

    def forward(
        self, idx_mapping: torch.Tensor, new_token_ids: torch.Tensor, row_token_ids: torch.Tensor
    ) -> torch.Tensor:
        """See `vllm_recycle.core.ouroboros.DraftModel`."""
        return self._outputs(self._take_in(new_token_ids, row_token_ids), len(idx_mapping))

    def _take_in(
        self, new_token_ids: torch.Tensor, row_token_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """A forward with these tokens behind the heads, and lookahead rows or none.

        Args:
            new_token_ids: int64 [batch, n], padded with -1.
            row_token_ids: int64 [batch, nodes], by the nodes of `lookahead`.

        Returns:
            The hidden states, floating [batch * rows, hidden].

        """
        now = self.round
        place = torch.arange(self.head_length, device=self.device)
        num_new = (new_token_ids >= 0).sum(dim=1)
        longer = torch.cat((now.heads, new_token_ids), dim=1)
        now.heads = longer.gather(1, place + num_new[:, None])
        now.num_head = now.num_head + num_new
        token_ids = now.heads
        if row_token_ids is not None:
            token_ids = torch.cat((token_ids, row_token_ids), dim=1)
        batch, num_rows = token_ids.shape
        num_padding = self.head_length - now.num_head
        positions = (now.num_cached - num_padding)[:, None] + self.template.depths[:num_rows]
        rows = PagedTreeRows(
            ancestor_bits=self.ancestor_bits,
            query_start_loc=self.arange_gpu[: batch + 1] * num_rows,
            seq_lens=(now.num_cached + num_rows).to(torch.int32),
            block_table=now.block_table,
            max_rows=num_rows,
            num_padding=num_padding.to(torch.int32),
        )
        slot_mappings = {}
        if now.slot_mapping is not None:
            missing = num_rows - now.slot_mapping.shape[1]
            slots = pad(now.slot_mapping, (0, missing), value=PAD_SLOT_ID)
            slot_mappings = dict.fromkeys(self.draft_attn_layer_names, slots.flatten())
        hidden_states = self._run_model(
            token_ids.clamp(min=0).flatten().to(torch.int32),
            # Padding, and rows beyond what the model can see, are computed for nothing.
            positions.clamp(min=0, max=self.max_model_len - 1).flatten(),
            dict.fromkeys(self.draft_attn_layer_names, rows),
            slot_mappings,
            None,
        )
        if now.slot_mapping is not None:
            now.num_cached = now.num_cached + now.num_head - 1
            now.num_head, now.slot_mapping = torch.ones_like(now.num_head), None
        return hidden_states

    def _outputs(self, hidden_states: torch.Tensor, batch: int) -> torch.Tensor:
        """int64 [batch, nodes + 1], the most probable next token behind head and lookahead rows."""
        rows = hidden_states.view(batch, -1, hidden_states.shape[1])[:, self.head_length - 1 :]
        logits = self.model.compute_logits(rows.flatten(0, 1))
        return logits.max(dim=1).indices.view(batch, -1)

    def _run_largest_forwards(self) -> None:
        """For vLLM to see what memory they take; they read and write no cache."""
        num_rows = self.max_drafting * len(self.template.depths)
        for count in (self.max_num_tokens, num_rows):
            ids, positions = self.input_buffers.input_ids, self.input_buffers.positions
            if count:
                hidden_states = self._run_model(ids[:count], positions[:count], None, None, None)
        if num_rows:
            self._outputs(hidden_states, self.max_drafting)
