"""What the V1 runner asks of a drafter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
from typing import Any

import torch

from vllm_recycle.core.adjacency import Ends
from vllm_recycle.core.draft import Drafts
from vllm_recycle.core.grow import TextEnds
from vllm_recycle.core.ouroboros import OuroborosProposer
from vllm_recycle.core.price import CHAINS, TREES, StepTimes, least_slopes
from vllm_recycle.core.served_times import ServedTimes
from vllm_recycle.core.token_recycling import TokenRecyclingProposer
from vllm_recycle.core.verification import WalkResult
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.cpu.time_steps import find_step_times
from vllm_recycle.integration.drafter import Drafter, from_first_rank


class Placeholder:
    """What vLLM's runner makes for `custom_class`, until ours puts a drafter in its place."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def propose(self) -> None:
        """Without it vLLM takes this for no drafter."""
        raise RuntimeError("expected a model runner of vllm_recycle")


class V1Drafter(Drafter):
    """A drafter of the V1 runner, which drafts as many nodes as are worth their time.

    Attributes:
        proposer: what drafts and learns.
        max_rows: most rows of a step that drafts may make.
        step_times: what a step takes by its rows, by what its drafts are.
        served: what follows what served steps took, where rows were measured.

    """

    proposer: TokenRecyclingProposer | OuroborosProposer

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        scheduler = vllm_config.scheduler_config
        drafts = self.options.max_draft_tokens(scheduler.max_num_scheduled_tokens)
        self.max_rows = scheduler.max_num_seqs + drafts
        linear = StepTimes.linear(self.options.row_cost or 0.0, self.max_rows)
        self.step_times = dict.fromkeys(self.options.kinds, linear)
        self.served: ServedTimes | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Nothing; vLLM asks it of every drafter."""

    @property
    def attention_layers(self) -> Set[str]:
        """Names of attention layers that are not the target's."""
        return frozenset()

    @abstractmethod
    def begin(self, req_state_idx: int, token_ids: torch.Tensor) -> None:
        """A request starts, with this text, int64 [length]."""

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
        times, found = find_step_times(runner)
        if times is None:
            return found
        self.step_times = times
        # Under `isolated` nothing that depends on other requests may be seen in a draft.
        if not self.options.isolates:
            self.served = ServedTimes(times)
        return found + self.judge()

    def serve(self, step: StepLayout, context: float, seconds: float) -> None:
        """Take in what a step without prompts took, behind so many tokens on average."""
        if self.served is None:
            return
        num_rows, num_reqs = len(step.row_token_ids), len(step.num_nodes)
        kind: str | None = CHAINS if step.trees.are_chains else TREES
        # A draft of one node is a chain and a tree.
        is_any = kind not in self.step_times or step.trees.num_nodes <= 1
        kind = None if is_any else kind
        if self.served.serve(kind, num_rows, num_reqs=num_reqs, context=context, seconds=seconds):
            self.served.correct(*from_first_rank((self.served.logs, self.served.last)))
            self.step_times = self.served.times

    def judge(self) -> str:
        """Measure what drafting takes beside the steps, whose times are known; what was found."""
        return ""

    def statistics(self) -> dict[str, float]:
        slopes = least_slopes(next(iter(self.step_times.values())).at(1, 0).tolist())
        logs = {} if self.served is None else self.served.known()
        return super().statistics() | {"row_cost": slopes[1]} | logs
