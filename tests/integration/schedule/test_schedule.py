"""With drafts vLLM schedules what it schedules without: no prompt waits for a draft.

The schedulers are vLLM's and ours on top of it, configured by real engines; no model runs. Nothing
of a draft is accepted here, so that texts grow alike, and the steps of both must be the same but
for the rows of drafts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from tests.integration.cuda.schedulers import make_request, make_scheduler
from tests.integration.engines import (
    GROWN,
    PUBLISHED,
    TOKEN_RECYCLING,
    TRUNK,
    core,
    engine,
    watch_steps,
)
from vllm_recycle.integration.schedule.draft_room import even_limit
from vllm_recycle.integration.schedule.scheduler import (
    AsyncTreeScheduler,
    TreeDraftTokenIds,
    TreeScheduler,
)

BUDGET, MAX_MODEL_LEN, BLOCK_SIZE, SEATS = 192, 192, 32, 5
NUM_BLOCKS = 200  # more than all requests need
METHODS = {
    "trees": TOKEN_RECYCLING | {"budget_share": 1.0},
    "chains": TOKEN_RECYCLING | {"tree": "chain"},
    "ouroboros": PUBLISHED | {"gamma": 3, "window": 2, "guesses": 2, "phrase_length": 4},
}


@dataclass(frozen=True)
class Arrival:
    """A request that comes before a step."""

    step: int
    prompt: int
    answer: int
    priority: int


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 25),
        prompt=st.integers(1, MAX_MODEL_LEN - 31),
        answer=st.integers(1, 30),
        priority=st.integers(0, 1),
    ),
    min_size=2,
    max_size=12,
)


@pytest.fixture(scope="module")
def engine_cores() -> Iterator[dict[str, Any]]:
    """Of an engine without speculation and of one with each method: what schedulers are made of."""
    given = {"max_num_seqs": SEATS, "max_num_batched_tokens": BUDGET, "block_size": BLOCK_SIZE}
    given["max_model_len"] = MAX_MODEL_LEN
    with ExitStack() as stack:
        yield {
            name: core(stack.enter_context(engine(method, **given)))
            for name, method in ({"plain": None} | METHODS).items()
        }


@pytest.fixture(scope="module", params=[True, False], ids=["chunks", "whole prompts"])
def cores(request, engine_cores) -> dict[str, Any]:
    for engine_core in engine_cores.values():
        engine_core.vllm_config.scheduler_config.enable_chunked_prefill = request.param
    return engine_cores


def make(engine_core: Any, kind: type[Scheduler], policy: str, num_blocks: int) -> Scheduler:
    cache = engine_core.scheduler.kv_cache_config
    before, cache.num_blocks = cache.num_blocks, num_blocks
    scheduler = make_scheduler(engine_core, kind)
    cache.num_blocks = before
    scheduler.policy = SchedulingPolicy(policy)
    return scheduler


def serve(scheduler: Scheduler, come: list[Arrival], *, ahead: int) -> list[dict[str, int]]:
    """What each step has of each request beside its draft; and of whom it took the room away."""
    chance, in_flight, steps = random.Random(0), deque[Any](), []
    waiting = sorted(enumerate(come), key=lambda pair: pair[1].step)
    while waiting or scheduler.has_unfinished_requests() or in_flight:
        while waiting and waiting[0][1].step <= len(steps):
            place, one = waiting.pop(0)
            prompt = [place % 3, *range(one.prompt - 1)]  # some begin alike
            request = make_request(str(place), prompt, max_tokens=one.answer)
            request.priority, request.arrival_time = one.priority, float(place)
            scheduler.add_request(request)
        step = scheduler.schedule()
        tokens = step.num_scheduled_tokens
        assert sum(tokens.values()) == step.total_num_scheduled_tokens <= BUDGET
        drafts = step.scheduled_spec_decode_tokens
        steps.append({name: count - len(drafts.get(name, ())) for name, count in tokens.items()})
        if tokens:
            ends = [not scheduler.requests[name].is_prefill_chunk for name in tokens]
            in_flight.append((step, ends))
        if len(in_flight) > ahead or (in_flight and not tokens):
            take_back(scheduler, *in_flight.popleft(), chance)
        assert len(steps) < 600, "a request waits for ever"
    return steps


def take_back(scheduler: Scheduler, step: Any, ends: list[bool], chance: random.Random) -> None:
    """Give the scheduler a token for each text that ended in a step, and drafts of some of them."""
    names = [*step.num_scheduled_tokens]
    places = {name: place for place, name in enumerate(names)}
    sampled = [[9] if is_last else [] for is_last in ends]
    scheduler.update_from_output(step, ModelRunnerOutput(names, places, sampled))
    if isinstance(scheduler, TreeScheduler) and not isinstance(scheduler, AsyncScheduler):
        drafts = [[7] * chance.choice([0, 1, 5, 40]) if is_last else [] for is_last in ends]
        parents = [[*range(len(draft))] for draft in drafts]
        scheduler.update_draft_token_ids(TreeDraftTokenIds(names, drafts, parents))


@pytest.mark.versions
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("ahead", [0, 1], ids=["step by step", "ahead"])
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(come=arrivals)
def test_steps_are_vllms_but_for_drafts(cores, method, ahead, policy, come):
    kinds = ((Scheduler, TreeScheduler), (AsyncScheduler, AsyncTreeScheduler))[ahead]
    plain, ours = (
        serve(make(cores[name], kind, policy, NUM_BLOCKS), come, ahead=ahead)
        for name, kind in zip(("plain", method), kinds, strict=True)
    )
    if method != "ouroboros":  # for which vLLM keeps a token of each request free
        assert ours == plain
    for place in map(str, range(len(come))):
        assert begin(ours, place) <= begin(plain, place) + 1


def begin(steps: list[dict[str, int]], name: str) -> int:
    """The step that a request begins with."""
    return next(at for at, step in enumerate(steps) if name in step)


@pytest.mark.parametrize("method", METHODS)
def test_where_blocks_are_scarce_drafts_keep_hardly_anybody_from_coming(cores, method):
    """A block that a draft has taken stays with its request, which others may miss."""
    chance, steps, late, num_requests = random.Random(0), [0, 0], 0, 0
    for num_blocks in [8, 14, 20] * 10:
        come = [
            Arrival(chance.randint(0, 40), chance.randint(1, 160), chance.randint(1, 30), 0)
            for _ in range(chance.randint(2, 14))
        ]
        both = [
            serve(make(cores[name], kind, "fcfs", num_blocks), come, ahead=0)
            for name, kind in (("plain", Scheduler), (method, TreeScheduler))
        ]
        steps = [total + len(one) for total, one in zip(steps, both, strict=True)]
        begins = [[begin(one, str(place)) for place in range(len(come))] for one in both]
        late += sum(max(0, ours - plain) for plain, ours in zip(*begins, strict=True))
        num_requests += len(come)
    # A draft model has slots ahead of each text.
    assert steps[1] <= steps[0] * (1.03 if method == "ouroboros" else 1.01)
    assert late <= num_requests * (1.5 if method == "ouroboros" else 0.25)


@pytest.mark.parametrize("method", [GROWN, TRUNK], ids=["trees", "ouroboros"])
def test_a_prompt_that_must_come_whole_comes_beside_long_drafts(method):
    given = {"max_num_batched_tokens": 256, "max_model_len": 256, "enable_chunked_prefill": False}
    with engine(method | {"budget_share": 1.0}, **given) as llm:
        params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
        served, steps = llm.llm_engine, watch_steps(llm)
        for name in range(6):
            served.add_request(str(name), {"prompt_token_ids": [name, 9, 8] * 13}, params)
        while not steps or sum(map(len, drafts_of(steps[-1]))) < 100:
            served.step()
        served.add_request("long", {"prompt_token_ids": [*range(240)]}, params)
        served.step()
        assert max(steps[-1].num_scheduled_tokens.values()) == 240
        served.step()
        assert sum(map(len, drafts_of(steps[-1]))) > 50


def drafts_of(step: Any) -> list[list[int]]:
    return [*step.scheduled_spec_decode_tokens.values()]


@settings(deadline=None)
@example(lengths=[4, 80, 80], budget=100)  # what a short draft leaves goes to the others
@given(lengths=st.lists(st.integers(0, 80), max_size=12), budget=st.integers(0, 400))
def test_the_limit_is_the_largest_that_keeps_within_the_budget(lengths, budget):
    every = range(max(lengths, default=0) + 1)
    within = [n for n in every if sum(min(length, n) for length in lengths) <= budget]
    assert even_limit(lengths, budget) == max(within)


def test_room_is_kept_for_prompts_as_long_as_those_of_late(cores):
    room = make(cores["trees"], TreeScheduler, "fcfs", NUM_BLOCKS).room
    for length in [160, *[20] * 4]:
        room.see_prompt(length)
    assert 100 < room.longest_prompt < 160
    for length in [20] * 60:
        room.see_prompt(length)
    assert room.longest_prompt == 20


def test_a_step_that_does_not_reach_the_end_of_a_text_has_no_draft_of_it(cores, monkeypatch):
    """As where KV that was to be loaded is invalid, and is computed again."""
    scheduler, names = make(cores["trees"], TreeScheduler, "fcfs", NUM_BLOCKS), ["0", "1"]
    for name in names:
        scheduler.add_request(make_request(name, [*range(20)], max_tokens=9))
    step = scheduler.schedule()
    output = ModelRunnerOutput(names, {"0": 0, "1": 1}, [[9], [9]])
    scheduler.update_from_output(step, output)
    scheduler.update_draft_token_ids(TreeDraftTokenIds(names, [[7, 7]] * 2, [[0, 1]] * 2))
    scheduler.requests["0"].num_computed_tokens -= 16
    monkeypatch.setattr(scheduler.scheduler_config, "long_prefill_token_threshold", 8)
    monkeypatch.setattr(scheduler, "adaptive_long_prefill_threshold", False, raising=False)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"0": 8, "1": 3}
    assert step.scheduled_spec_decode_tokens == {"1": [7, 7]}
