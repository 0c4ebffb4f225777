"""What Model Runner V2 asks a drafter for, whatever the method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_recycle.core.graph_curve import GraphTimes
from vllm_recycle.integration.drafter import Drafter
from vllm_recycle.integration.schedule.draft_sizes import DraftReport
from vllm_recycle.kernels.triton.trees import DeviceTrees


class V2Speculator(BaseSpeculator):
    """What makes drafts when V2 asks for them, in the place of the host method's speculator.

    Attributes:
        draft_attn_layer_names: layers of a draft model, which see no trees of the target's.
        times: of steps, to be reported once; None where sizes are not chosen, or it was reported.
        num_scheduled: how many tokens this step is to draft, where vLLM does not say it when it
            asks for them.

    """

    draft_attn_layer_names: set[str] = set()  # noqa: RUF012 - set anew by vLLM's own
    times: GraphTimes | None = None
    num_scheduled: int | None = None

    def update_requests(self, scheduler_output: Any) -> None:
        """Take in which requests start, and which blocks are given out."""

    @abstractmethod
    def take_report(self) -> DraftReport | None:
        """What the scheduler is to know and was not told yet."""

    @abstractmethod
    def drafting_runs(self) -> dict[int, Callable[[], Any]]:
        """What drafts, by how many requests that is for at most, to be timed."""

    def alone_runs(self) -> dict[int, Callable[[], Any]]:
        """The same without a round of the draft model, where there is one."""
        return {}

    def plain_runs(self) -> dict[int, Callable[[], Any]]:
        """What runs where nothing is drafted, if anything."""
        return {}


class V2Drafter(Drafter):
    """What the V2 runner asks for; nothing of it waits for the device.

    Args:
        vllm_config: of the engine.
        device: where all of it lives.
        req_states: the runner's, whose texts are read.

    Attributes:
        trees: the topology of all requests' drafts, by `req_state_idx`.
        best_token_ids: integer [logit rows], the most probable token of each row that was observed;
            None where the method does not look for it.

    """

    trees: DeviceTrees
    best_token_ids: torch.Tensor | None = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        super().__init__(vllm_config)
        self.device, self.req_states = device, req_states

    @abstractmethod
    def make_speculator(self, may_speculate: np.ndarray) -> V2Speculator:
        """What drafts; `may_speculate`, bool [max_num_reqs] on the host, is kept by the runner."""

    def warm_up(self) -> None:
        """Compile what requests may ask for and steps that warm up do not; it is forgotten then."""

    def as_if_serving(self) -> AbstractContextManager[None]:
        """While drafting is timed: it reads and makes what it does in serving.

        What this teaches is nonsense, and forgotten when the engine has started.
        """
        return nullcontext()

    @abstractmethod
    def observe(self, input_batch: Any, row_token_ids: torch.Tensor, logits: torch.Tensor) -> None:
        """Take in a step, before its tokens are sampled.

        Args:
            input_batch: of the step.
            row_token_ids: int64 [logit rows], -1 where a row was not filled.
            logits: [logit rows, vocab], raw.

        """

    def accept(
        self,
        input_batch: Any,
        row_token_ids: torch.Tensor,
        output: Any,
        path: torch.Tensor | None,
    ) -> None:
        """Take in what was accepted of the step that was observed.

        Args:
            input_batch: of the step.
            row_token_ids: int64 [logit rows], -1 where a row was not filled.
            output: what was sampled, vLLM's `SamplerOutput`.
            path: int64 [num_reqs, path], the visited rows; None where no request had a tree.

        """

    def release(self, req_state_idx: int) -> None:
        """A request ended: finished, aborted or preempted."""
