"""Token Recycling along the trunk of a draft model, on Model Runner V2.

A round has a forward for each token of a trunk: which of them could be saved only the device knows.
Where a round has no room for a request, or none for so many, its tree grows without a trunk; so do
all of a step for which the scheduler says that a round does not pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.core.curve import TRUNKS
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.trunk import CHOICES
from vllm_recycle.integration.cuda.along_trunks import AlongTrunks
from vllm_recycle.integration.cuda.drafter import V2Speculator
from vllm_recycle.integration.cuda.ouroboros.round_speculator import RoundSpeculator
from vllm_recycle.integration.cuda.ouroboros.rounds import LARGEST_BATCH, Round
from vllm_recycle.integration.cuda.token_recycling import TokenRecyclingSpeculator
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.limits import MAX_DRAFT_ROWS_ON_GPU
from vllm_recycle.integration.ouroboros import describe_draft_model
from vllm_recycle.integration.step_note import note_of


class TrunkV2Drafter(AlongTrunks):
    """Grows trees along what vLLM's draft model drafts."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        options = settings_of(vllm_config).options
        super().__init__(vllm_config, device, req_states, length=options.trunk_length)

    def make_speculator(self, may_speculate: np.ndarray) -> V2Speculator:
        return TrunkSpeculator(self, may_speculate)

    def draft_trunks(
        self, idx_mapping: torch.Tensor, last_token_ids: torch.Tensor, model: Round
    ) -> None:
        """Draft behind some texts, and count what followed the trunks before.

        Args:
            idx_mapping, last_token_ids: int64 [batch], of the texts.
            model: the draft model.

        """
        self.count_trunks(idx_mapping)
        new_token_ids, row_token_ids = last_token_ids[:, None], last_token_ids[:, None][:, :0]
        steps = []
        for _ in range(self.length):
            steps.append(model.choose(idx_mapping, new_token_ids, row_token_ids, CHOICES))
            new_token_ids = steps[-1][0][:, 0, :1]
        trunks = Trunks(*(torch.cat(values, dim=1) for values in zip(*steps, strict=True)))
        self.take_trunks(idx_mapping, trunks)

    def describe(self) -> str:
        return f"{describe_draft_model(self.vllm_config, self.length)}; {super().describe()}"

    @property
    def num_forwards(self) -> int:
        return self.num_rounds * self.length


class TrunkSpeculator(RoundSpeculator, TokenRecyclingSpeculator):
    """Runs rounds for those that it can, and then grows the trees of all.

    Args:
        drafter: what drafts.
        may_speculate: bool [max_num_reqs], on the host, by `req_state_idx`.

    Attributes:
        is_settled: whether all have a trunk in this step for whom there is room, or nobody is to.

    """

    tree_drafter: TrunkV2Drafter
    kind = TRUNKS
    is_settled = True

    def __init__(self, drafter: TrunkV2Drafter, may_speculate: np.ndarray) -> None:
        scheduler, length = drafter.vllm_config.scheduler_config, drafter.options.head_length
        rows = min(MAX_DRAFT_ROWS_ON_GPU, scheduler.max_num_batched_tokens)
        max_drafting = min(scheduler.max_num_seqs, rows // length, LARGEST_BATCH)
        RoundSpeculator.__init__(
            self, drafter, may_speculate, head_length=length, max_drafting=max_drafting
        )
        TokenRecyclingSpeculator.__init__(self, drafter, may_speculate)

    def run_round(self, batch: int) -> None:
        start = self.start.first(batch)
        model = Round(self.forward, start)
        self.tree_drafter.draft_trunks(start.idx_mapping, start.last_token_ids, model)

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        self.kind = note_of(scheduler_output).kind

    def alone_runs(self) -> dict[int, Callable[[], Any]]:
        self.tree_drafter.leave_out(self.tree_drafter.roots[0])
        return TokenRecyclingSpeculator.drafting_runs(self)

    def drafting_runs(self) -> dict[int, Callable[[], Any]]:
        [(max_num_reqs, grow)] = self.alone_runs().items()

        def add_trees(round_: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: (round_(), grow())

        runs = {batch: add_trees(run) for batch, run in RoundSpeculator.drafting_runs(self).items()}
        # Of more requests as many have a trunk.
        return runs | {max_num_reqs: runs[max(runs)]}

    def prepare(self, input_batch: Any, *args: Any, drafts: bool, **kwargs: Any) -> None:
        indices = self.ready(input_batch, drafts=drafts and self.kind == TRUNKS, **kwargs)
        if not drafts or kwargs.get("dummy_run"):
            return
        num_reqs, idx_mapping = input_batch.num_reqs, input_batch.idx_mapping
        may_draft = self._counted(input_batch).sum()
        self.is_settled = self.kind != TRUNKS or len(indices) == min(may_draft, self.max_drafting)
        if not len(indices):
            self.tree_drafter.leave_out(idx_mapping)
            return
        if len(indices) < num_reqs:
            other_indices = np.delete(np.arange(num_reqs), indices)
            order = async_tensor_h2d(np.concatenate((indices, other_indices)), device=self.device)
            self.tree_drafter.leave_out(idx_mapping[order[len(indices) :]])
            idx_mapping = idx_mapping[order[: len(indices)]]
        self.draft(idx_mapping)

    def _report(self, *args: Any) -> None:
        """Of trees some of which had to do without a trunk nothing is said."""
        if self.is_settled:
            super()._report(*args)
