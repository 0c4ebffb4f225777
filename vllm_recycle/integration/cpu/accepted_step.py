"""What a walk leaves behind: the accepted rows of a step come to where those of a chain are.

vLLM's bookkeeping, its KV cache and its own proposers then see a chain that was accepted.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.kernels.cpu.cache_calls import move_slots


class AcceptedSteps(CPUModelRunner):
    """vLLM's CPU model runner, behind a walk.

    Attributes:
        tree_drafter: what drafts trees; `drafter` is vLLM's name for its proposer.
        step: the rows and trees that were computed.
        logits_indices: int64 [logit rows], the rows of the step that have logits.
        proposing: what vLLM's runner gives its proposer behind the step, while drafts are made.
        moved: rows of the step that were accepted, and where those of a chain would be, int64 [n]
            each; None where they are there.

    """

    tree_drafter: V1Drafter
    step: StepLayout
    logits_indices: torch.Tensor
    proposing: tuple[Any, ...]
    moved: tuple[torch.Tensor, torch.Tensor] | None

    def _compact_kv_cache(self, path: torch.Tensor) -> None:
        """Move the KV of the accepted path to the first slots of the step, in every layer.

        Args:
            path: int64 [batch, path], the accepted rows of each tree, padded with -1.

        """
        self.moved = None
        if self.step.trees.are_chains:
            return
        if not (moves := self.step.moves(path)):
            return
        source, target = torch.tensor(moves).unbind(1)
        self.moved = source, target
        tables = self.input_batch.block_table.block_tables
        for caches_of_group, table in zip(self.moved_caches, tables, strict=True):
            slots = table.slot_mapping.gpu
            read, write = slots[source].long(), slots[target].long()
            for caches, isa in caches_of_group:
                move_slots(caches, read, write, isa=isa)

    @cached_property
    def moved_caches(self) -> list[list[tuple[list[torch.Tensor], str]]]:
        """By KV cache group the caches that have the target's keys and values, and their layout."""
        layers = self.compilation_config.static_forward_context
        draft_layers = self.tree_drafter.attention_layers  # which did not see the trees

        def group_caches(group: Any) -> tuple[list[torch.Tensor], str]:
            target_layers = [layers[name] for name in group.layer_names if name not in draft_layers]
            # Layers may share a cache: move it once.
            caches = {layer.kv_cache.data_ptr(): layer.kv_cache for layer in target_layers}
            return [*caches.values()], target_layers[0].isa

        return [
            [group_caches(group) for group in groups if {*group.layer_names} - draft_layers]
            for groups in self.attn_groups
        ]

    def draft_chains(self, length: int) -> torch.Tensor:
        """What vLLM's proposer drafts behind the step, as if a chain had been verified.

        Args:
            length: tokens of each chain.

        Returns:
            Tokens by request of the batch, int64 [num_reqs, length]; of Medusa as many as it has
            heads.

        """
        sampled_token_ids, sampling, hidden, sample_hidden_states, aux, *rest = self.proposing[1:]
        if self.moved is not None:
            source, target = self.moved
            tensors = (self.input_ids.gpu, self.positions, hidden, *(aux or ()))
            for tensor in tensors:
                tensor[target] = tensor[source]
            if self.uses_mrope:
                self.mrope_positions.gpu[:, target] = self.mrope_positions.gpu[:, source]
            sample_hidden_states = hidden[self.logits_indices]
        scheduler_output = copy.copy(self.proposing[0])
        scheduler_output.num_spec_tokens_to_schedule = length
        args = (sampled_token_ids, sampling, hidden, sample_hidden_states, aux, *rest)
        return super().propose_draft_token_ids(scheduler_output, *args)
