"""Ouroboros as the paper has it, on the V1 runner: a draft model that drafts by phrases."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.acceptance import NodeAcceptance
from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.ouroboros import OuroborosProposer
from vllm_recycle.core.price import TREES
from vllm_recycle.core.verification import NO_TOKEN, WalkResult
from vllm_recycle.integration.cpu.draft_model import DraftModel
from vllm_recycle.integration.cpu.drafter import V1Drafter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import ROUNDS
from vllm_recycle.integration.drafter import from_first_rank
from vllm_recycle.integration.ouroboros import describe, make_proposer
from vllm_recycle.kernels.cpu import native_operations


class OuroborosV1Drafter(DraftModel, V1Drafter):
    """Drafts as the paper does; the target verifies the nodes of a draft that are worth their rows.

    Attributes:
        acceptance: what the nodes of a draft are worth.
        drafted: int64 [max_num_reqs, nodes], the last draft of each request, whole.

    """

    proposer: OuroborosProposer

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        self.proposer = make_proposer(vllm_config, native_operations(), device, stops_early=True)
        shape, tree = self.proposer.shape, self.proposer.tree
        lookahead, gamma = self.proposer.lookahead, shape.gamma
        DraftModel.__init__(self, vllm_config, device, runner, lookahead=lookahead, gamma=gamma)
        V1Drafter.__init__(self, vllm_config)
        self.state = self.proposer.pool
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.acceptance = NodeAcceptance(tree)
        self.drafted = torch.full((max_num_reqs, tree.num_nodes), NO_TOKEN)

    def begin(self, req_state_idx: int, token_ids: torch.Tensor, num_computed_tokens: int) -> None:
        self.proposer.begin(torch.full_like(token_ids, req_state_idx), token_ids)
        self.known.begin(req_state_idx, num_computed_tokens)
        self.drafted[req_state_idx] = NO_TOKEN

    def release(self, req_state_indices: Sequence[int]) -> None:
        self.proposer.release(req_state_indices)

    def observe(self, idx_mapping: torch.Tensor, step: StepLayout, logits: torch.Tensor) -> None:
        owners = idx_mapping.repeat_interleave(step.cu_num_logits.diff())
        self.proposer.observe(owners, step.row_token_ids, logits, step.cu_num_logits)

    def accept(
        self, idx_mapping: torch.Tensor, step: StepLayout, walked: WalkResult, ends: Ends
    ) -> None:
        self.acceptance.count(self.drafted[idx_mapping], walked)
        self.drafted[idx_mapping] = NO_TOKEN

    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        """Draft, and take in what the target has computed of every text, drafted for or not."""
        batch, last, text = len(texts.idx_mapping), np.array(texts.ends.last), texts.ends.token_ids
        room = self.room(texts, block_tables)
        chosen = np.nonzero((np.array(texts.max_depths) > 0) & (room >= 0))[0]
        drafting = self.begin_round(texts, block_tables)
        drafting.catch_up(len(chosen))
        tree = self.proposer.tree
        drafts: list[list[int]] = [[] for _ in range(batch)]
        if len(chosen):
            drafted = self.proposer.propose(
                texts.idx_mapping[chosen],
                text[chosen, last[chosen]].long(),
                draft_model=drafting,
                room=torch.from_numpy(room[chosen]),
            )
            self.drafted[texts.idx_mapping[chosen]] = drafted
            times = self.step_times[TREES].at(batch, float(last.mean()))
            worths, others = self.acceptance.worths(drafted), batch - len(chosen)
            worths = worths[:, :num_nodes]
            counts, _ = native_operations().choose(worths, times, num_other_rows=others)
            of_each = zip(chosen.tolist(), drafted.tolist(), counts.tolist(), strict=True)
            for index, draft, count in of_each:
                drafts[index] = draft[:count]
        parents = tree.parents[1:].tolist()
        return Drafts(drafts, [parents[: len(draft)] for draft in drafts])

    @torch.inference_mode()
    def judge(self, step_seconds: float) -> str:
        forwards, rows = self.proposer.max_forwards, 1 + self.proposer.lookahead.num_nodes
        seconds = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            self.model.compute_logits(self.run(rows))
            seconds.append(time.perf_counter() - started)
        share = from_first_rank(forwards * min(seconds) / step_seconds)
        times = self.step_times[TREES].at(1, 0)
        reached = 1 + self.proposer.tree.depths.cummax(0).values
        costs = share + times[1 : len(reached) + 1]
        pays = bool((reached[: len(costs)] > costs)[1:].any())
        return (
            f"; drafting takes {share:.2f} of a step, {forwards} forwards of {rows} rows: it pays "
            f"above {float(costs[1]):.1f} tokens a step"
            + ("" if pays else ", more than any draft can give: leave the method out")
        )

    def reset(self) -> None:
        super().reset()
        self.acceptance.clear()

    def describe(self) -> str:
        return describe(self.proposer, self.vllm_config)

    def statistics(self) -> dict[str, float]:
        counted = {"rounds": self.proposer.num_rounds, "forwards": self.proposer.num_forwards}
        return super().statistics() | counted
