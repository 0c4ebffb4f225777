"""What Model Runner V2 asks a drafter for: what its trees are, and to learn from a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.core import TemplateProposer, TreeTemplate
from vllm_recycle.core.ouroboros import OuroborosProposer
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.draft_limits import drafting_shapes
from vllm_recycle.integration.drafter import Drafter, TreeDrafter
from vllm_recycle.integration.options import OuroborosOptions, options_of
from vllm_recycle.integration.ouroboros import describe, make_proposer
from vllm_recycle.kernels.triton.operations import OPERATIONS
from vllm_recycle.kernels.triton.trees import DeviceTrees

# Tokens of prompts that are taken in at once, but for one that is longer.
MOST_TOKENS = 1 << 16


class V2Drafter(Drafter):
    """What the V2 runner asks for besides; nothing of it waits for the device."""

    @property
    @abstractmethod
    def tree(self) -> TreeTemplate | DeviceTrees:
        """What the nodes of drafts are: of all requests, or of each."""

    @abstractmethod
    def begin(
        self, all_token_ids: torch.Tensor, req_state_indices: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Some requests start.

        Args:
            all_token_ids: int32 [max_num_reqs, max_model_len].
            req_state_indices: of the requests.
            lengths: of their texts.

        """

    @abstractmethod
    def observe(self, input_batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Take in a step, before its tokens are sampled.

        Args:
            input_batch: of the step.
            row_token_ids: int64 [logit rows], -1 where a row was not filled.
            logits: [logit rows, vocab], raw.

        """

    def accept(
        self,
        input_batch: Any,
        row_token_ids: torch.Tensor,
        output: Any,
        path: torch.Tensor | None,
    ) -> None:
        """Take in what was accepted of the step that was observed.

        Args:
            input_batch: of the step.
            row_token_ids: int64 [logit rows], -1 where a row was not filled.
            output: what was sampled, vLLM's `SamplerOutput`.
            path: int64 [num_reqs, path], the visited rows; None where no request had a tree.

        """


class TemplateV2Drafter(V2Drafter):
    """Where one tree serves all requests."""

    @property
    def _proposer(self) -> TemplateProposer | OuroborosProposer:
        return cast("TemplateProposer | OuroborosProposer", self.proposer)

    @property
    def tree(self) -> TreeTemplate:
        return self._proposer.tree

    def begin(
        self, all_token_ids: torch.Tensor, req_state_indices: Sequence[int], lengths: Sequence[int]
    ) -> None:
        for chosen in groups_of(lengths, MOST_TOKENS):
            indices = [req_state_indices[i] for i in chosen]
            counts = [lengths[i] for i in chosen]
            texts = [all_token_ids[i, :count] for i, count in zip(indices, counts, strict=True)]
            owners = async_tensor_h2d(np.repeat(indices, counts), device=all_token_ids.device)
            self._proposer.begin(owners, torch.cat(texts).to(torch.int64))

    def observe(self, input_batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        self._proposer.observe(
            input_batch.expanded_idx_mapping, row_token_ids, logits, input_batch.cu_num_logits
        )


class TreeV2Drafter(TreeDrafter, TemplateV2Drafter):
    """Token Recycling with a template."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, operations=OPERATIONS, device=device)

    def observe(self, input_batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        reached = has_text(input_batch)
        if not reached.all():
            # What follows in the middle of a prompt is known, and not what the target would say.
            is_within = np.repeat(~reached, np.diff(input_batch.cu_num_logits_np))
            is_within = async_tensor_h2d(is_within, device=row_token_ids.device)
            row_token_ids = row_token_ids.masked_fill(is_within, NO_TOKEN)
        super().observe(input_batch, row_token_ids, logits)

    def propose(self, idx_mapping: torch.Tensor, last_sampled: torch.Tensor) -> torch.Tensor:
        """int64 [batch, nodes], -1 where there is no draft."""
        return self.proposer.propose(idx_mapping, last_sampled[idx_mapping, 0])


class OuroborosV2Drafter(TemplateV2Drafter):
    """Ouroboros; what runs its rounds is the speculator.

    Attributes:
        shapes: of the drafts of rounds of 1, 2, ... requests.
        num_rounds: counted once for each request; a round that is replayed counts nothing itself.

    """

    num_rounds = 0

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.vllm_config = vllm_config
        scheduler, options = vllm_config.scheduler_config, options_of(vllm_config)
        assert isinstance(options, OuroborosOptions)
        self.shapes = drafting_shapes(
            options.shape(),
            vllm_config.speculative_config.num_speculative_tokens_per_batch_size,
            max_num_reqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )
        self.proposer: OuroborosProposer = make_proposer(
            vllm_config, OPERATIONS, device, stops_early=False, smaller_shapes=self.shapes
        )
        self.state = self.proposer.pool

    def describe(self) -> str:
        return describe(self.proposer, self.vllm_config)

    def statistics(self) -> dict[str, float]:
        forwards = self.num_rounds * self.proposer.max_forwards
        return super().statistics() | {"rounds": self.num_rounds, "forwards": forwards}


def has_text(input_batch: Any) -> np.ndarray:
    """bool [num_reqs], which requests have all of their prompt behind them."""
    ends = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
    return ends >= input_batch.prefill_len_np


def groups_of(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices of some texts in order, in groups of at most so many tokens, or of one text."""
    group: list[int] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if group and tokens + length > most:
            yield group
            group, tokens = [], 0
        group.append(index)
        tokens += length
    if group:
        yield group
