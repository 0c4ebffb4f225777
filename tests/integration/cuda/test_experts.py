"""Experts of a mixture on two ranks, of one engine or of two that keep step, on Model Runner V2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from derived_models import mixtral
from engines import TOKEN_RECYCLING, core, counter, engine, runner
from v2_engines import GREEDY, LLM_ARGUMENTS, SEEDED, generate
from v2_ranks import NUM_RANKS, run_ranks, take_port

pytestmark = pytest.mark.slow

METHODS = {
    "one engine": {**TOKEN_RECYCLING, "k": 4, "max_nodes": 8, "context_mib": 1},
    "two engines": {**TOKEN_RECYCLING, "k": 4, "context_mib": 1},
}
LAYOUTS = {
    "one engine": {"tensor_parallel_size": NUM_RANKS},
    # Ranks that a launcher starts keep step in steps that compute, which those of a server,
    # that schedule ahead, need not be.
    "two engines": {"data_parallel_size": NUM_RANKS, "async_scheduling": False},
}
BATCH = [((0, 33), GREEDY), ((3, 40), SEEDED)]
# Of the second of two engines, which has nothing to do before the first one has finished.
SHORT = [((1, 30), {**GREEDY, "max_tokens": 3})]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank has to say."""
    return run_ranks(__file__, tmp_path_factory.mktemp("ranks"), num_engines=2 * len(LAYOUTS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_equal_those_without_speculation(ranks, layout):
    for rank in ranks:
        assert rank[layout]["drafts"]["token ids"] == rank[layout]["plain"]["token ids"]
    assert ranks[0][layout]["drafts"]["accepted tokens"] > 0


def test_ranks_of_one_engine_verify_trees(ranks):
    for rank in ranks:
        found = rank["one engine"]["drafts"]
        assert (found["has trees"], found["sizes"][1][0]) == (True, 8)


def test_engines_that_keep_step_draft_chains_of_one_length(ranks):
    for rank in ranks:
        found = rank["two engines"]["drafts"]
        assert (found["has trees"], found["sizes"][1:]) == (False, [[4]] * 4)


def test_an_engine_without_work_keeps_step(ranks):
    assert [rank["two engines"]["drafts"]["dummy steps"] > 0 for rank in ranks] == [False, True]


def serve(method: dict[str, Any] | None, batch: list, **arguments: Any) -> dict[str, Any]:
    """In a rank: an engine's tokens, and what it was like."""
    take_port()
    with engine(
        method,
        **LLM_ARGUMENTS | arguments,
        enable_expert_parallel=True,
        distributed_executor_backend="external_launcher",
    ) as llm:
        dummy_steps = []
        run = core(llm).execute_dummy_batch
        core(llm).execute_dummy_batch = lambda: dummy_steps.append(run())
        return {
            "token ids": [output["token_ids"] for output in generate(llm, [batch, batch])],
            "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens"),
            "has trees": getattr(runner(llm), "verifies_trees", None),
            "sizes": getattr(runner(llm), "sizes_of_batch", None),
            "dummy steps": len(dummy_steps),
        }


def main(own_path: Path) -> dict[str, Any]:
    """In a rank: for each layout an engine without speculation, and one with drafts."""
    model = mixtral(own_path.with_suffix(""))
    is_second = os.environ["RANK"] == "1"
    result = {}
    for layout, arguments in LAYOUTS.items():
        batch = SHORT if is_second and layout == "two engines" else BATCH
        runs = {"plain": None, "drafts": METHODS[layout]}
        result[layout] = {
            name: serve(method, batch, **arguments | {"model": model})
            for name, method in runs.items()
        }
    return result
