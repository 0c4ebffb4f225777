"""What V2 asks for drafts by Token Recycling, in the place of `ngram_gpu`'s speculator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_recycle.core.size_chooser import LOOK_EVERY, StepSeconds
from vllm_recycle.integration.cuda.drafter import TreeV2Drafter, has_text
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingV2Drafter
from vllm_recycle.integration.draft_sizes import DraftReport


class TreeSpeculator(BaseSpeculator):
    """Drafts for all requests of a step, or for none."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, drafter: TreeV2Drafter | TokenRecyclingV2Drafter) -> None:
        self.drafter = drafter

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def take_report(self) -> DraftReport | None:
        """What the scheduler is to know and was not told yet."""
        return None

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
        **kwargs: Any,
    ) -> torch.Tensor:
        """int64 [batch, nodes], -1 where there is no draft.

        A request in the middle of its prompt gets drafts too, which are never scheduled.
        """
        if num_speculative_tokens == 0 and not self._looks(input_batch):
            shape = (input_batch.num_reqs, self.drafter.tree.num_nodes)
            return last_sampled.new_empty(shape)  # vLLM puts -1 behind the size
        drafts = self.drafter.propose(input_batch.idx_mapping, last_sampled)
        self._see(input_batch, num_speculative_tokens)
        return drafts

    def _looks(self, input_batch: Any) -> bool:
        """Whether trees are grown that nobody verifies."""
        return False

    def _see(self, input_batch: Any, num_speculative_tokens: int | None) -> None:
        """Trees were grown."""


class SizedSpeculator(TreeSpeculator):
    """Reports what the trees are worth, for the scheduler to choose their size.

    Args:
        drafter: that grows them.
        may_speculate: bool [max_num_reqs], on the host, by req_state_idx; kept by the runner.

    Attributes:
        plain_steps: how many steps have had no drafts, since the last one that had.
        report: of the trees that were grown last, on its way to the host.
        times: of steps, to be reported once.

    """

    drafter: TokenRecyclingV2Drafter
    plain_steps = 0
    report: DraftReport | None = None
    times: StepSeconds | None = None

    def __init__(self, drafter: TokenRecyclingV2Drafter, may_speculate: np.ndarray) -> None:
        super().__init__(drafter)
        self.may_speculate = may_speculate

    def take_report(self) -> DraftReport | None:
        report, self.report = self.report, None
        return report

    def drafting_runs(self) -> dict[int, Callable[[], Any]]:
        """What drafts, by how many requests that is for at most, to be timed."""
        idx_mapping = torch.zeros(1, dtype=torch.int64, device=self.drafter.tree.parents.device)
        last_sampled = self.drafter.req_states.last_sampled_tokens
        # Trees of more requests grow at the same time.
        return {len(self.may_speculate): partial(self.drafter.propose, idx_mapping, last_sampled)}

    def _looks(self, input_batch: Any) -> bool:
        if not self._counted(input_batch).any():
            return False
        self.plain_steps += 1
        return self.plain_steps % LOOK_EVERY == 1

    def _see(self, input_batch: Any, num_speculative_tokens: int | None) -> None:
        if num_speculative_tokens:
            self.plain_steps = 0
        worth, counted = self.drafter.worth, self._counted(input_batch)
        if not counted.all():
            indices = async_tensor_h2d(np.flatnonzero(counted), device=worth.device)
            worth = worth[indices]
        # On the stream of the step, so that it is there with the tokens of the next one.
        times, self.times = self.times, None
        self.report = DraftReport(async_copy_to_np(worth.sum(0)), int(counted.sum()), times)

    def _counted(self, input_batch: Any) -> np.ndarray:
        """bool [num_reqs], whose trees may be verified in the next step."""
        return has_text(input_batch) & self.may_speculate[input_batch.idx_mapping_np]
