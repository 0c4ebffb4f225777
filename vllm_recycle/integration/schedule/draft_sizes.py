"""How many nodes the trees of a step have on Model Runner V2, where it is chosen step by step.

vLLM looks the number up in a table, by the requests of a step. `DraftSizes` stands in its place,
and asks the chooser (`core.choose`). The worths of trees come with the output of an earlier step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_recycle.core.choose import Chooser
from vllm_recycle.core.curve import TREES, TRUNKS, Load
from vllm_recycle.core.explore import FADE
from vllm_recycle.core.graph_curve import GraphCurve, GraphTimes
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.limits import MAX_TREE_ROWS, sizes_of_batches

# Steps that are scheduled and not known yet when the size of one is chosen.
STEPS_AHEAD = 2
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
        kind: of the trees.
        times: of graphs, once.
    """

    worth: np.ndarray
    num_reqs: int
    kind: str = TREES
    times: GraphTimes | None = None


def sizes_of(vllm_config: Any) -> list[list[int]]:
    """The nodes that trees may have, by how many requests have one, largest first, without 0."""
    num_nodes = vllm_config.speculative_config.num_speculative_tokens
    max_num_reqs = vllm_config.scheduler_config.max_num_seqs
    table = build_dynamic_sd_schedule_lookup(
        settings_of(vllm_config).table, max_num_reqs, num_nodes
    )
    if not settings_of(vllm_config).chooses_sizes:
        return [[nodes] if nodes else [] for nodes in table]
    sizes = sizes_of_batches(num_nodes, _max_rows(vllm_config), max_num_reqs)
    # What is used before anything is known is among them.
    return [
        sorted({*tree_sizes, *([nodes] if nodes else [])}, reverse=True)
        for tree_sizes, nodes in zip(sizes, table, strict=True)
    ]


def _max_rows(vllm_config: Any) -> int:
    """Of a step with trees; one of more has no full graph."""
    return vllm_config.compilation_config.max_cudagraph_capture_size or MAX_TREE_ROWS


class MeanWorth:
    """The worth of each node of a tree, on average over the last steps and their requests.

    Attributes:
        worth: float64 [nodes]; None before a tree was grown.

    """

    def __init__(self) -> None:
        self.worth: np.ndarray | None = None
        self.step, self._weight = 0, 0.0

    def learn(self, worth: np.ndarray, num_reqs: int, step: int) -> None:
        """Take in trees of a step: the worth of each node, summed over their requests."""
        # So that what is seen after many steps without a look is believed at once.
        faded_weight = self._weight * (1.0 - FADE) ** (step - self.step)
        self.step, self._weight = step, min(faded_weight + 1.0, 1.0 / FADE)
        step_worth = worth.astype(np.float64) / num_reqs
        mean_worth = step_worth if self.worth is None else self.worth
        self.worth = mean_worth + (step_worth - mean_worth) / self._weight


