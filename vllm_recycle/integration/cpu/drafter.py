"""What the V1 runner asks a drafter for: drafts behind the texts of a step.

vLLM creates a `custom_class` drafter by name, and loads it with the model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from vllm_recycle.core import Proposer, Trees, WalkResult
from vllm_recycle.core.price import StepTimes
from vllm_recycle.integration.config import get_options
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.drafter import Drafter


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

    """

    idx_mapping: torch.Tensor
    token_ids: np.ndarray
    num_computed_tokens: np.ndarray
    wants_draft: np.ndarray
    max_depths: np.ndarray
    num_nodes: int

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

    """

    token_ids: np.ndarray
    rows: np.ndarray
    last: np.ndarray

    def tails(self, reach: int) -> torch.Tensor:
        """int64 [batch, reach], the newest token first, -1 before the first token of a text."""
        place = self.last[:, None] - np.arange(reach)
        found = self.token_ids[self.rows[:, None], place.clip(min=0)]
        return torch.from_numpy(np.where(place >= 0, found, -1).astype(np.int64))


class V1Drafter(Drafter):
    """What the V1 runner asks for besides."""

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

    @abstractmethod
    def trees_of(self, idx_mapping: torch.Tensor) -> Trees:
        """The trees that were drafted last for these requests, int64 [batch]."""

    @abstractmethod
    def observe(
        self, idx_mapping: torch.Tensor, trees: StepLayout, logits: torch.Tensor
    ) -> torch.Tensor | None:
        """Take in a step, before its tokens are sampled.

        Args:
            idx_mapping: int64 [batch].
            trees: the step.
            logits: [logit rows, vocab], raw.

        Returns:
            int64 [logit rows], the argmax of each row, the first of equals, where it came up; else
            None.

        """

    def accept(
        self,
        idx_mapping: torch.Tensor,
        trees: StepLayout,
        walked: WalkResult,
        ends: Ends,
    ) -> None:
        """Take in what was accepted of the step that was observed.

        Args:
            idx_mapping: int64 [batch].
            trees: the step.
            walked: what the walk accepted.
            ends: of the texts that end with the roots.

        """

    @abstractmethod
    def draft(self, texts: Texts, block_tables: Any) -> torch.Tensor:
        """Draft behind each text that wants it; to be called after each step.

        Args:
            texts: of the step.
            block_tables: vLLM's, of all KV cache groups.

        Returns:
            int64 [batch, nodes], -1 where there is no draft.

        """

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """What vLLM's own runner would ask of what it has created."""
        raise RuntimeError(f"{type(self).__name__}: expected a model runner of vllm_recycle")


class PricedV1Drafter(V1Drafter):
    """To be put before a drafter that drafts as many rows as are worth their time.

    Attributes:
        step_times: what rows cost.
        max_rows: most rows of a step that drafts may make.
        row_cost: what the user says of a row, in units of a step of one row; None to measure.

    """

    def read_prices(self) -> None:
        """Set these from `vllm_config`; what is measured comes later."""
        options, scheduler = get_options(self.vllm_config), self.vllm_config.scheduler_config
        self.row_cost = options.row_cost
        drafts = int(options.budget_share * scheduler.max_num_batched_tokens)
        self.max_rows = scheduler.max_num_seqs + drafts
        self.step_times = StepTimes.linear(self.row_cost or 0.0, self.max_rows)

    def statistics(self) -> dict[str, float]:
        _, slopes = self.step_times.at(1, 0)
        return super().statistics() | {"row_cost": float(slopes[1])}

    def judge(self, step_seconds: float) -> str:
        """What is to be said of drafting where a plain step takes so long, if anything."""
        return ""


class TemplateV1Drafter(V1Drafter):
    """Where one tree serves all requests."""

    @property
    def _proposer(self) -> Proposer:
        return cast("Proposer", self.proposer)

    def begin(self, req_state_idx: int, token_ids: torch.Tensor, num_computed_tokens: int) -> None:
        self._proposer.begin(torch.full_like(token_ids, req_state_idx), token_ids)

    def trees_of(self, idx_mapping: torch.Tensor) -> Trees:
        return self._proposer.tree.of_batch(len(idx_mapping))

    def observe(
        self, idx_mapping: torch.Tensor, trees: StepLayout, logits: torch.Tensor
    ) -> torch.Tensor | None:
        self._proposer.observe(
            idx_mapping[trees.request_of_logit_row],
            trees.row_token_ids,
            logits,
            trees.cu_num_logits,
        )
        return None
