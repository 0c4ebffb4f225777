"""Token Recycling along the trunk of a draft model, on the V1 runner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.choose import Price
from vllm_recycle.core.curve import CHAINS, Load
from vllm_recycle.core.explore import Mean
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.req_states import NewRequest
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.trunk import draft_trunks
from vllm_recycle.integration.cpu.along_trunks import AlongTrunks, shortest
from vllm_recycle.integration.cpu.draft_model import DraftModel
from vllm_recycle.integration.drafter import from_first_rank
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.ouroboros import describe_draft_model

# Rows of a draft forward for each request, of the text and tried; and of one that reads prompts.
FORWARD_ROWS, READING_ROWS = 4, 256
FORWARDS = 2  # of a round, before any was made


class TrunkV1Drafter(DraftModel, AlongTrunks):
    """Grows trees along what vLLM's draft model drafts, where its round is worth its time.

    Attributes:
        lengths: int64 [2, max_num_reqs], tokens of each text when it began, and now.
        mean_length: tokens of an answer, up to where it ended or was interrupted; 0 before there
            was any.

    """

    num_forwards = 0

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        options = settings_of(vllm_config).options
        gamma, max_num_reqs = options.trunk_length, vllm_config.scheduler_config.max_num_seqs
        chain = TreeTemplate(tuple((row, 0) for row in range(gamma)), f"chain of {gamma}")
        DraftModel.__init__(self, vllm_config, device, runner, lookahead=chain)
        AlongTrunks.__init__(self, vllm_config, device, runner, length=gamma)
        self.gamma = gamma
        self.lengths = np.zeros((2, max_num_reqs), dtype=np.int64)
        self.mean_length = Mean()
        # Seconds of a forward by its requests, and in which a token is read.
        self.forward_seconds: dict[int, float] = {1: 0.0}
        self.token_seconds = 0.0

    def add_requests(self, requests: Sequence[NewRequest]) -> None:
        super().add_requests(requests)
        for request in requests:
            self.lengths[:, request.req_state_idx] = len(request.token_ids)

    def release(self, req_state_indices: Sequence[int]) -> None:
        super().release(req_state_indices)
        starts, ends = self.lengths[:, req_state_indices]
        for length in (ends - starts)[ends > starts].tolist():
            self.mean_length = self.mean_length.with_sample(length)

    def trunk_depths(self, texts: TextEnds, block_tables: Any) -> np.ndarray:
        self.lengths[1, texts.idx_mapping.numpy()] = np.array(texts.ends.last_positions) + 1
        room = self.room(texts, block_tables) + 1
        return np.minimum(texts.max_depths, room).clip(min=0)

    def answer_left(self, texts: TextEnds) -> np.ndarray:
        return np.minimum(texts.max_depths, self.mean_length.value or math.inf)

    def reading_seconds(self, texts: TextEnds) -> np.ndarray:
        num_unseen = texts.ends.last_positions - self.num_cached[texts.idx_mapping.numpy()]
        return self.token_seconds * (num_unseen - self.gamma - 1).clip(min=0)

    def draft_trunks(self, texts: TextEnds, block_tables: Any, rate: float) -> Trunks | None:
        """See `AlongTrunks`; the draft model tries what is drafted from the matrix."""
        chosen = texts.idx_mapping.numpy()[np.array(texts.max_depths) > 0]
        if not len(chosen):
            return None
        prices = {CHAINS: Price(self.curve.by_rows(self.options.kinds[-1], Load(1)))}

        def guess(ends: TextEnds) -> list[list[int]]:
            self.num_forwards += len(ends.max_depths)
            drafts = self.proposer.propose(ends, prices=prices, max_nodes=self.gamma)
            return drafts.token_ids

        return draft_trunks(
            texts,
            self.begin_round(texts, block_tables),
            guess,
            self.choices,
            gamma=self.gamma,
            reach=self.proposer.layout.reach,
            least_chance=rate * self._forward_seconds(len(chosen)),
        )

    def _forward_seconds(self, num_reqs: int) -> float:
        """Seconds of a forward, as for the nearest number of requests that was timed."""
        nearest = min(self.forward_seconds, key=lambda size: abs(math.log(size / num_reqs)))
        return self.forward_seconds[nearest]

    @torch.inference_mode()
    def measure_drafting(self) -> str:
        rows = min(READING_ROWS, self.max_num_tokens)
        batches = sorted({load.requests for load in self.curve.loads})
        seconds = {n: self._time_forward(FORWARD_ROWS * n, chooses=True) for n in batches}
        reading = self._time_forward(rows, chooses=False) / rows
        self.forward_seconds, self.token_seconds = from_first_rank((seconds, reading))
        costs = self.add_rounds(lambda num_reqs: FORWARDS * self.forward_seconds[num_reqs])
        return f"; {FORWARDS} forwards of the draft model take, in parts of a step, {costs}"

    def _time_forward(self, num_rows: int, *, chooses: bool) -> float:
        """The shortest time of a draft forward of so many rows, or of as many as there may be."""

        def run() -> None:
            hidden = self.run(min(num_rows, self.max_num_tokens))
            if chooses:
                self.model.compute_logits(hidden)

        return shortest(run)

    def describe(self) -> str:
        return f"{describe_draft_model(self.vllm_config, self.gamma)}; {super().describe()}"