class DraftSizes:
    """Chooses the size of the trees that a step drafts, and the next one verifies.

    Made for a `TreeScheduler` that vLLM has made, with its table still in place.

    Attributes:
        kind: of the trees that the step drafts.
        is_first: whether no size was chosen yet.
        curve: of the graphs that were timed.
        chooser: what chooses, when there are any.

    """

    def __init__(self, scheduler: Any, vllm_config: Any) -> None:
        self.scheduler = scheduler
        self.table = scheduler.dynamic_sd_lookup
        self.num_nodes = vllm_config.speculative_config.num_speculative_tokens
        self.sizes_of_batch = sizes_of(vllm_config)
        # Graphs are captured for batches that draft as a whole: none is larger.
        rows = [batch * (1 + sizes[0]) for batch, sizes in enumerate(self.sizes_of_batch) if sizes]
        self.max_rows = min(_max_rows(vllm_config), max(rows, default=0))
        self.max_draft_tokens = scheduler.room.max_draft_tokens
        self.curve = GraphCurve(GraphTimes())
        self.chooser: Chooser | None = None
        self.worths: dict[str, MeanWorth] = {}
        self.kind = TRUNKS  # if there is a draft model
        self.is_first = True
        self.num_steps = 0
        self.prompt_rows = [0, 0]  # of the last two steps
        # Of the running requests, at the last look: how many draft, and their mean length.
        self.drafting, self.context = 0, 0
        self.num_running = self.steps_since_look = 0
        self._sizes_of: dict[tuple[int, int], list[int]] = {}
        self._last_output: tuple[float, int] | None = None  # when it came, requests of the step

    def __getitem__(self, num_reqs: int) -> int:
        """How many nodes the trees have that are drafted in a step of so many requests.

        It is asked for once per step. Before graphs were timed, and before the first step that has
        one, it is what the table says.
        """
        self._count_requests()
        # Those that came since the look may all draft, and must not have as large trees as few.
        num_new_reqs = max(0, len(self.scheduler.running) - self.num_running)
        drafting = min(self.drafting + num_new_reqs, num_reqs)
        if not drafting:
            return 0
        worths = {kind: mean.worth for kind, mean in self.worths.items() if mean.worth is not None}
        if self.chooser is None or not worths:
            return self.table[num_reqs]
        load, sizes = Load(num_reqs, self.context, drafting), self._sizes(num_reqs, drafting)
        # A step with a prompt has no graph. One prompt that comes in between changes nothing.
        has_graph = not min(self.prompt_rows) and np.isfinite(self.chooser.curve.plain(load))
        self.is_first &= not has_graph
        if self.is_first:
            return max(size for size in sizes if size <= self.table[num_reqs])
        self.kind, size = self.chooser.choose_size(load, worths, sizes, is_known=has_graph)
        if has_graph and not size:
            # Trees grow that nobody verifies, now and then: of the kind that was not seen longest.
            self.kind = min(self.worths, key=lambda kind: self.worths[kind].step)
        return size

    def _sizes(self, num_reqs: int, drafting: int) -> list[int]:
        """The sizes that trees may have which so many of the requests have, ascending from 0."""
        if (sizes := self._sizes_of.get((num_reqs, drafting))) is None:
            rows = max(0, min(self.max_draft_tokens, self.max_rows - num_reqs))
            max_nodes = min(self.num_nodes, rows // drafting)
            filling = self.curve.graph_sizes(num_reqs, drafting) or self.sizes_of_batch[drafting]
            sizes = sorted({0, *(min(max_nodes, nodes) for nodes in filling)})
            self._sizes_of[num_reqs, drafting] = sizes
        return sizes

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
        self.drafting = sum(not req.is_prefill_chunk and may_speculate(req) for req in running)
        self.context = sum(req.num_tokens for req in running) // max(1, len(running))

    def see_step(self, scheduler_output: Any) -> None:
        """Take in which rows of a step are prompts'."""
        drafts = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        rows = scheduler_output.total_num_scheduled_tokens - drafts
        self.prompt_rows = [self.prompt_rows[1], rows - len(scheduler_output.num_scheduled_tokens)]
        self.num_steps += 1

    def learn(self, scheduler_output: Any, model_runner_output: Any) -> None:
        """Take in a step: what was accepted, how long it took, and what was reported with it."""
        report: DraftReport | None = getattr(model_runner_output, "draft_report", None)
        seconds = self._seconds(scheduler_output)
        # Without a draft it is one token, or none in the middle of a prompt.
        sampled = model_runner_output.sampled_token_ids
        requests = sum(map(bool, sampled))
        if self.chooser is not None and requests:
            drafts = scheduler_output.scheduled_spec_decode_tokens
            sizes = [*map(len, drafts.values())]
            kind, expected = TREES if sizes else None, None
            if sizes and report is not None:
                kind = report.kind
                if (worth := self.worths[kind].worth) is not None:
                    expected = float(np.append(0.0, worth.cumsum())[sizes].sum())
            elif sizes:  # some of the trees had to do without a trunk
                seconds = None
            self.chooser.served(
                kind,
                Load(requests, self.context, len(drafts)),
                requests + sum(sizes),
                tokens=sum(map(len, sampled)),
                seconds=seconds,
                expected=expected,
            )
        if report is None:
            return
        if report.num_reqs:
            mean_worth = self.worths.setdefault(report.kind, MeanWorth())
            mean_worth.learn(report.worth, report.num_reqs, self.num_steps)
        if report.times is not None:
            self.take_times(report.times)

    def _seconds(self, scheduler_output: Any) -> float | None:
        """Seconds of a step, from the output before to its own; None where other things happened.

        The device has the next step when it ends one.
        """
        now, last_step = time.perf_counter(), self._last_output
        requests = len(scheduler_output.num_scheduled_tokens)
        drafts = scheduler_output.scheduled_spec_decode_tokens.values()
        if scheduler_output.total_num_scheduled_tokens > requests + sum(map(len, drafts)):
            self._last_output = None  # prompts
            return None
        self._last_output = now, requests
        return now - last_step[0] if last_step is not None and last_step[1] == requests else None

    def take_times(self, times: GraphTimes) -> None:
        """Price steps by these from now on."""
        if not times.graphs:
            return
        max_tree_rows = 1 + max((sizes[0] for sizes in self.sizes_of_batch if sizes), default=0)
        max_rows = dict.fromkeys(times.drafting, max_tree_rows)
        self.curve, self.is_first = GraphCurve(times), True
        self.chooser = Chooser(self.curve, max_rows, ahead=STEPS_AHEAD)
        self._sizes_of.clear()
        self.kind = next(iter(times.drafting))
        for kind in times.drafting:
            self.worths.setdefault(kind, MeanWorth())
