"""The asynchronous scheduler: who is drafted for, and that nobody starves; no model runs.

The scheduler is vLLM's with ours on top, configured by a real engine. Steps are scheduled ahead, as
`EngineCore` does it; what the model would sample is drawn here.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from engines import TOKEN_RECYCLING
from schedulers import make_request, schedulers
from vllm.v1.outputs import ModelRunnerOutput

from vllm_recycle.integration.draft_limits import MAX_TREE_ROWS, halving_schedule
from vllm_recycle.integration.scheduler import AsyncTreeScheduler

NODES = 80
MAX_TOKENS = 40
BUDGET = 1024


# How many nodes a request has, by the size of the batch.
TABLES = {"table": halving_schedule(NODES, MAX_TREE_ROWS), "one size": [(1, 1 << 20, NODES)]}


@pytest.fixture(scope="module", params=TABLES)
def make_scheduler(request):
    method, table = {**TOKEN_RECYCLING, "max_nodes": NODES}, TABLES[request.param]
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": BUDGET, "max_model_len": 256}
    with schedulers(method, table, **settings) as make:
        yield make


def run(scheduler: AsyncTreeScheduler, params: list[dict]) -> list[dict[str, int]]:
    """Serve requests to their end; how many nodes each had in each step that it was in."""
    generator = random.Random(0)
    for index, given in enumerate(params):
        request = make_request(str(index), [5, 6, 7], max_tokens=MAX_TOKENS, **given)
        scheduler.add_request(request)
    in_flight: deque = deque()
    steps = []
    while scheduler.has_unfinished_requests() or in_flight:
        step = scheduler.schedule()
        if step.total_num_scheduled_tokens:
            assert step.total_num_scheduled_tokens <= BUDGET
            in_flight.append(step)
            steps.append({name: num_nodes(step, name) for name in step.num_scheduled_tokens})
        if len(in_flight) == 2 or not step.total_num_scheduled_tokens:
            finish(scheduler, in_flight.popleft(), generator)
        assert len(steps) < 1000, "a request waits for ever"
    return steps


def finish(scheduler: AsyncTreeScheduler, step, generator: random.Random) -> None:
    """Give the step's tokens back: some of each draft are accepted."""
    names = list(step.num_scheduled_tokens)
    accepted = [generator.randint(0, min(4, num_nodes(step, name))) for name in names]
    sampled = [[9] * (1 + count) for count in accepted]
    places = {name: place for place, name in enumerate(names)}
    scheduler.update_from_output(step, ModelRunnerOutput(names, places, sampled))


def num_nodes(step, name: str) -> int:
    return len(step.scheduled_spec_decode_tokens.get(name, ()))


def test_one_request_has_the_whole_tree(make_scheduler):
    steps = run(make_scheduler(), [{}])
    assert steps[0] == {"0": 0}
    assert len(steps) > 5
    assert all(step == {"0": NODES} for step in steps[1:])


def test_nobody_starves_among_256_requests(make_scheduler):
    steps = run(make_scheduler(), [{}] * 256)
    everybody = [step for step in steps if len(step) == 256]
    # From the first step on all of them are in every step, until the first has ended.
    assert len(everybody) >= MAX_TOKENS // 6
    assert steps[: len(everybody)] == everybody
    # One size would be 81 rows each; there is room for less, the same for all.
    assert all(len(set(step.values())) == 1 and max(step.values()) <= 2 for step in everybody)


def test_a_request_that_opts_out_gets_no_drafts_and_the_others_do(make_scheduler):
    steps = run(make_scheduler(), [{"extra_args": {"speculate": False}}, {}])
    assert {step.get("0", 0) for step in steps} == {0}
    assert max(step.get("1", 0) for step in steps) == NODES
