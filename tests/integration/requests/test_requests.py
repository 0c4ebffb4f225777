"""Requests among each other: shares of a step, opting out, and what is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from vllm import SamplingParams

from tests.integration.engines import (
    GROWN,
    HOSTED,
    PAPER,
    SMALL_OUROBOROS,
    TOKEN_RECYCLING,
    TRUNK,
    core,
    counter,
    engine,
    generate,
    read_prompts,
    runner,
    watch_steps,
)
from vllm_recycle.core.curve import Load, MeasuredCurve
from vllm_recycle.core.tree import Trees
from vllm_recycle.integration.cpu import time_steps

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SHORTLY = SamplingParams(temperature=0, max_tokens=12)
BOTH = {"grown": GROWN, "published": SMALL_OUROBOROS}
METHODS = {
    **BOTH,
    "chains": GROWN | {"tree": "chain"},
    "paper-80": PAPER,
    "trunk": TRUNK,
    # Else vLLM computes one more block of each prompt, for a head's sake.
    "vLLM's trunk": HOSTED | {"trunk": HOSTED["trunk"] | {"disable_eagle_block_drop": True}},
}
SHARED = {"enable_prefix_caching": True, "block_size": 32, "max_num_seqs": 8}
both_methods = pytest.mark.parametrize("method", BOTH.values(), ids=BOTH)
both_engines = pytest.mark.parametrize("llm", BOTH, indirect=True)


@pytest.fixture(scope="module")
def turns_without_drafts() -> list[tuple[list[int], int]]:
    with engine(None, **SHARED) as llm:
        return next_turns(llm)


@pytest.fixture(scope="module", params=METHODS)
def llm(request, turns_without_drafts) -> Iterator[Any]:
    """An engine with a method, which tests share; one without had its turn before."""
    with engine(METHODS[request.param], **SHARED) as llm:
        yield llm


def draft_tokens(llm) -> int:
    return counter(llm, "spec_decode_num_draft_tokens")


CROWD = read_prompts(64 - 24, max_words=20) + read_prompts(24, max_words=10)
CROWDED = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "block_size": 32}


@cache
def crowd_without_drafts() -> list[list[tuple[int, ...]]]:
    with engine(None, **CROWDED) as llm:
        return generate(llm, CROWD, SHORTLY)


@pytest.mark.parametrize(
    ("method", "share"),
    [
        pytest.param(PAPER, 0.5, marks=pytest.mark.slow),
        (GROWN, 1.0),
        pytest.param(SMALL_OUROBOROS, 1.0, marks=pytest.mark.slow),
    ],
)
def test_trees_starve_nobody_at_64_requests_and_a_small_budget(share, method):
    expected = crowd_without_drafts()
    with engine({**method, "budget_share": share}, **CROWDED) as llm:
        generate(llm, CROWD, SHORTLY)  # a warm matrix or pool asks for full trees
        steps, scheduler, uncut = watch_steps(llm), core(llm).scheduler, []
        kept = scheduler.room.kept

        def watched(lengths: Any) -> Any:
            uncut.append({name: len(draft) for name, draft in scheduler.set_aside.items()})
            return kept(lengths)

        scheduler.room.kept = watched
        assert generate(llm, CROWD, SHORTLY) == expected
    running, crowded, cut = 0, 0, 0
    for step, lengths in zip(steps, uncut, strict=True):
        sizes = {name: len(draft) for name, draft in step.scheduled_spec_decode_tokens.items()}
        assert sum(sizes.values()) <= share * 256
        # Everybody who runs has a row in every step.
        assert len(step.scheduled_cached_reqs.req_ids) >= running - len(step.finished_req_ids)
        running, crowded = len(step.num_scheduled_tokens), crowded + (len(sizes) > 32)
        for name, size in sizes.items():
            # Even: who has fewer than the longest had no more to draft.
            assert size == min(max(sizes.values()), lengths[name])
            cut += size < lengths[name]
    # Of Ouroboros as published a step has no room for the draft forwards of as many.
    assert (crowded and cut) or method is SMALL_OUROBOROS


@both_methods
def test_drafts_take_no_kv_cache_that_the_rest_of_a_prompt_needs(method):
    prompts = [{"prompt_token_ids": [7 + i] * 30} for i in range(4)]
    prompts.append({"prompt_token_ids": [*range(3, 1003)]})  # read in parts
    answers = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        for length in (60, 60, 60, 60, 4)
    ]
    num_blocks = sum(-(-length // 32) for length in (90, 90, 90, 90, 1004))  # all at full length
    with engine(
        method,
        block_size=32,
        num_gpu_blocks_override=1 + num_blocks,  # one is vLLM's
        max_num_batched_tokens=400,
        max_model_len=1024,
        max_num_seqs=5,
    ) as llm:
        generate(llm, prompts[:4], answers[:4])  # what is known now is drafted
        before = draft_tokens(llm)
        generate(llm, prompts, answers)
        assert draft_tokens(llm) > before
        assert counter(llm, "num_preemptions") == 0


@both_methods
def test_drafts_have_the_sizes_of_the_users_table(method):
    table = [[1, 2, 5], [3, 1024, 0]]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (8, 8, 8, 40)]
    with engine({**method, "num_speculative_tokens_per_batch_size": table}) as llm:
        steps = watch_steps(llm)
        generate(llm, read_prompts(4), params)
    sizes = [len(step.num_scheduled_tokens) for step in steps]
    drafts = [[*map(len, step.scheduled_spec_decode_tokens.values())] for step in steps]
    assert not any(drafts[step] for step in range(1, len(steps)) if sizes[step - 1] > 2)
    assert {1, 4} <= set(sizes)
    assert max(max(found, default=0) for found in drafts) == 5


@both_engines
def test_a_request_can_opt_out(llm):
    prompts = read_prompts(3)
    out = SamplingParams(temperature=0, max_tokens=24, extra_args={"speculate": False})
    expected = generate(llm, prompts, GREEDY)
    before = draft_tokens(llm)
    assert generate(llm, prompts, out) == expected
    assert draft_tokens(llm) == before
    generate(llm, prompts, [out, GREEDY, out])
    assert draft_tokens(llm) > before


@both_engines
def test_nothing_is_left_of_requests_that_end_or_are_aborted(llm):
    prompts = read_prompts(8)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), prompt, params)
    for _ in range(2):
        llm.llm_engine.step()
    assert len(runner(llm).req_state_indices) == 8
    llm.llm_engine.abort_request(["1", "4"])
    finished = set()
    while llm.llm_engine.has_unfinished_requests():
        finished |= {out.request_id for out in llm.llm_engine.step() if out.finished}
    assert finished == {"0", "2", "3", "5", "6", "7"}
    generate(llm, prompts[:1], GREEDY)
    assert len(runner(llm).req_state_indices) == 1  # freed when the next step is scheduled


def test_counters_count_nodes_and_depths(llm, monkeypatch):
    names = [f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    before = [counter(llm, name) for name in names]
    scheduler, observed, steps = core(llm).scheduler, {}, watch_steps(llm)
    count = scheduler.make_spec_decoding_stats

    def watching_count(*args, **kwargs):
        stats = count(*args, **kwargs)
        observed[id(stats)] = stats
        return stats

    monkeypatch.setattr(scheduler, "make_spec_decoding_stats", watching_count)
    generate(llm, read_prompts(6), GREEDY)
    sizes, depths = [], []
    for step in steps:
        for name, draft in step.scheduled_spec_decode_tokens.items():
            parents = step.step_note.parents[name]
            assert len(parents) == len(draft)
            sizes.append(len(draft))
            depths.append(Trees.from_drafts([parents]).depth)
    said = [sum(stats.num_draft_tokens_per_pos) for stats in observed.values() if stats]
    assert sum(said) == sum(depths)
    drafts, nodes, accepted = (
        counter(llm, name) - start for name, start in zip(names, before, strict=True)
    )
    assert (len(sizes), sum(sizes)) == (drafts, nodes)
    assert drafts <= nodes <= drafts * 80
    assert 0 < accepted <= sum(depths)


@pytest.mark.parametrize("method", [GROWN, PAPER, HOSTED], ids=["grown", "paper-80", "trunk"])
def test_nothing_is_learnt_in_the_middle_of_a_prompt(method):
    """As statistics say, of what vLLM has no metrics for."""
    unseeded = {"preset": "paper", "tree": "dynamic", "contexts": [1, 2, 4, 16]}
    method = {**unseeded, **method, "row_cost": 0.25}
    prompts = read_prompts(2)
    with engine(method, max_num_batched_tokens=32) as llm:
        before = statistics(llm)
        generate(llm, prompts[:1], SamplingParams(temperature=0, max_tokens=1))
        assert len(llm.get_tokenizer()(prompts[0]).input_ids) > 2 * 32
        matrix = runner(llm).tree_drafter.state.matrix
        assert matrix.num_written == len(matrix.layout.contexts)
        generate(llm, prompts, GREEDY)
        after = statistics(llm)
    assert before["table_fill"] == 0 < after["table_fill"] < 1
    assert before["rounds"] == 0
    assert (after["rounds"] > 0) == ("trunk" in method)
    assert after["row_cost"] == 0.25


def statistics(llm) -> dict[str, float]:
    [found] = llm.collective_rpc("draft_statistics")
    return found


@pytest.mark.versions
def test_requests_that_have_left_their_trees_are_not_sampled_again(monkeypatch):
    prompts, rows = read_prompts(6, max_words=40), []
    ways = [{"top_p": 0.9, "frequency_penalty": 0.2}, {"top_k": 20}, {"temperature": 0.0}]
    params = [
        SamplingParams(
            **{"temperature": 0.5, **ways[i % 3]}, seed=i, max_tokens=24, ignore_eos=True
        )
        for i in range(6)
    ]
    with engine() as llm:
        expected = generate(llm, prompts, params)
    with engine({**TOKEN_RECYCLING, "row_cost": 0.0}) as llm:
        sampler = runner(llm).sampler
        forward = sampler.forward

        def watched(logits: Any, *args: Any, **kwargs: Any) -> Any:
            rows.append(len(logits))
            return forward(logits, *args, **kwargs)

        monkeypatch.setattr(sampler, "forward", watched)
        for _ in range(2):
            rows.clear()
            assert generate(llm, prompts, params) == expected
            # Greedy requests that are left alone need no sampler.
            assert 0 < sum(rows) <= sum(len(tokens) for [tokens] in expected)
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_start_up_lines_of_grown_trees():
    with engine({**TOKEN_RECYCLING, "contexts": [1, 2]}, max_num_seqs=5) as llm:
        lines = runner(llm).tree_drafter.describe() + runner(llm).price_rows()
        curve = runner(llm).tree_drafter.curve
    parts = ("dynamic", "80 nodes", "cost measured", "contexts [1, 2]", "sequence", "bytes")
    steps = "a step by its rows, in ms, of 1 request behind 256 tokens: trees 1: "
    assert [part for part in (*parts, steps) if part not in lines] == []
    assert {load.requests for load in curve.loads} == {1, 3, 5}
    for load in curve.loads:
        seconds = curve.by_rows("trees", load)
        assert 0 < seconds[1] <= seconds[load.requests] == curve.plain(load) < seconds[-1]
        assert (seconds.diff() >= 0).all()


def costs(curve: MeasuredCurve) -> dict[str, float]:
    """By kind, a step of eight rows in parts of one without drafts."""
    load = Load(1, 256)
    return {kind: float(curve.by_rows(kind, load)[8]) / curve.plain(load) for kind in curve.kinds}


@pytest.mark.slow
def test_prices_follow_served_steps(monkeypatch):
    """Plain steps looked far longer at start-up: rows seemed to be free."""

    def time_step(runner: Any, requests: int, rows: int, *args: Any) -> float:
        return 2.0 if rows == 1 else 0.01

    monkeypatch.setattr(time_steps, "_time_step", time_step)
    # Behind each other, and in many steps: none is like another.
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=100, ignore_eos=True)
    with engine(TOKEN_RECYCLING) as llm:
        drafter = runner(llm).tree_drafter
        before, started = costs(drafter.curve), time.perf_counter()
        clock = SteadyClock(drafter)
        monkeypatch.setattr(drafter, "record_step", clock.record_step)
        for prompt in read_prompts(3):
            generate(llm, [prompt], params)
        after, elapsed = costs(drafter.curve), time.perf_counter() - started
        found = statistics(llm)
    assert all(cost < 1.01 for cost in before.values())
    assert all(cost > 1.05 for cost in after.values())
    where = "seconds_by_measured: chains, 1 requests, 256 tokens, "
    found = {of: seconds for of, seconds in found.items() if of.startswith(where)}
    assert 0 < found[where + "1 rows"] < max(found.values())
    assert 0 < min(clock.seconds) <= sum(clock.seconds) < elapsed


class SteadyClock:
    """Records steps as if each row took as long, whatever else the machine does.

    Attributes:
        seconds: that the steps took.

    """

    def __init__(self, drafter: Any) -> None:
        self._drafter, self._record_step = drafter, drafter.record_step
        self.seconds: list[float] = []

    def record_step(self, step: Any, context: float, *, tokens: int, seconds: float | None) -> None:
        if seconds is not None:
            self.seconds.append(seconds)
            seconds = 0.1 + 0.02 * len(step.row_token_ids) - self._drafter.last_drafts.seconds
        self._record_step(step, context, tokens=tokens, seconds=seconds)


def test_the_next_turn_finds_as_many_cached_tokens_as_without_drafts(llm, turns_without_drafts):
    """All blocks that a turn has filled, its last one too."""
    assert next_turns(llm) == turns_without_drafts
    assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    options, found = runner(llm).tree_drafter.options, statistics(llm)
    assert (found["rounds"] > 0) == (options.trunk is not None)
    assert (found["forwards"] > 0) == options.has_own_model


def next_turns(llm: Any) -> list[tuple[list[int], int]]:
    """Tokens of second turns, and how many of their prompts' came from the cache."""
    llm.reset_prefix_cache()
    texts, lengths = read_prompts(12, max_words=60), [*range(20, 68, 4)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    turns = [
        {"prompt_token_ids": [*one.prompt_token_ids, *one.outputs[0].token_ids, 7]}
        for one in llm.generate(texts, params, use_tqdm=False)
    ]
    again = llm.generate(turns, params, use_tqdm=False)
    return [([*one.outputs[0].token_ids], one.num_cached_tokens) for one in again]
