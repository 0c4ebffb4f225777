"""Token Recycling along the trunk of a draft model, on Model Runner V2.

A round has a forward for each token of a trunk: which of them could be saved only the device knows.
Where a round has no room for a request, or none for so many, its tree grows without a trunk; so do
all of a step for which the scheduler says that a round does not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_recycle.core.curve import TRUNKS
from vllm_recycle.core.grow import Trunks
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN
from vllm_recycle.integration.cuda.drafter import V2Speculator
from vllm_recycle.integration.cuda.ouroboros.forward import DraftForward
from vllm_recycle.integration.cuda.ouroboros.round_speculator import RoundSpeculator
from vllm_recycle.integration.cuda.ouroboros.rounds import LARGEST_BATCH, Round
from vllm_recycle.integration.cuda.token_recycling import (
    TokenRecyclingSpeculator,
    TokenRecyclingV2Drafter,
)
from vllm_recycle.integration.draft_limits import MAX_DRAFT_ROWS_ON_GPU
from vllm_recycle.integration.options import TrunkOptions
from vllm_recycle.integration.options.trunk import head_length
from vllm_recycle.integration.ouroboros import describe_draft_model
from vllm_recycle.integration.step_note import note_of


class TrunkV2Drafter(TokenRecyclingV2Drafter):
    """Grows trees along what vLLM's draft model drafts.

    Attributes:
        choices: what the choices of the draft model are worth.
        trunks: of each request the last one, by `req_state_idx`.
        probabilities: float32 [max_num_reqs, gamma, CHOICES], that the model gave its choices.
        lengths: int64 [max_num_reqs], of the text that each was drafted behind.

    """

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config, device, req_states)
        options, max_num_reqs = self.options, vllm_config.scheduler_config.max_num_seqs
        assert isinstance(options, TrunkOptions)
        # A longer trunk has no place in a tree, nor in a draft forward.
        self.gamma = min(options.gamma, self.trees.depth)
        self.choices = ChoiceAcceptance(device)
        shape = max_num_reqs, self.gamma, CHOICES
        self.probabilities = torch.zeros(shape, device=device)
        token_ids = torch.full(shape, NO_TOKEN, device=device)
        self.trunks: Trunks = Trunks(token_ids, torch.zeros_like(self.probabilities))
        self.lengths = torch.zeros(max_num_reqs, dtype=torch.int64, device=device)
        self.places = torch.arange(self.gamma, device=device)

    def make_speculator(self, may_speculate: np.ndarray) -> V2Speculator:
        return TrunkSpeculator(self, may_speculate)

    def reset(self) -> None:
        super().reset()
        self.choices.clear()

    def begin(
        self,
        req_state_indices: Sequence[int],
        texts: Sequence[Sequence[int]],
        classes: Sequence[int],
    ) -> None:
        super().begin(req_state_indices, texts, classes)
        begun = async_tensor_h2d([*req_state_indices], device=self.device)
        self.trunks.token_ids[begun] = NO_TOKEN

    def draft_trunks(self, idx_mapping: torch.Tensor, last: torch.Tensor, model: Round) -> None:
        """Draft behind some texts, and count what followed the trunks before.

        Args:
            idx_mapping: int64 [batch].
            last: int64 [batch], the last token of each text.
            model: the draft model.

        """
        if not self.options.isolates:  # else nobody's counts reach another
            self._count(idx_mapping)
        self.lengths[idx_mapping] = self.texts.lengths[idx_mapping].long()
        newest, none = last[:, None], last[:, None][:, :0]
        steps = []
        for _ in range(self.gamma):
            steps.append(model.choose(idx_mapping, newest, none, CHOICES))
            newest = steps[-1][0][:, 0, :1]
        drafted = Trunks(*(torch.cat(values, dim=1) for values in zip(*steps, strict=True)))
        self.trunks.token_ids[idx_mapping] = drafted.token_ids
        self.probabilities[idx_mapping] = drafted.chances
        self.trunks.chances[idx_mapping] = self.choices.chances(drafted).chances

    def _count(self, idx_mapping: torch.Tensor) -> None:
        texts, lengths = self.texts
        place = self.lengths[idx_mapping][:, None] + self.places
        is_text = place < lengths[idx_mapping][:, None]
        follows = texts[idx_mapping[:, None], place.clamp(max=texts.shape[1] - 1)].long()
        before = (self.trunks.token_ids[idx_mapping], self.probabilities[idx_mapping])
        self.choices.count(Trunks(*before), follows.where(is_text, NO_TOKEN))

    def describe(self) -> str:
        return f"{describe_draft_model(self.vllm_config, self.gamma)}; {super().describe()}"

    def statistics(self) -> dict[str, float]:
        counted = {"rounds": self.num_rounds, "forwards": self.num_rounds * self.gamma}
        return super().statistics() | counted


class TrunkSpeculator(RoundSpeculator, TokenRecyclingSpeculator):
    """Runs rounds for those that it can, and then grows the trees of all.

    Args:
        drafter: what drafts.
        may_speculate: bool [max_num_reqs], on the host, by `req_state_idx`.

    Attributes:
        is_settled: whether all have a trunk in this step for whom there is room, or nobody is to.

    """

    drafter: TrunkV2Drafter
    kind = TRUNKS
    is_settled = True

    def __init__(self, drafter: TrunkV2Drafter, may_speculate: np.ndarray) -> None:
        scheduler, options = drafter.vllm_config.scheduler_config, drafter.options
        assert isinstance(options, TrunkOptions)
        length = head_length(options)
        rows = min(MAX_DRAFT_ROWS_ON_GPU, scheduler.max_num_batched_tokens)
        most = min(scheduler.max_num_seqs, rows // length, LARGEST_BATCH)
        RoundSpeculator.__init__(
            self, drafter, may_speculate, head_length=length, max_drafting=most
        )
        TokenRecyclingSpeculator.__init__(self, drafter, may_speculate)

    def make_forward(self) -> DraftForward:
        return DraftForward(self, self.head_length)

    def run_round(self, batch: int) -> None:
        start = self.start.first(batch)
        model = Round(self.forward, start)
        self.drafter.draft_trunks(start.idx_mapping, start.last_token_ids, model)

    def update_requests(self, scheduler_output: Any) -> None:
        super().update_requests(scheduler_output)
        self.kind = note_of(scheduler_output).kind

    def alone_runs(self) -> dict[int, Callable[[], Any]]:
        self.drafter.trunks.token_ids[0] = NO_TOKEN
        return TokenRecyclingSpeculator.drafting_runs(self)

    def drafting_runs(self) -> dict[int, Callable[[], Any]]:
        [(most, grow)] = self.alone_runs().items()

        def both(round_: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: (round_(), grow())

        runs = {batch: both(run) for batch, run in RoundSpeculator.drafting_runs(self).items()}
        # Of more requests as many have a trunk.
        return runs | {most: runs[max(runs)]}

    def prepare(self, input_batch: Any, *, drafts: bool, **kwargs: Any) -> None:
        chosen = self.ready(input_batch, drafts=drafts and self.kind == TRUNKS, **kwargs)
        if not drafts or kwargs.get("dummy_run"):
            return
        num_reqs, idx_mapping = input_batch.num_reqs, input_batch.idx_mapping
        may_draft = self._counted(input_batch).sum()
        self.is_settled = self.kind != TRUNKS or len(chosen) == min(may_draft, self.max_drafting)
        if not len(chosen):
            self.drafter.trunks.token_ids[idx_mapping] = NO_TOKEN
            return
        if len(chosen) < num_reqs:
            left_out = np.delete(np.arange(num_reqs), chosen)
            both = async_tensor_h2d(np.concatenate((chosen, left_out)), device=self.device)
            self.drafter.trunks.token_ids[idx_mapping[both[len(chosen) :]]] = NO_TOKEN
            idx_mapping = idx_mapping[both[: len(chosen)]]
        self.draft(idx_mapping)

    def _report(self, *args: Any) -> None:
        """Of trees some of which had to do without a trunk nothing is said."""
        if self.is_settled:
            super()._report(*args)
