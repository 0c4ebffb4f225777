"""Token Recycling along the trunk of a draft model, on the V1 runner."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds, Trunks
from vllm_recycle.core.price import CHAINS, TREES
from vllm_recycle.core.tree import TreeTemplate
from vllm_recycle.core.trunk import CHOICES, ChoiceAcceptance, draft_trunks
from vllm_recycle.core.verification import NO_TOKEN, WalkResult
from vllm_recycle.integration.cpu.draft_model import DraftModel, Round
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import ROUNDS
from vllm_recycle.integration.cpu.token_recycling import TokenRecyclingV1Drafter
from vllm_recycle.integration.drafter import from_first_rank
from vllm_recycle.integration.options import TrunkOptions, options_of
from vllm_recycle.integration.ouroboros import describe_draft_model

# The part of a new sample that an average takes; rounds of as many requests between corrections of
# what their forwards take; steps that go without a round, until one is made to see what it gives;
# and how fine rates are told apart, in parts of a doubling.
GAIN, CORRECT_EVERY, LOOK_EVERY, FINE = 1 / 16, 8, 32, 4
# What rounds are believed to give before any was made, in parts of what a step without one does,
# and of how many that would be the average: one that gave little must not end all.
AT_FIRST, AS_MANY = 1.25, 3
# Rows of a draft forward for each request: of the text, and tried.
FORWARD_ROWS = 4


class Rounds:
    """What rounds take, in parts of a step without drafts, and what they give.

    Args:
        costs: of a forward, as they are believed, by how many requests draft in it.

    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        self._costs = {_size(num_reqs): cost for num_reqs, cost in costs.items()}
        # And how many rounds that is the average of, the believed ones included.
        self._promises: dict[tuple[int, int], tuple[float, int]] = {}
        # By size: seconds of a forward, of how many rounds, and of a step without drafts.
        self._seconds: dict[int, tuple[float, int]] = {}
        self._units: dict[int, float] = {}
        self._num_left_out = 0

    def cost(self, num_reqs: int) -> float:
        """What a forward for so many requests costs."""
        size = _size(num_reqs)
        return self._costs[min(self._costs, key=lambda known: (abs(known - size), known))]

    def pays(self, num_reqs: int, alone: float) -> bool:
        """Whether a round pays, where a step without it gives so many tokens by its time."""
        if self._promise(num_reqs, alone)[0] > alone:
            return True
        self._num_left_out += 1
        return self._num_left_out % LOOK_EVERY == 0

    def least_chance(self, num_reqs: int, alone: float) -> float:
        """What a forward costs in tokens, where a step without a round gives so many by its time.

        See `draft_trunks`.
        """
        return self.cost(num_reqs) * max(alone, self._promise(num_reqs, alone)[0])

    def gave(self, num_reqs: int, alone: float, rate: float, seconds: float | None) -> None:
        """Take in a round whose forwards took so long, and the rate of the step behind it.

        A rate is in tokens by the time of the step and the round. The `seconds` are None where the
        forwards had prompts to read.
        """
        like, size = _like(num_reqs, alone), _size(num_reqs)
        self._promises[like] = _taken_in(self._promise(num_reqs, alone), rate)
        if seconds is None:
            return
        average, samples = _taken_in(self._seconds.get(size, (seconds, 0)), seconds)
        self._seconds[size] = average, samples
        if samples % CORRECT_EVERY == 0 and size in self._units:
            self._costs[size] = from_first_rank(average / self._units[size])

    def _promise(self, num_reqs: int, alone: float) -> tuple[float, int]:
        size, worth = _like(num_reqs, alone)
        if (size, worth) in self._promises:
            return self._promises[size, worth]
        # A round gives no more, in parts, than where a step without one gives less.
        below = [other for of, other in self._promises if of == size and other < worth]
        if not below:
            return AT_FIRST * alone, AS_MANY
        promise, _ = self._promises[size, max(below)]
        return promise * 2 ** ((worth - max(below)) / FINE), AS_MANY

    def served(self, num_reqs: int, unit: float) -> None:
        """Take in a step, by which one without drafts takes so many seconds."""
        size = _size(num_reqs)
        self._units[size] = _moved(self._units.get(size, unit), unit)


