"""The scheduler and the sizes that it chooses: what it is told, and what it schedules.

The scheduler is vLLM's with ours on top, configured by a real engine; what a model would sample and
report is made here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import mode
from typing import Any

import numpy as np
import pytest
from engines import TOKEN_RECYCLING
from schedulers import make_request, schedulers
from vllm.v1.outputs import ModelRunnerOutput

from vllm_recycle.core.curve import TREES, TRUNKS, Load
from vllm_recycle.core.graph_curve import GraphShape, GraphTimes
from vllm_recycle.integration.draft_limits import MAX_TREE_ROWS, halving_schedule
from vllm_recycle.integration.draft_sizes import DraftReport, DraftSizes
from vllm_recycle.integration.scheduler import AsyncTreeScheduler, TreeScheduler

NODES = 80
BUDGET = 256
TABLE = halving_schedule(NODES, MAX_TREE_ROWS)
# Graphs of any number of rows: a row more costs nothing, or as much as the first.
ROWS = range(1, 513)
DRAFTING: dict[str, dict[int, float]] = {TREES: {}}
FREE = GraphTimes({GraphShape(rows, rows, rows): (1e-2, 0.0) for rows in ROWS}, DRAFTING)
DEAR = GraphTimes({GraphShape(rows, rows, rows): (1e-2 * rows, 0.0) for rows in ROWS}, DRAFTING)
SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": BUDGET, "max_model_len": 512}
OPTED_OUT = {"extra_args": {"speculate": False}}
WORTH = [0.9, 0.5, 0.3, *[0.01] * (NODES - 3)]


@pytest.fixture(scope="module")
def make_scheduler():
    with schedulers({**TOKEN_RECYCLING, "max_nodes": NODES}, TABLE, **SETTINGS) as make:
        yield partial(make, chooses=True)


@pytest.fixture(autouse=True)
def _seconds_as_measured(monkeypatch):
    """Steps take what was measured of them."""

    def seconds(sizes: DraftSizes, output: Any) -> float | None:
        if sizes.chooser is None:
            return None
        rows = np.array([output.total_num_scheduled_tokens])
        load, curve = Load(len(output.num_scheduled_tokens)), sizes.chooser.curve
        return float(curve.measured(TREES, load, rows)[0])

    monkeypatch.setattr(DraftSizes, "_seconds", seconds)


def add(scheduler: TreeScheduler, count: int, **given) -> None:
    for index in range(count):
        name = f"{len(scheduler.requests)}"
        scheduler.add_request(make_request(name, [5, index], max_tokens=400, **given))


def step(scheduler: TreeScheduler, report: DraftReport | None = None, *, accepted: int = 0) -> int:
    """Make a step; returns the size that it drafts."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    places = {name: place for place, name in enumerate(names)}
    drafts = output.scheduled_spec_decode_tokens
    sampled = [
        [9] * (1 + min(accepted, len(drafts.get(name, ()))))
        if not scheduler.requests[name].is_prefill_chunk
        else []
        for name in names
    ]
    result = ModelRunnerOutput(names, places, sampled)
    if report is not None:
        result.draft_report = report
    scheduler.update_from_output(output, result)
    return output.num_spec_tokens_to_schedule


def settle(scheduler: TreeScheduler, *, accepted: int = 2) -> int:
    """Make steps until plain ones are known; returns the size that comes mostly then."""
    return mode([step(scheduler, accepted=accepted) for _ in range(48)][40:])


def report_of(times: GraphTimes | None, requests: int, *, kind: str = TREES) -> DraftReport:
    return DraftReport(requests * np.array(WORTH, dtype=np.float32), requests, kind, times)


def watch_drafts(scheduler: TreeScheduler) -> list[dict[str, int]]:
    """How many nodes each request has in each step that it is in, from now on."""
    schedule, seen = scheduler.schedule, []

    def watched() -> Any:
        output = schedule()
        assert output.total_num_scheduled_tokens <= BUDGET
        drafts = output.scheduled_spec_decode_tokens
        seen.append({name: len(drafts.get(name, ())) for name in output.num_scheduled_tokens})
        return output

    scheduler.schedule = watched
    return seen


def test_one_request_has_the_whole_tree_beside_one_that_opts_out(make_scheduler):
    scheduler = make_scheduler(chooses=False)
    seen = watch_drafts(scheduler)
    add(scheduler, 1)
    add(scheduler, 1, **OPTED_OUT)
    for _ in range(5):
        step(scheduler, accepted=4)
    assert seen == [{"0": 0, "1": 0}, *[{"0": NODES, "1": 0}] * 4]


@pytest.mark.parametrize("has_one_size", [False, True])
def test_nobody_starves_among_many_requests(make_scheduler, has_one_size):
    scheduler = make_scheduler(chooses=False)
    if has_one_size:
        scheduler.dynamic_sd_lookup = [NODES] * (1 + SETTINGS["max_num_seqs"])
    seen = watch_drafts(scheduler)
    add(scheduler, 64)
    for _ in range(20):
        step(scheduler, accepted=4)
    assert all(len(nodes) == 64 for nodes in seen)
    # One size would be 81 rows each; there is room for less, the same for all.
    assert all(len(set(nodes.values())) == 1 and max(nodes.values()) <= 2 for nodes in seen)
    assert max(seen[-1].values()) > 0


