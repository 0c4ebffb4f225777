"""Token Recycling along trunks, whatever drafts these, on the V1 runner."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.adjacency import NUM_COUNTED, Ends
from vllm_recycle.core.curve import TRUNKS, Load
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.explore import Arm, Mean
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN, WalkResult
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import ROUNDS
from vllm_recycle.integration.cpu.token_recycling import TokenRecyclingV1Drafter, load_of


class AlongTrunks(TokenRecyclingV1Drafter):
    """Grows trees along trunks, which a subclass drafts.

    Args:
        vllm_config, device, runner: as vLLM gives them.
        length: the most tokens of a trunk.

    Attributes:
        choices: what the choices of a trunk are worth.
        trunks: of each request the last one, by `req_state_idx`, with probabilities for chances.
        mean_promise: tokens that are expected of a trunk to be right.
        is_model: whether a model drafts them, whose rounds take time.

    """

    choices: ChoiceAcceptance
    is_model = True

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, *, length: int) -> None:
        super().__init__(vllm_config, device, runner)
        self.choices = ChoiceAcceptance(self.state.matrix.classes)
        shape = vllm_config.scheduler_config.max_num_seqs, length, CHOICES
        self.mean_promise = Mean()
        self.trunks = Trunks(torch.full(shape, NO_TOKEN), torch.zeros(shape, dtype=torch.float64))

    @abstractmethod
    def draft_trunks(self, texts: TextEnds, block_tables: Any, rate: float) -> Trunks | None:
        """Draft a trunk below each text of a step, no longer than its `max_depths`.

        Args:
            texts: of the step.
            block_tables: vLLM's, of all KV cache groups.
            rate: expected tokens a second of the step; 0 for a whole trunk at any price.

        Returns:
            Trunks with probabilities in the place of chances; None where there are none.

        """

    def trunk_depths(self, texts: TextEnds, block_tables: Any) -> np.ndarray:
        """int64 [batch], the most tokens of a trunk below each text; 0 where there may be none."""
        return np.array(texts.max_depths)

    def answer_left(self, texts: TextEnds) -> np.ndarray:
        """float64 [batch], tokens that are expected behind each text."""
        return np.array(texts.max_depths, dtype=np.float64)

    def reading_seconds(self, texts: TextEnds) -> np.ndarray:
        """float64 [batch], in which the draft model reads what it lacks of each text."""
        return np.zeros(len(texts.idx_mapping))

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        super().add_requests(requests)
        self.trunks.token_ids[[request.req_state_idx for request in requests]] = NO_TOKEN

    def accept(
        self, idx_mapping: torch.Tensor, step: StepLayout, walked: WalkResult, ends: Ends
    ) -> None:
        super().accept(idx_mapping, step, walked, ends)
        if not self.isolates:  # else nobody's counts reach another
            drafted = Trunks(*(values[idx_mapping] for values in self.trunks))
            self.choices.count(drafted, idx_mapping, walked.token_ids)
        self.trunks.token_ids[idx_mapping] = NO_TOKEN

    def draft_step(
        self, texts: TextEnds, num_nodes: int, block_tables: Any, arm: Arm | None
    ) -> tuple[Drafts, bool]:
        depths, load = self.trunk_depths(texts, block_tables), load_of(texts)
        if texts.trunks is not None:  # copies, along which no model need draft
            depths *= texts.trunks.promises.numpy() < (self.mean_promise.value or np.inf)
        if self.chooser is None or not self.is_model:
            depths *= arm is None  # a look is at what steps take
            drafted_texts = self._along_trunks(texts, depths, block_tables, 0.0)
            return self.grow(drafted_texts, num_nodes, arm), False
        is_look = arm is not None and arm[0] == TRUNKS
        if load is None or not (arm is None or is_look):  # a look at another kind
            self._along_trunks(texts, 0 * depths, block_tables, 0.0)
            return self.grow(texts, num_nodes, arm), False
        drafts, reading = self.grow(texts, num_nodes, None), self.reading_seconds(texts)
        trunk_rate = self.chooser.trunk_rate(load, drafts.rate)
        num_left = np.where(depths, self.answer_left(texts), 0)
        chosen = self.chooser.choose_trunks(
            load, drafts.rate, num_left=num_left, reading=reading, is_look=is_look
        )
        rate = max(drafts.rate, trunk_rate)
        drafted_texts = self._along_trunks(texts, depths * chosen, block_tables, rate)
        if not chosen.any():
            return drafts, False
        trunk_drafts = self.grow(drafted_texts, num_nodes, None, along_trunks=True)
        self.chooser.record_trunks(load, drafts.rate, trunk_drafts.rate)
        return trunk_drafts, bool(reading[chosen].any())

    def _along_trunks(
        self, texts: TextEnds, depths: np.ndarray, block_tables: Any, rate: float
    ) -> TextEnds:
        """The texts, with the trunks that are drafted for them."""
        self.num_rounds += int((depths > 0).sum())
        drafted_texts = replace(texts, max_depths=depths.tolist())
        trunks = self.draft_trunks(drafted_texts, block_tables, rate)
        if trunks is None:
            return texts
        for tensor, values in zip(self.trunks, trunks, strict=True):
            tensor[texts.idx_mapping] = values
        trunks = self.choices.chances(trunks, texts.idx_mapping)
        if texts.trunks is None:
            return replace(texts, trunks=trunks)
        if not self.isolates:
            is_counted = self.state.matrix.classes[texts.idx_mapping] < NUM_COUNTED
            is_counted &= torch.from_numpy(depths > 0)
            for promise in trunks.promises[is_counted].nan_to_num(0.0).tolist():
                self.mean_promise = self.mean_promise.with_sample(promise)
        return replace(texts, trunks=texts.trunks.surer(trunks))

    def add_rounds(self, seconds: Callable[[int], float]) -> str:
        """Add to the curve what a round takes by its requests, and describe it."""
        self.curve.add_trunks(seconds)
        batches = sorted({load.requests for load in self.curve.loads})
        costs = (f"{seconds(n) / self.curve.plain(Load(n)):.2f} for {n}" for n in batches)
        return ", ".join(costs) + " requests"


def shortest(run: Callable[[], object]) -> float:
    """The shortest of a few times of a run, in seconds."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
