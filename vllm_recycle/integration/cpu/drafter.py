"""What the V1 runner asks of a drafter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_recycle.core.ouroboros import OuroborosProposer
from vllm_recycle.core.price import CHAINS, TREES, StepTimes
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


@dataclass(frozen=True, slots=True)
class Texts:
    """The requests of a step, after it, in batch order.

    Attributes:
        idx_mapping: int64 [batch].
        token_ids: int32 [max_num_reqs, max_model_len], prompt and output of each request.
        num_computed_tokens: int64 [batch], tokens of each that the target has computed.
        wants_draft: bool [batch]; these have one more token, which the target sampled.
        max_depths: int64 [batch], the most drafted tokens that could be accepted of each.
        num_nodes: the most nodes of a draft in a batch of this size.
        is_token: as `token_ids`, bool, where these are the input; None if they are everywhere.

    """

    idx_mapping: torch.Tensor
    token_ids: np.ndarray
    num_computed_tokens: np.ndarray
    wants_draft: np.ndarray
    max_depths: np.ndarray
    num_nodes: int
    is_token: np.ndarray | None = None

    def last_token_ids(self, chosen: np.ndarray) -> torch.Tensor:
        """int64 [n], of those requests that want a draft."""
        last = self.token_ids[chosen, self.num_computed_tokens[chosen]]
        return torch.from_numpy(last.astype(np.int64))


@dataclass(frozen=True, slots=True)
class Ends:
    """Where some texts end.

    Attributes:
        token_ids: int32 [max_num_reqs, max_model_len], of each request of a step.
        rows: int64 [batch], which of these the texts are.
        last: int64 [batch], the place of the last token of each.
        is_token: as `token_ids`, bool, where these are the input; None if they are everywhere.

    """

    token_ids: np.ndarray
    rows: np.ndarray
    last: np.ndarray
    is_token: np.ndarray | None = None

    def tails(self, reach: int) -> torch.Tensor:
        """int64 [batch, reach], the newest token first, -1 where there is none."""
        place = self.last[:, None] - np.arange(reach)
        where = self.rows[:, None], place.clip(min=0)
        known = place >= 0 if self.is_token is None else (place >= 0) & self.is_token[where]
        return torch.from_numpy(np.where(known, self.token_ids[where], -1).astype(np.int64))


class V1Drafter(Drafter):
    """A drafter of the V1 runner, which drafts as many nodes as are worth their time.

    Attributes:
        proposer: what drafts and learns.
        row_cost: what the user says of a row, in units of a step of one row; None to measure.
        max_rows: most rows of a step that drafts may make.
        step_times: what a step takes by its rows, by what its drafts are.
        follows_steps: whether these follow what served steps took.
        served: what follows them, where rows were measured.

    """

    follows_steps: ClassVar[bool] = False
    proposer: TokenRecyclingProposer | OuroborosProposer

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        scheduler = vllm_config.scheduler_config
        self.row_cost = self.options.row_cost
        drafts = int(self.options.budget_share * scheduler.max_num_scheduled_tokens)
        self.max_rows = scheduler.max_num_seqs + drafts
        linear = StepTimes.linear(self.row_cost or 0.0, self.max_rows)
        self.step_times = dict.fromkeys(self.options.kinds, linear)
        self.served: ServedTimes | None = None

    def load_model(self, target_model: torch.nn.Module) -> None:
        """Nothing; vLLM asks it of every drafter."""

    @property
    def attention_layers(self) -> Set[str]:
        """Names of attention layers that are not the target's."""
        return frozenset()

    @abstractmethod
    def begin(self, req_state_idx: int, token_ids: torch.Tensor, num_computed_tokens: int) -> None:
        """A request starts.

        Args:
            req_state_idx: of the request.
            token_ids: int64 [length], its text.
            num_computed_tokens: tokens of it that are in the KV cache.

        """

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

    @abstractmethod
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
    def draft(self, texts: Texts, block_tables: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft behind each text that wants it; to be called after each step.

        Args:
            texts: of the step.
            block_tables: vLLM's, of all KV cache groups.

        Returns:
            Token ids, int64 [batch, nodes], -1 where there is no draft, and the parent row of each
            node, int64 [batch, nodes].

        """

    def price(self, runner: Any) -> str | None:
        """Measure what rows cost, unless the user says it; to be called without requests.

        Args:
            runner: whose steps are timed.

        Returns:
            What was found, if anything was measured.

        """
        if self.row_cost is not None:
            return None
        self.step_times, step_seconds, found = find_step_times(runner)
        # Under `isolated` nothing that depends on other requests may be seen in a draft.
        if step_seconds is not None and self.follows_steps and not self.options.isolates:
            self.served = ServedTimes(self.step_times)
        return found if step_seconds is None else found + self.judge(step_seconds)

    def serve(self, step: StepLayout, context: float, seconds: float) -> None:
        """Take in what a step without prompts took, behind so many tokens on average."""
        if self.served is None:
            return
        num_rows, num_reqs = len(step.row_token_ids), len(step.num_nodes)
        kind: str | None = CHAINS if step.are_chains else TREES
        # A draft of one node is a chain and a tree.
        is_any = kind not in self.step_times or int(step.num_nodes.max()) <= 1
        kind = None if is_any else kind
        if self.served.serve(kind, num_rows, num_reqs=num_reqs, context=context, seconds=seconds):
            self.served.correct(*from_first_rank((self.served.logs, self.served.ages)))
            self.step_times = self.served.times

    def judge(self, step_seconds: float) -> str:
        """What is to be said of drafting where a plain step takes so long, if anything."""
        return ""

    def statistics(self) -> dict[str, float]:
        _, slopes = next(iter(self.step_times.values())).at(1, 0)
        logs = {} if self.served is None else self.served.known()
        return super().statistics() | {"row_cost": float(slopes[1])} | logs
