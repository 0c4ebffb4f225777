"""Token Recycling along trunks, whatever drafts these, on the V1 runner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.curve import Load
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.owners import Owner
from vllm_recycle.core.rounds import Rounds, StepAlone
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance
from vllm_recycle.core.verification import NO_TOKEN, WalkResult
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import ROUNDS
from vllm_recycle.integration.cpu.token_recycling import TokenRecyclingV1Drafter


def shortest(run: Callable[[], object]) -> float:
    """The shortest of a few times of a run, in seconds."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class AlongTrunks(TokenRecyclingV1Drafter):
    """Grows trees along trunks, which a subclass drafts.

    Args:
        vllm_config, device, runner: as vLLM gives them.
        length: the most tokens of a trunk.

    Attributes:
        choices: what the choices of a trunk are worth.
        trunks: of each request the last one, by `req_state_idx`, with probabilities for chances.
        rounds: what rounds take and give.
        num_rounds: drafts along a trunk so far, counted once for each request.
        extra_seconds: of a step, for the round that was made for it.

    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any, *, length: int) -> None:
        super().__init__(vllm_config, device, runner)
        self.choices = ChoiceAcceptance(self.state.matrix.classes)
        self.rounds = Rounds({1: 0.0}, 0.0)
        shape = vllm_config.scheduler_config.max_num_seqs, length, CHOICES
        self.trunks = Trunks(torch.full(shape, NO_TOKEN), torch.zeros(shape, dtype=torch.float64))
        self.num_rounds, self.extra_seconds = 0, 0.0

    def begin(
        self, req_state_idx: int, token_ids: torch.Tensor, request_class: int, owner: Owner | None
    ) -> None:
        super().begin(req_state_idx, token_ids, request_class, owner)
        self.trunks.token_ids[req_state_idx] = NO_TOKEN

    def accept(
        self, idx_mapping: torch.Tensor, step: StepLayout, walked: WalkResult, ends: Ends
    ) -> None:
        super().accept(idx_mapping, step, walked, ends)
        if not self.isolates:  # else nobody's counts reach another
            drafted = Trunks(*(values[idx_mapping] for values in self.trunks))
            self.choices.count(drafted, idx_mapping, walked.token_ids)
        self.trunks.token_ids[idx_mapping] = NO_TOKEN

    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        drafts = super().draft(texts, num_nodes, block_tables)
        self.last_drafts = self.last_drafts._replace(is_behind_round=self.extra_seconds > 0)
        return drafts

    def along(self, texts: TextEnds, trunks: Trunks) -> TextEnds:
        """Texts with these trunks, of which each has probabilities in the place of chances."""
        for tensor, values in zip(self.trunks, trunks, strict=True):
            tensor[texts.idx_mapping] = values
        return replace(texts, trunks=self.choices.chances(trunks, texts.idx_mapping))

    def step_alone(self, texts: TextEnds, num_nodes: int) -> tuple[StepAlone, float]:
        """What a step would be whose drafts have no trunk, and the seconds that it would take."""
        num_reqs, max_nodes = len(texts.idx_mapping), min(num_nodes, self.proposer.num_nodes)
        load = Load(num_reqs, sum(texts.ends.last_positions) / num_reqs)
        drafts = self.proposer.propose(texts, prices=self.prices(load), max_nodes=max_nodes)
        plain, rows = self.curve.plain(load), num_reqs + sum(map(len, drafts.token_ids))
        seconds = float(self.seconds(drafts.kind or self.curve.kinds[0], load)[rows])
        return StepAlone(num_reqs, plain, drafts.rate * plain), seconds

    def affords(self, step: StepAlone, seconds: float, to_read: np.ndarray, depths: Any) -> bool:
        """Whether a step of so many seconds may have a round besides."""
        seconds += step.unit * self.rounds.cost(step, to_read, depths)
        return self.chooser is None or seconds <= self.chooser.account.most * step.unit

    def shown(self) -> str:
        """What rounds take, or their forwards, at the loads of the curve."""
        batches = sorted({load.requests for load in self.curve.loads})
        costs = {size: self.rounds.seconds(size) / self.curve.plain(Load(size)) for size in batches}
        return ", ".join(f"{cost:.2f} for {size}" for size, cost in costs.items()) + " requests"

    def seconds(self, kind: str, load: Load) -> torch.Tensor:
        seconds = super().seconds(kind, load)
        return seconds + self.extra_seconds if self.extra_seconds else seconds

    def reset(self) -> None:
        super().reset()
        self.choices.clear()

    def weights_changed(self) -> None:
        super().weights_changed()
        self.choices.halve()

    def statistics(self) -> dict[str, float]:
        return super().statistics() | {"rounds": self.num_rounds}
