"""How many nodes the trees of a step have on Model Runner V2, where it is chosen step by step.

vLLM looks the number up by the number of requests that a step has. The object here is asked in the
place of its table. What it knows comes with the output of earlier steps, from the first rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_recycle.core.dynamic.sizes import SizeChooser
from vllm_recycle.core.dynamic.step_seconds import StepSeconds
from vllm_recycle.integration.engine_config import (
    ADDITIONAL_CONFIG_KEY,
    CHOOSES_SIZES,
)
from vllm_recycle.integration.row_budget import MAX_TREE_ROWS, sizes_of_batches

# Steps after which requests are looked at again, though none came or went.
LOOK_AGAIN_AFTER = 16


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What a runner says of its trees; `draft_report` of vLLM's output of the step behind it.

    Attributes:
        worth: float32 [nodes], of each node, summed over requests; in memory that the device
            writes, to be read when the output is there.
        num_reqs: how many these are.
        times: of steps, once.

    """

    worth: np.ndarray
    num_reqs: int
    times: StepSeconds | None = None


def chooses_sizes(vllm_config: Any) -> bool:
    """Whether sizes are chosen step by step."""
    return vllm_config.additional_config[ADDITIONAL_CONFIG_KEY][CHOOSES_SIZES]


def sizes_of(vllm_config: Any) -> list[list[int]]:
    """The nodes that trees may have, by the number of requests, largest first, without 0."""
    num_nodes = vllm_config.speculative_config.num_speculative_tokens
    max_num_reqs = vllm_config.scheduler_config.max_num_seqs
    table = build_dynamic_sd_schedule_lookup(
        vllm_config.speculative_config.num_speculative_tokens_per_batch_size,
        max_num_reqs,
        num_nodes,
    )
    if not chooses_sizes(vllm_config):
        return [[nodes] if nodes else [] for nodes in table]
    # A step of more rows has no full graph.
    max_rows = vllm_config.compilation_config.max_cudagraph_capture_size or MAX_TREE_ROWS
    sizes = sizes_of_batches(num_nodes, max_rows, max_num_reqs)
    # What is used before anything is known is among them.
    return [
        sorted({*some, *([nodes] if nodes else [])}, reverse=True)
        for some, nodes in zip(sizes, table, strict=True)
    ]


class DraftSizes:
    """Chooses the size of the trees that a step drafts, and the next one verifies.

    Args:
        scheduler: a `TreeScheduler`, as vLLM has made it.
        vllm_config: of the engine.

    """

    def __init__(self, scheduler: Any, vllm_config: Any) -> None:
        self.scheduler = scheduler
        self.table = scheduler.dynamic_sd_lookup
        self.sizes_of_batch = sizes_of(vllm_config)
        self.max_draft_tokens = scheduler.max_draft_tokens
        self.chooser = SizeChooser()
        self.times: StepSeconds | None = None
        self.prompt_rows = [0, 0]  # of the last two steps
        # Of the running requests, at the last look: how many draft, and their mean length.
        self.drafting, self.context = 0, 0
        self.num_running = self.steps_since_look = 0

    def __getitem__(self, num_reqs: int) -> int:
        """How many nodes the trees have that are drafted in a step of so many requests."""
        if self.times is None or self.chooser.gains is None:
            return self.table[num_reqs]
        self._count_requests()
        if not self.drafting:
            return 0
        given = {
            "requests": num_reqs,
            "drafting": min(self.drafting, num_reqs),
            "context": self.context,
            # One prompt that comes in between is no reason to draft otherwise.
            "other_rows": min(self.prompt_rows),
        }
        most = self.max_draft_tokens // self.drafting
        sizes = [nodes for nodes in self.sizes_of_batch[num_reqs] if nodes <= most]
        seconds = {nodes: self.times.at(nodes, **given) for nodes in [*sizes, 0]}
        return self.chooser.choose(seconds, num_reqs=num_reqs, num_drafting=given["drafting"])

    def _count_requests(self) -> None:
        """Look at the running requests, where these may be others than at the last look.

        Between looks texts grow by a little, and a request may end to reason.
        """
        running = self.scheduler.running
        self.steps_since_look += 1
        is_same = len(running) == self.num_running and not any(self.prompt_rows)
        if is_same and self.steps_since_look < LOOK_AGAIN_AFTER:
            return
        self.num_running, self.steps_since_look = len(running), 0
        may_speculate = self.scheduler.may_speculate
        self.drafting = sum(not one.is_prefill_chunk and may_speculate(one) for one in running)
        self.context = sum(one.num_tokens for one in running) // max(1, len(running))

    def see_prompts(self, scheduler_output: Any) -> None:
        """Take in which rows of a step are prompts'."""
        drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        rows = scheduler_output.total_num_scheduled_tokens - drafts
        self.prompt_rows = [self.prompt_rows[1], rows - len(scheduler_output.num_scheduled_tokens)]

    def learn(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Take in a step: what was accepted, and what was reported with it."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts:
            # Without a draft it is one token, or none in the middle of a prompt.
            sampled = model_runner_output.sampled_token_ids
            accepted = sum(map(len, sampled)) - sum(map(bool, sampled))
            self.chooser.verified(list(map(len, drafts.values())), accepted)
        report: DraftReport | None = getattr(model_runner_output, "draft_report", None)
        if report is not None:
            self.chooser.learn(report.worth.tolist(), report.num_reqs)
            self.times = report.times or self.times
