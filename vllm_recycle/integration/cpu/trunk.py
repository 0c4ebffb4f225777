"""Token Recycling along the trunk of a draft model, on the V1 runner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.choose import Price
from vllm_recycle.core.curve import CHAINS, Load
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.owners import Owner
from vllm_recycle.core.rounds import Rounds, StepAlone
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.trunk import draft_trunks
from vllm_recycle.integration.cpu.along_trunks import AlongTrunks, shortest
from vllm_recycle.integration.cpu.draft_model import DraftModel, Round
from vllm_recycle.integration.drafter import from_first_rank
from vllm_recycle.integration.options import TrunkOptions, settings_of
from vllm_recycle.integration.ouroboros import describe_draft_model

# Rows of a draft forward for each request, of the text and tried; and of one that reads prompts.
FORWARD_ROWS, READING_ROWS = 4, 256


class TrunkV1Drafter(DraftModel, AlongTrunks):
    """Grows trees along what vLLM's draft model drafts, where its round is worth its time.

    Attributes:
        lengths: int64 [2, max_num_reqs], tokens of each text when it began, and now.
        num_forwards: draft forwards so far.

    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        options = settings_of(vllm_config).options
        assert isinstance(options, TrunkOptions)
        gamma, max_num_reqs = options.gamma, vllm_config.scheduler_config.max_num_seqs
        chain = TreeTemplate(tuple((row, 0) for row in range(gamma)), f"chain of {gamma}")
        DraftModel.__init__(self, vllm_config, device, runner, lookahead=chain)
        AlongTrunks.__init__(self, vllm_config, device, runner, length=gamma)
        self.gamma = gamma
        self.lengths = np.zeros((2, max_num_reqs), dtype=np.int64)
        self.num_forwards = 0

    def begin(
        self, req_state_idx: int, token_ids: torch.Tensor, request_class: int, owner: Owner | None
    ) -> None:
        super().begin(req_state_idx, token_ids, request_class, owner)
        self.lengths[:, req_state_idx] = len(token_ids)

    def release(self, req_state_indices: Sequence[int]) -> None:
        super().release(req_state_indices)
        for start, end in self.lengths[:, req_state_indices].T.tolist():
            if end > start:
                self.rounds.ended(end - start)

    def _draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        started, self.extra_seconds = time.perf_counter(), 0.0
        self.lengths[1, texts.idx_mapping.numpy()] = np.array(texts.ends.last_positions) + 1
        drafting, max_depths = self.begin_round(texts, block_tables), np.array(texts.max_depths)
        depths = np.minimum(max_depths, self.room(texts, block_tables) + 1).clip(min=0)
        depths *= self.arm is None  # a look is at what steps take
        to_read = (drafting.num_unseen - self.gamma - 1).clip(min=0)
        step_alone: StepAlone | None = None
        if self.options.row_cost is None and not self.isolates and depths.any():
            step_alone, seconds = self.step_alone(texts, num_nodes)
            depths *= self.rounds.choose(step_alone, to_read, np.where(depths, max_depths, 0))
            depths *= self.affords(step_alone, seconds, np.where(depths, to_read, 0), depths)
        if not (num_drafting := int((depths > 0).sum())):
            self.round_seconds = time.perf_counter() - started
            return super()._draft(texts, num_nodes, block_tables)
        least_chance = self.rounds.least_chance(step_alone, num_drafting) if step_alone else 0.0
        drafted_for = replace(texts, max_depths=depths.tolist())
        trunks = self._draft_trunks(drafted_for, drafting, least_chance)
        self.round_seconds = time.perf_counter() - started
        if step_alone:
            self.extra_seconds = drafting.num_forwards * self.rounds.seconds(num_drafting)
        texts = self.along(texts, trunks)
        drafts = super()._draft(texts, num_nodes, block_tables)
        if step_alone and drafts.rate:
            reads = to_read[depths > 0].any()
            forward_seconds = from_first_rank(self.round_seconds) / drafting.num_forwards
            rate, duration = drafts.rate * step_alone.unit, None if reads else forward_seconds
            self.rounds.gave(step_alone, num_drafting, rate=rate, seconds=duration)
        return drafts

    def _draft_trunks(self, texts: TextEnds, drafting: Round, least_chance: float) -> Trunks:
        """Trunks below some texts; what the draft model tries is drafted from the matrix."""
        self.num_rounds += sum(map(bool, texts.max_depths))
        prices = {CHAINS: Price(self.curve.by_rows(self.curve.kinds[-1], Load(1)))}

        def guess(ends: TextEnds) -> list[list[int]]:
            self.num_forwards += len(ends.max_depths)
            drafts = self.proposer.propose(ends, prices=prices, max_nodes=self.gamma)
            return drafts.token_ids

        reach = self.proposer.layout.reach
        return draft_trunks(
            texts,
            drafting,
            guess,
            self.choices,
            gamma=self.gamma,
            reach=reach,
            least_chance=least_chance,
        )

    @torch.inference_mode()
    def judge(self) -> str:
        batches = sorted({load.requests for load in self.curve.loads})
        forwards = {num_reqs: self._seconds_of(FORWARD_ROWS * num_reqs) for num_reqs in batches}
        rows = min(READING_ROWS, self.max_num_tokens)
        reading = self._seconds_of(rows, chooses=False) / rows
        self.rounds = Rounds(*from_first_rank((forwards, reading)))
        return f"; a forward of the draft model takes, in parts of a step, {self.shown()}"

    def _seconds_of(self, num_rows: int, *, chooses: bool = True) -> float:
        """The shortest time of a draft forward of so many rows, or of as many as one may have."""

        def run() -> None:
            hidden = self.run(min(num_rows, self.max_num_tokens))
            if chooses:
                self.model.compute_logits(hidden)

        return shortest(run)

    def describe(self) -> str:
        return f"{describe_draft_model(self.vllm_config, self.gamma)}; {super().describe()}"

    def statistics(self) -> dict[str, float]:
        return super().statistics() | {"forwards": self.num_forwards}