def _size(num_reqs: int) -> int:
    """What tells numbers of requests apart."""
    return num_reqs.bit_length()


def _like(num_reqs: int, alone: float) -> tuple[int, int]:
    """What steps have in common that a round is expected to give as much to."""
    return _size(num_reqs), round(FINE * math.log2(alone / num_reqs))


def _taken_in(average: tuple[float, int], sample: float) -> tuple[float, int]:
    """An average and its number of samples, with one more."""
    value, samples = average
    return _moved(value, sample, max(GAIN, 1 / (samples + 1))), samples + 1


def _moved(average: float, sample: float, gain: float = GAIN) -> float:
    return average + gain * (sample - average)


class TrunkV1Drafter(DraftModel, TokenRecyclingV1Drafter):
    """Grows trees along what vLLM's draft model drafts, where its round is worth its time.

    Attributes:
        choices: what the choices of the draft model are worth.
        trunks: of each request the last one, by `req_state_idx`, with probabilities for chances.
        rounds: what rounds take and give.
        num_rounds: drafts along a trunk so far, counted once for each request.
        num_forwards: draft forwards so far.
        round_seconds: what the draft model took after the last step.
        added: to the price of a step, for the forwards that were made for it.

    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        options = options_of(vllm_config)
        assert isinstance(options, TrunkOptions)
        gamma, max_num_reqs = options.gamma, vllm_config.scheduler_config.max_num_seqs
        chain = TreeTemplate(tuple((row, 0) for row in range(gamma)), f"chain of {gamma}")
        DraftModel.__init__(self, vllm_config, device, runner, lookahead=chain, gamma=gamma)
        TokenRecyclingV1Drafter.__init__(self, vllm_config, device, runner)
        self.gamma, self.choices, self.rounds = gamma, ChoiceAcceptance(), Rounds({1: 0.0})
        shape = max_num_reqs, gamma, CHOICES
        self.trunks = Trunks(torch.full(shape, NO_TOKEN), torch.zeros(shape, dtype=torch.float64))
        self.num_rounds = self.num_forwards = 0
        self.round_seconds = self.added = 0.0

    def begin(self, req_state_idx: int, token_ids: torch.Tensor, num_computed_tokens: int) -> None:
        super().begin(req_state_idx, token_ids, num_computed_tokens)
        self.known.begin(req_state_idx, num_computed_tokens)
        self.trunks.token_ids[req_state_idx] = NO_TOKEN

    def accept(
        self, idx_mapping: torch.Tensor, step: StepLayout, walked: WalkResult, ends: Ends
    ) -> None:
        super().accept(idx_mapping, step, walked, ends)
        if not self.isolates:  # else nobody's counts reach another
            drafted = Trunks(*(values[idx_mapping] for values in self.trunks))
            self.choices.count(drafted, walked.token_ids)
        self.trunks.token_ids[idx_mapping] = NO_TOKEN

    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        started, self.added = time.perf_counter(), 0.0
        batch, drafting = len(texts.idx_mapping), self.begin_round(texts, block_tables)
        pairs = zip(texts.max_depths, self.room(texts, block_tables).tolist(), strict=True)
        depths = [max(0, min(depth, left + 1)) if depth else 0 for depth, left in pairs]
        is_priced = self.row_cost is None and not self.isolates
        alone = self._rate_alone(texts, num_nodes) if is_priced and any(depths) else 0.0
        if not any(depths) or (is_priced and not self.rounds.pays(batch, alone)):
            drafting.fill_blocks()
            self.round_seconds = time.perf_counter() - started
            return super().draft(texts, num_nodes, block_tables)
        least_chance = self.rounds.least_chance(batch, alone) if is_priced else 0.0
        reads_prompts = drafting.behind.sum() > batch * (1 + self.gamma)
        trunks = self._draft_trunks(replace(texts, max_depths=depths), drafting, least_chance)
        for kept, values in zip(self.trunks, trunks, strict=True):
            kept[texts.idx_mapping] = values
        self.round_seconds = time.perf_counter() - started
        self.added = self.rounds.cost(batch) * drafting.num_forwards if is_priced else 0.0
        texts = replace(texts, trunks=self.choices.chances(trunks))
        drafts = super().draft(texts, num_nodes, block_tables)
        if is_priced and drafts.rate:
            each = None if reads_prompts else self.round_seconds / drafting.num_forwards
            self.rounds.gave(batch, alone, drafts.rate, each)
        return drafts

    def _draft_trunks(self, texts: TextEnds, drafting: Round, least_chance: float) -> Trunks:
        """Trunks below some texts; what the draft model tries is drafted from the matrix."""
        depths, state, operations = texts.max_depths, self.proposer.state, self.proposer.operations
        num_drafting = len([depth for depth in depths if depth])
        drafting.catch_up(num_drafting)
        self.num_rounds += num_drafting
        *_, row = self.prices(1, 0).values()

        def guess(ends: TextEnds) -> list[list[int]]:
            self.num_forwards += len(ends.max_depths)
            return operations.draft(
                state.matrix,
                state.acceptance.counts,
                ends,
                prices={CHAINS: row},
                num_other_rows=0,
                max_nodes=self.gamma,
            ).token_ids

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

    def _rate_alone(self, texts: TextEnds, num_nodes: int) -> float:
        """Expected tokens, by the time of the step, of drafts without a trunk."""
        prices = self.prices(len(texts.idx_mapping), sum(texts.ends.last) / len(texts.ends.last))
        most = min(num_nodes, self.proposer.num_nodes)
        return self.proposer.propose(texts, prices=prices, num_other_rows=0, max_nodes=most).rate

    def prices(self, num_reqs: int, context: float) -> dict[str, torch.Tensor]:
        prices = super().prices(num_reqs, context)
        if not self.added:
            return prices
        return {kind: times + self.added for kind, times in prices.items()}

    def serve(self, step: StepLayout, context: float, seconds: float) -> None:
        seconds -= self.round_seconds
        super().serve(step, context, seconds)
        kind = CHAINS if step.are_chains else TREES
        times = self.step_times.get(kind, self.step_times[TREES])
        num_reqs, num_rows = len(step.num_nodes), len(step.row_token_ids)
        price = times.at(num_reqs, context)
        self.rounds.served(num_reqs, seconds / float(price[min(num_rows, len(price) - 1)]))

    @torch.inference_mode()
    def judge(self) -> str:
        times = next(iter(self.step_times.values()))
        costs: dict[int, float] = {}
        for (num_reqs, _), unit in zip(times.loads, times.seconds, strict=True):
            rows = min(FORWARD_ROWS * num_reqs, self.max_num_tokens)
            seconds = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                self.model.compute_logits(self.run(rows))
                seconds.append(time.perf_counter() - started)
            costs.setdefault(num_reqs, min(seconds) / unit)
        self.rounds = Rounds(from_first_rank(costs))
        shown = ", ".join(f"{cost:.2f} for {num_reqs}" for num_reqs, cost in costs.items())
        return f"; a forward of the draft model takes, in parts of a step, {shown} requests"

    def reset(self) -> None:
        super().reset()
        self.choices.clear()

    def describe(self) -> str:
        return f"{describe_draft_model(self.vllm_config, self.gamma)}; {super().describe()}"

    def statistics(self) -> dict[str, float]:
        counted = {"rounds": self.num_rounds, "forwards": self.num_forwards}
        return super().statistics() | counted | {"forward_cost": self.rounds.cost(1)}
