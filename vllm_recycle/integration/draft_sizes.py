"""How many nodes the trees of a step have on Model Runner V2, where it is chosen step by step.

vLLM looks the number up by the number of requests that a step has. In the place of its table
`DraftSizes` chooses it by those requests that draft. What is known comes with the output of earlier
steps, from the first rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_recycle.core.size_chooser import DraftChooser, StepSeconds
from vllm_recycle.integration.draft_limits import MAX_TREE_ROWS, sizes_of_batches
from vllm_recycle.integration.options import chooses_sizes, table_of

# Steps after which requests are looked at again, though none came or went; and how many, of those
# that there are, a step may look at where some did.
LOOK_AGAIN_AFTER, LOOKED_AT_A_STEP = 16, 32


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What a runner says of its trees; `draft_report` of vLLM's output of the step behind it.

    Attributes:
        worth: float32 [nodes], of each node, summed over requests; in memory that the device
            writes, to be read when the output is there.
        num_reqs: how many these are.
        alone: whether they grew without a round of a draft model that there is.
        times: of steps, once.
    """

    worth: np.ndarray
    num_reqs: int
    alone: bool = False
    times: StepSeconds | None = None


def sizes_of(vllm_config: Any) -> list[list[int]]:
    """The nodes that trees may have, by how many requests have one, largest first, without 0."""
    num_nodes = vllm_config.speculative_config.num_speculative_tokens
    max_num_reqs = vllm_config.scheduler_config.max_num_seqs
    table = build_dynamic_sd_schedule_lookup(table_of(vllm_config), max_num_reqs, num_nodes)
    if not chooses_sizes(vllm_config):
        return [[nodes] if nodes else [] for nodes in table]
    sizes = sizes_of_batches(num_nodes, _max_rows(vllm_config), max_num_reqs)
    # What is used before anything is known is among them.
    return [
        sorted({*some, *([nodes] if nodes else [])}, reverse=True)
        for some, nodes in zip(sizes, table, strict=True)
    ]


def _max_rows(vllm_config: Any) -> int:
    """Of a step with trees; one of more has no full graph."""
    return vllm_config.compilation_config.max_cudagraph_capture_size or MAX_TREE_ROWS


class DraftSizes:
    """Chooses the size of the trees that a step drafts, and the next one verifies.

    Made for a `TreeScheduler` that vLLM has made, with its table still in place.
    """

    def __init__(self, scheduler: Any, vllm_config: Any) -> None:
        self.scheduler = scheduler
        self.table = scheduler.dynamic_sd_lookup
        self.sizes_of_batch = sizes_of(vllm_config)
        # Graphs are captured for batches that draft as a whole: none is larger.
        most = [batch * (1 + sizes[0]) for batch, sizes in enumerate(self.sizes_of_batch) if sizes]
        self.max_rows = min(_max_rows(vllm_config), max(most, default=0))
        self.max_draft_tokens = scheduler.room.max_draft_tokens
        self.chooser = DraftChooser()
        self.times = StepSeconds()
        self.prompt_rows = [0, 0]  # of the last two steps
        # Of the running requests, at the last look: how many draft, and their mean length.
        self.drafting, self.context = 0, 0
        self.num_running = self.steps_since_look = 0
        # What steps take by whether trees grow alone, and their size, where steps are like this:
        # mostly the same ones come again.
        self._seconds: dict[bool, dict[int, float]] = {}
        self._given: dict[str, int] = {}

    def __getitem__(self, num_reqs: int) -> int:
        """How many nodes the trees have that are drafted in a step of so many requests.

        It is asked for once per step. Where nothing is known of steps like the next one, since they
        have no graph or none was timed, the size stays what it was.
        """
        self._count_requests()
        self.chooser.hold()
        # Those that came since the look may all draft, and must not have as large trees as few.
        came = max(0, len(self.scheduler.running) - self.num_running)
        drafting = min(self.drafting + came, num_reqs)
        if not drafting:
            return 0
        kinds = (False, True) if self.times.alone else (False,)
        if not (self.times.graphs and self.chooser.seen(kinds)):
            return self.table[num_reqs]
        given = {"requests": num_reqs, "drafting": drafting, "context": self.context}
        if given != self._given:
            self._given, sizes = given, self._sizes(num_reqs, drafting)
            for alone in kinds:
                seconds = {nodes: self.times.at(nodes, **given, alone=alone) for nodes in sizes}
                self._seconds[alone] = {n: s for n, s in seconds.items() if s is not None}
        # A step with a prompt has no graph. One prompt that comes in between changes nothing.
        if min(self.prompt_rows) or 0 not in self._seconds[False]:
            size = self.table[num_reqs] if self.chooser.size is None else self.chooser.size
            return max(n for n in self._sizes(num_reqs, drafting) if n <= size)
        return self.chooser.choose(self._seconds, num_reqs=num_reqs, num_drafting=drafting)

    def _sizes(self, num_reqs: int, drafting: int) -> list[int]:
        """The sizes that trees may have which so many of the requests have, 0 among them."""
        most = max(0, min(self.max_draft_tokens, self.max_rows - num_reqs)) // drafting
        sizes = self.sizes_of_batch[drafting]
        fitting = [nodes for nodes in sizes if nodes <= most]
        return [*(fitting or [min(most, nodes) for nodes in sizes[-1:]]), 0]

    def _count_requests(self) -> None:
        """Look at the running requests, where these may be others than at the last look.

        Between looks texts grow by a little, a request may end to reason, and of many a few go.
        """
        running = self.scheduler.running
        self.steps_since_look += 1
        is_same = len(running) == self.num_running and not any(self.prompt_rows)
        steps = LOOK_AGAIN_AFTER if is_same else len(running) // LOOKED_AT_A_STEP
        if self.steps_since_look < min(steps, LOOK_AGAIN_AFTER):
            return
        self.num_running, self.steps_since_look = len(running), 0
        may_speculate = self.scheduler.may_speculate
        self.drafting = sum(not one.is_prefill_chunk and may_speculate(one) for one in running)
        self.context = sum(one.num_tokens for one in running) // max(1, len(running))

    def see_step(self, scheduler_output: Any) -> None:
        """Take in which rows of a step are prompts', and say in it how it drafts."""
        scheduler_output.drafts_alone = self.chooser.alone
        drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        rows = scheduler_output.total_num_scheduled_tokens - drafts
        self.prompt_rows = [self.prompt_rows[1], rows - len(scheduler_output.num_scheduled_tokens)]

    def learn(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Take in a step: what was accepted, and what was reported with it."""
        report: DraftReport | None = getattr(model_runner_output, "draft_report", None)
        if report is None:
            return
        chooser = self.chooser.choosers[report.alone]
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts:  # those that the report is of
            # Without a draft it is one token, or none in the middle of a prompt.
            sampled = model_runner_output.sampled_token_ids
            tokens, requests = sum(map(len, sampled)), sum(map(bool, sampled))
            sizes = map(len, drafts.values())
            chooser.verified(sizes, tokens - requests, num_reqs=max(1, requests))
        chooser.learn(report.worth, report.num_reqs)
        if report.times is not None:
            self.take_times(report.times)

    def take_times(self, times: StepSeconds) -> None:
        """Price steps by these from now on."""
        self.times, self._given, self._seconds = times, {}, {}
