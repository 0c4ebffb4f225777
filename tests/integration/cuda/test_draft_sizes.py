"""The scheduler and the sizes that it chooses: what it is told, and what it schedules.

The scheduler is vLLM's with ours on top, configured by a real engine; what a model would sample and
report is made here.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mode
from typing import Any

import numpy as np
import pytest
from vllm.v1.outputs import ModelRunnerOutput

from tests.integration.cuda import schedulers
from tests.integration.cuda.schedulers import make_request
from tests.integration.engines import TOKEN_RECYCLING, core, engine
from vllm_recycle.core.curve import TREES, TRUNKS
from vllm_recycle.core.graph_curve import GraphShape, GraphTimes
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.options.limits import MAX_TREE_ROWS, halving_schedule
from vllm_recycle.integration.schedule.draft_sizes import DraftReport, DraftSizes
from vllm_recycle.integration.schedule.scheduler import AsyncTreeScheduler, TreeScheduler

NODES = 80
BUDGET = 256
TABLE = halving_schedule(NODES, MAX_TREE_ROWS)
# Graphs of any number of rows: a row more costs nothing, or as much as the first.
ROWS = range(1, 513)
DRAFTING: dict[str, dict[int, float]] = {TREES: {}}
FREE = GraphTimes({GraphShape(rows, rows, rows): (1e-2, 0.0) for rows in ROWS}, DRAFTING)
DEAR = GraphTimes({GraphShape(rows, rows, rows): (1e-2 * rows, 0.0) for rows in ROWS}, DRAFTING)
METHOD = {**TOKEN_RECYCLING, "max_nodes": NODES, "num_speculative_tokens_per_batch_size": TABLE}
SEATS = 64
SETTINGS = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET, "max_model_len": 512}
SETTINGS |= {"block_size": 32, "kv_cache_memory_bytes": 256 << 20}
OPTED_OUT = {"extra_args": {"speculate": False}}
WORTH = [0.9, 0.5, 0.3, *[0.01] * (NODES - 3)]


@pytest.fixture(scope="module")
def make_scheduler():
    with engine(METHOD, **SETTINGS) as llm:

        def make(kind: Any = AsyncTreeScheduler, *, chooses: bool = True) -> TreeScheduler:
            config = core(llm).vllm_config
            settings = replace(settings_of(config), chooses_sizes=chooses)
            config.additional_config = settings.put(config.additional_config)
            scheduler = schedulers.make_scheduler(core(llm), kind)
            scheduler.use_v2_model_runner = True
            return scheduler

        yield make


@pytest.fixture(autouse=True)
def _seconds_as_measured(monkeypatch):
    monkeypatch.setattr(DraftSizes, "_seconds", schedulers.seconds_as_measured)


def add(scheduler: TreeScheduler, count: int, **given) -> None:
    for index in range(count):
        name = f"{len(scheduler.requests)}"
        scheduler.add_request(make_request(name, [5, index], max_tokens=400, **given))


def step(scheduler: TreeScheduler, report: DraftReport | None = None, *, accepted: int = 0) -> int:
    """Make a step; returns the size that it drafts."""
    output = scheduler.schedule()
    sampled = {
        name: [] if scheduler.requests[name].is_prefill_chunk else [9] * (1 + min(accepted, nodes))
        for name, nodes in nodes_of(output).items()
    }
    places = {name: place for place, name in enumerate(sampled)}
    result = ModelRunnerOutput([*sampled], places, [*sampled.values()])
    if report is not None:
        result.draft_report = report
    scheduler.update_from_output(output, result)
    return output.num_spec_tokens_to_schedule


def settle(scheduler: TreeScheduler, *, accepted: int = 2) -> int:
    """Make steps until plain ones are known; returns the size that comes mostly then."""
    return mode([step(scheduler, accepted=accepted) for _ in range(48)][40:])


def report_of(times: GraphTimes | None, requests: int, *, kind: str = TREES) -> DraftReport:
    return DraftReport(requests * np.array(WORTH, dtype=np.float32), requests, kind, times)


def watch(scheduler: TreeScheduler) -> list[Any]:
    """The outputs of the scheduler, of all steps from now on."""
    schedule, seen = scheduler.schedule, []

    def watched() -> Any:
        seen.append(schedule())
        assert seen[-1].total_num_scheduled_tokens <= BUDGET
        return seen[-1]

    scheduler.schedule = watched
    return seen


def nodes_of(output: Any) -> dict[str, int]:
    """How many nodes each request of a step has."""
    drafts = output.scheduled_spec_decode_tokens
    return {name: len(drafts.get(name, ())) for name in output.num_scheduled_tokens}


@pytest.mark.parametrize("has_one_size", [False, True])
def test_nobody_starves_among_many_requests(make_scheduler, has_one_size):
    scheduler = make_scheduler(chooses=False)
    if has_one_size:
        scheduler.dynamic_sd_lookup = [NODES] * (1 + SEATS)
    steps = watch(scheduler)
    add(scheduler, SEATS)
    for _ in range(20):
        step(scheduler, accepted=4)
    seen = [*map(nodes_of, steps)]
    assert all(len(nodes) == SEATS for nodes in seen)
    # One size would be 81 rows each; there is room for less, the same for all.
    assert all(len(set(nodes.values())) == 1 and max(nodes.values()) <= 2 for nodes in seen)
    assert max(seen[-1].values()) > 0


@pytest.mark.parametrize(
    ("chooses", "times"),
    [
        pytest.param(True, None, id="gains without times say nothing"),
        pytest.param(True, GraphTimes(drafting={TREES: {64: 1.0}}), id="without graphs"),
        pytest.param(False, DEAR, id="a user's"),
    ],
)
def test_the_table_is_followed_before_anything_is_known(make_scheduler, chooses, times):
    scheduler = make_scheduler(chooses=chooses)
    assert (scheduler.sizes is not None) == chooses
    add(scheduler, 4)
    reports = [None, report_of(times, 4), report_of(times, 4), None]
    assert [step(scheduler, report) for report in reports] == [40] * 4


@pytest.mark.parametrize("kind", [TreeScheduler, AsyncTreeScheduler])
def test_times_and_gains_decide(make_scheduler, kind):
    scheduler = make_scheduler(kind)
    add(scheduler, 4)
    assert step(scheduler, report_of(FREE, 4)) == 40  # chosen before it was reported
    # Half of the budget of tokens are drafts'.
    assert settle(scheduler) == 32
    assert step(scheduler, report_of(DEAR, 4), accepted=2) == 32
    assert settle(scheduler) == 0
    assert step(scheduler) == 0
    scheduler.sizes.take_times(FREE)
    assert settle(scheduler) > 0


def test_a_size_stays_what_it_was_where_steps_have_no_graph(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 4)
    step(scheduler, report_of(FREE, 4))
    assert settle(scheduler) == 32
    # No plain graph has room for four.
    times = GraphTimes({GraphShape(2, 2, 1): (1.0, 0.0)}, DRAFTING)
    scheduler.sizes.take_times(times)
    assert [step(scheduler, accepted=2) for _ in range(3)] == [32] * 3
    # But what a batch has no room for does not stay.
    add(scheduler, 4)
    assert [step(scheduler, accepted=2) for _ in range(2)][-1] == 16


AMONG_OTHERS = [(33, 33, 1), (70, 64, 41), (256, 64, 41)]


@pytest.mark.parametrize(
    ("drafting", "others", "seconds", "expected"),
    [
        pytest.param(0, 4, [], 0, id="none drafts"),
        # Half of the budget, and a row for each of the others.
        pytest.param(3, 30, [], 42, id="free rows"),
        # 33 rows and 3 x 12 fill the second graph.
        pytest.param(3, 30, [1.0, 1.05, 3.0], 12, id="a graph is filled"),
        # A size whose step has no graph is none, however cheap.
        pytest.param(3, 30, [1.0], 0, id="no graph for a tree"),
    ],
)
def test_trees_are_sized_by_the_requests_that_draft(
    make_scheduler, drafting, others, seconds, expected
):
    scheduler = make_scheduler()
    add(scheduler, drafting)
    add(scheduler, others, **OPTED_OUT)
    pairs = zip(AMONG_OTHERS, seconds, strict=False)
    graphs = {GraphShape(*shape): (time, 0.0) for shape, time in pairs}
    step(scheduler, report_of(GraphTimes(graphs, DRAFTING) if graphs else FREE, 4))
    assert settle(scheduler) == expected


def test_requests_that_come_between_two_looks_are_counted_on(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 2)
    step(scheduler, report_of(FREE, 2))
    assert settle(scheduler, accepted=1) * 2 > scheduler.room.max_draft_tokens // 2
    add(scheduler, 62)
    sizes = [step(scheduler) for _ in range(4)]
    assert len(scheduler.running) == 64
    assert all(size * 64 <= scheduler.room.max_draft_tokens for size in sizes)


def test_a_step_says_how_it_drafts_and_what_comes_back_is_that_kind_s(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 4)
    steps = watch(scheduler)
    # A round of the draft model takes as long as nine steps, growing alone takes no time.
    times = replace(FREE, drafting={TRUNKS: {64: 9e-2}, TREES: {64: 0.0}})
    step(scheduler, report_of(times, 4, kind=TRUNKS), accepted=2)
    for _ in range(64):  # what was never seen is looked at
        step(scheduler, report_of(None, 4, kind=steps[-1].step_note.kind), accepted=2)
    kinds = [output.step_note.kind for output in steps]
    assert kinds[0] == TRUNKS
    assert kinds[-4:] == [TREES] * 4
    assert scheduler.sizes.chooser.trusts[TREES].factor != 1.0


def test_a_size_stays_what_it_was_where_prompts_come_one_after_the_other(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 2)
    step(scheduler, report_of(FREE, 2))
    assert settle(scheduler, accepted=1) == 64
    counted_on = []
    for index in range(3):
        prompt = [5 + index, *range(400)]
        scheduler.add_request(make_request(f"long {index}", prompt, max_tokens=60))
        if min(scheduler.sizes.prompt_rows):
            scheduler.sizes.take_times(DEAR)
        size = step(scheduler, accepted=1)
        counted_on.append(min(scheduler.sizes.prompt_rows))
    assert counted_on[0] <= 4
    assert counted_on[-1] > BUDGET / 2
    assert size > 0
