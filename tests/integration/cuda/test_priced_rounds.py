"""Ouroboros on Model Runner V2 drafts where a round is worth its time, and decodes plainly else.

What a round costs is replaced between batches of requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.cuda.test_ouroboros import OPTED_OUT, TRUNK
from tests.integration.cuda.v2_engines import GREEDY, LLM_ARGUMENTS, SEEDED, Waits, tokens_of
from tests.integration.engines import TARGET, core, counter, engine, runner
from vllm_recycle.core.curve import TREES, TRUNKS
from vllm_recycle.core.graph_curve import GraphShape, GraphTimes

pytestmark = pytest.mark.slow

# Which tokens of TEXT are the prompt, and the sampling parameters.
BATCH = [((0, 20), GREEDY), ((3, 24), SEEDED)]
# Two have a trunk.
FOUR = [*(((i, i + 12), GREEDY) for i in range(3)), ((5, 17), OPTED_OUT)]
# What a round is then taken to last, in seconds, where it is not what was measured, and what trees
# are that grow alone. The target's steps have no graphs here, and are taken to last a minute.
BATCHES = {
    "as measured": (BATCH, None, 1e9),
    "dear": (BATCH, 1e9, 1e9),
    "dear, rows alone free": (BATCH, 1e9, 0.0),
    "free": (FOUR, 0.0, 1e9),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_are_the_same_whatever_is_drafted(result, batch):
    assert result[batch]["token ids"] == result["plain"][batch]


def test_rounds_are_timed_at_the_start(result):
    # For two requests there is room in a draft forward; of four two have a trunk.
    assert sorted(result["rounds timed for"]) == ["1", "2", "4"]
    [(batch, alone)] = result["alone timed for"].items()
    assert 0 < alone < result["rounds timed for"][batch]


def test_rounds_are_made_as_long_as_they_are_worth_their_time(result):
    rounds = {name: result[name]["rounds"] for name in BATCHES}
    assert min(rounds["as measured"], rounds["free"]) > 5
    # Those that the last steps before had asked for, and one to see what it would give.
    assert rounds["dear"] <= 3 * len(BATCH)
    assert result["free"]["accepted tokens"] > 0


def test_where_only_a_round_is_dear_trees_grow_alone(result):
    alone = result["dear, rows alone free"]
    assert alone["accepted tokens"] > 2
    assert alone["rounds"] <= 3 * len(BATCH)


def test_nothing_waits_for_the_device(result):
    assert result["waits"] == []


def main(_: Path) -> dict[str, Any]:
    """In the process with the engines: one without speculation, and one with it."""
    arguments = LLM_ARGUMENTS | {"model": TARGET}
    with engine(**arguments) as llm:
        plain = {name: tokens_of(llm, batch) for name, (batch, *_) in BATCHES.items()}
    result: dict[str, Any] = {"plain": plain}
    with engine(TRUNK, **arguments) as llm:
        sizes, waits = core(llm).scheduler.sizes, Waits()
        drafter, speculator = runner(llm).tree_drafter, runner(llm).speculator
        waits.watch(speculator, "propose")
        result["rounds timed for"] = measured = speculator.times.drafting[TRUNKS]
        result["alone timed for"] = speculator.times.drafting[TREES]
        for name, (batch, round_seconds, alone_seconds) in BATCHES.items():
            drafting = measured if round_seconds is None else {1: round_seconds}
            graphs = {GraphShape(64, 64, 64): (60.0, 0.0)}
            sizes.take_times(GraphTimes(graphs, {TRUNKS: drafting, TREES: {1: alone_seconds}}))
            rounds, accepted = drafter.num_rounds, counter(llm, "spec_decode_num_accepted_tokens")
            token_ids = tokens_of(llm, batch)
            result[name] = {
                "token ids": token_ids,
                "rounds": drafter.num_rounds - rounds,
                "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens") - accepted,
            }
    return result | {"waits": waits.seen}
