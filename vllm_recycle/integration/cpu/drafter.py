"""What the V1 runner asks of a drafter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.choose import Chooser, least_slopes
from vllm_recycle.core.curve import CHAINS, TREES, TRUNKS, Load, MeasuredCurve
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.paper.ouroboros import OuroborosProposer
from vllm_recycle.core.token_recycling import TokenRecyclingProposer
from vllm_recycle.core.tree import MAX_CHAIN
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import find_curve
from vllm_recycle.integration.drafter import Drafter, from_first_rank


class LastDrafts(NamedTuple):
    """What is to be known of drafts when they are verified.

    Attributes:
        num_nodes: of all requests.
        expected: draft tokens that should be accepted.
        seconds: that drafting took.
        has_read: whether a draft model read texts in it.
        is_along_trunks: whether a draft model's round was made for them.

    """

    num_nodes: int = 0
    expected: float = 0.0
    seconds: float = 0.0
    has_read: bool = False
    is_along_trunks: bool = False


class Placeholder:
    """What vLLM's runner makes for `custom_class`, beside which ours has its drafter."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def propose(self) -> None:
        """Without it vLLM takes this for no drafter."""
        raise RuntimeError("expected a model runner of vllm_recycle")

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Nothing; vLLM asks it of every drafter."""


class V1Drafter(Drafter):
    """A drafter of the V1 runner, which drafts as many nodes as are worth their time.

    Attributes:
        proposer: what drafts and learns.
        max_rows: most rows of a step that drafts may make.
        curve: the seconds of steps; in units of a step of one row where the user gives their cost.
        chooser: what decides on drafts, where the curve was measured and requests may share.
        last_drafts: those that the next step verifies.

    """

    proposer: TokenRecyclingProposer | OuroborosProposer

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        scheduler = vllm_config.scheduler_config
        drafts = self.options.max_draft_tokens(scheduler.max_num_scheduled_tokens)
        self.max_rows = scheduler.max_num_seqs + drafts
        row_cost, kinds = self.options.row_cost or 0.0, self.options.kinds
        self.curve = MeasuredCurve.linear(row_cost, self.max_rows, kinds)
        self.chooser: Chooser | None = None
        self.last_drafts = LastDrafts()

    @property
    def attention_layers(self) -> Set[str]:
        """Names of attention layers that are not the target's."""
        return frozenset()

    def follow(self, scheduler_output: Any, index_of: dict[str, int]) -> None:
        """Take in what vLLM has scheduled; requests that start have a `req_state_idx` here."""

    def release(self, req_state_indices: Sequence[int]) -> None:
        """Some requests ended: finished, aborted or preempted."""

    @abstractmethod
    def observe(
        self, idx_mapping: torch.Tensor, step: StepLayout, logits: torch.Tensor
    ) -> torch.Tensor | None:
        """Take in a step, before its tokens are sampled.

        Args:
            idx_mapping: int64 [batch].
            step: that was computed.
            logits: [logit rows, vocab], raw.

        Returns:
            int64 [logit rows], the argmax of each row, the first of equals, where it came up; else
            None.

        """

    def accept(
        self, idx_mapping: torch.Tensor, step: StepLayout, walked: WalkResult, ends: Ends
    ) -> None:
        """Take in what was accepted of the step that was observed.

        Args:
            idx_mapping: int64 [batch].
            step: that was computed.
            walked: what the walk accepted.
            ends: of the texts that end with the roots.

        """

    @abstractmethod
    def draft(self, texts: TextEnds, num_nodes: int, block_tables: Any) -> Drafts:
        """Draft behind each text of a step; to be called after each step.

        Args:
            texts: as far as the target has computed them, and with one more token where a draft may
                be accepted: where `max_depths` is above 0. Elsewhere there is none.
            num_nodes: the most nodes of a draft in a batch of this size.
            block_tables: vLLM's, of all KV cache groups.

        Returns:
            Drafts whose last nodes are filled.

        """

    def price(self, runner: Any) -> str | None:
        """Measure what rows cost, unless the user says it; to be called without requests.

        Args:
            runner: whose steps are timed.

        Returns:
            What was found, if anything was measured.

        """
        if self.options.row_cost is not None:
            return None
        curve, report = find_curve(runner)
        if curve is None:
            return report
        self.curve = curve
        report += self.measure_drafting()
        # Under `isolated` nothing that depends on other requests may be seen in a draft.
        if not self.options.isolates:
            max_tree_rows = 1 + self.options.num_nodes
            max_rows = dict.fromkeys(curve.kinds, max_tree_rows)
            max_rows[CHAINS] = min(max_tree_rows, 1 + MAX_CHAIN)
            self.chooser = Chooser(curve, max_rows)
        return report

    def record_step(
        self, step: StepLayout, context: float, *, tokens: int, seconds: float | None
    ) -> None:
        """Take in a step, before the next one is drafted for.

        Args:
            step: that was served.
            context: tokens before the rows of each request, on average.
            tokens: that its requests got.
            seconds: that it took without its drafting; None where it had rows of prompts.

        """
        if self.chooser is None:
            return
        drafts = self.last_drafts
        reading = drafts.seconds if drafts.has_read else 0.0
        seconds = None if seconds is None or drafts.has_read else seconds + drafts.seconds
        # Ranks must choose alike.
        seconds, reading = from_first_rank((seconds, reading))
        nodes = sum(step.num_nodes)
        kind: str | None = CHAINS if step.trees.are_chains else TREES
        if drafts.is_along_trunks:
            kind = TRUNKS
        # A draft of one node is a chain and a tree.
        elif kind not in self.curve.kinds or step.trees.num_nodes <= 1:
            kind = None
        self.chooser.served(
            kind,
            Load(len(step.num_nodes), context, sum(map(bool, step.num_nodes))),
            len(step.num_nodes) + nodes,
            tokens=tokens,
            seconds=seconds,
            reading=reading,
            expected=drafts.expected if nodes == drafts.num_nodes else None,
        )

    def measure_drafting(self) -> str:
        """Add to the curve what a draft model takes, which was not measured, and describe it."""
        return ""

    def statistics(self) -> dict[str, float]:
        seconds = self.curve.by_rows(self.curve.kinds[0], Load(1)).tolist()
        cost = least_slopes(seconds)[1] / seconds[1]
        return super().statistics() | {"row_cost": cost} | self.curve.known()