def test_before_anything_is_known_the_table_is_followed(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 4)
    assert [step(scheduler) for _ in range(3)] == [40] * 3
    # Gains without times say nothing.
    assert step(scheduler, report_of(None, 4)) == 40
    assert step(scheduler) == 40


def test_a_user_s_table_is_followed_throughout(make_scheduler):
    scheduler = make_scheduler(chooses=False)
    assert scheduler.sizes is None
    add(scheduler, 4)
    assert [step(scheduler, report_of(DEAR, 4)) for _ in range(3)] == [40] * 3


@pytest.mark.parametrize("kind", [TreeScheduler, AsyncTreeScheduler])
def test_times_and_gains_decide(make_scheduler, kind):
    scheduler = make_scheduler(kind)
    add(scheduler, 4)
    assert step(scheduler, report_of(FREE, 4)) == 40  # chosen before it was reported
    # Half of the budget of tokens are drafts'.
    assert settle(scheduler) == 20
    assert step(scheduler, report_of(DEAR, 4), accepted=2) == 20
    assert settle(scheduler) == 0
    assert step(scheduler) == 0
    scheduler.sizes.take_times(FREE)
    assert settle(scheduler) > 0


def test_without_graphs_the_table_is_followed(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 4)
    timed_drafting_alone = GraphTimes(drafting={TREES: {64: 1.0}})
    assert [step(scheduler, report_of(timed_drafting_alone, 4)) for _ in range(3)] == [40] * 3


def test_a_size_stays_what_it_was_where_steps_have_no_graph(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 4)
    step(scheduler, report_of(FREE, 4))
    assert settle(scheduler) == 20
    # No plain graph has room for four.
    times = GraphTimes({GraphShape(2, 2, 1): (1.0, 0.0)}, DRAFTING)
    scheduler.sizes.take_times(times)
    assert [step(scheduler, accepted=2) for _ in range(3)] == [20] * 3
    # But what a batch has no room for does not stay.
    add(scheduler, 4)
    assert [step(scheduler, accepted=2) for _ in range(2)][-1] == 10


def test_requests_without_drafts_are_not_counted_on(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 4, **OPTED_OUT)
    step(scheduler, report_of(FREE, 4))
    assert [step(scheduler) for _ in range(3)] == [0] * 3


def test_trees_are_sized_by_the_requests_that_draft(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 3)
    add(scheduler, 30, **OPTED_OUT)
    step(scheduler, report_of(FREE, 3))
    # Half of the budget, and a row for each of the others.
    assert settle(scheduler) == 40


def test_trees_are_paid_for_by_the_rows_that_the_step_has(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 3)
    add(scheduler, 30, **OPTED_OUT)
    graphs = {(33, 33, 1): 1.0, (64, 64, 41): 1.05, (256, 64, 41): 3.0}
    timed = {GraphShape(*shape): (seconds, 0.0) for shape, seconds in graphs.items()}
    step(scheduler, report_of(GraphTimes(timed, DRAFTING), 3))
    # 33 rows and 3 x 10 are in the second graph.
    assert settle(scheduler) == 10
    # A size whose step has no graph is none, however cheap.
    scheduler.sizes.take_times(GraphTimes({GraphShape(33, 33, 1): (1.0, 0.0)}, DRAFTING))
    assert settle(scheduler) == 0


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
    made, schedule = [], scheduler.schedule

    def watched_schedule() -> Any:
        output = schedule()
        made.append(output.step_note.kind)
        return output

    scheduler.schedule = watched_schedule
    # A round of the draft model takes as long as nine steps, growing alone takes no time.
    times = replace(FREE, drafting={TRUNKS: {64: 9e-2}, TREES: {64: 0.0}})
    step(scheduler, report_of(times, 4, kind=TRUNKS), accepted=2)
    for _ in range(64):  # what was never seen is looked at
        step(scheduler, report_of(None, 4, kind=made[-1]), accepted=2)
    assert made[0] == TRUNKS
    assert made[-4:] == [TREES] * 4
    assert scheduler.sizes.chooser.trusts[TREES].factor != 1.0


def test_trees_that_are_not_accepted_are_believed_less(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 4)
    step(scheduler, report_of(FREE, 4))
    settle(scheduler)
    trusted = []
    for _ in range(10):
        step(scheduler, report_of(None, 4), accepted=0)
        trusted.append(scheduler.sizes.chooser.trusts[TREES].factor)
    assert trusted[0] < 1.0
    assert trusted[-1] < 0.5
    assert trusted == sorted(trusted, reverse=True)


def test_a_size_stays_what_it_was_where_prompts_come_one_after_the_other(make_scheduler):
    scheduler = make_scheduler()
    add(scheduler, 2)
    step(scheduler, report_of(FREE, 2))
    assert settle(scheduler, accepted=1) == 40
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
