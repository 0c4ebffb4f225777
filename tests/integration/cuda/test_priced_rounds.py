"""Ouroboros on Model Runner V2 drafts where a round is worth its time, and decodes plainly else.

In Triton's interpreter, in a process of its own that this file is the script of; `test_runner`
says what that leaves out. What a round costs is replaced between batches of requests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_ouroboros import DRAFT, FORWARDS, OPTED_OUT, SIZES, TARGET
from test_runner import GREEDY, LLM_ARGUMENTS, SEEDED, Waits, generate
from v2_scripts import run_script

pytestmark = pytest.mark.slow

# Which tokens of TEXT are the prompt, and the sampling parameters.
BATCH = [((0, 20), GREEDY), ((3, 24), SEEDED)]
# Drafted for as three, where the table of batch sizes has nothing for four.
FOUR = [*(((i, i + 12), GREEDY) for i in range(3)), ((5, 17), OPTED_OUT)]
# What a round is then taken to last, in seconds, where it is not what was measured. The target's
# steps have no graphs here, and are taken to last a minute.
BATCHES = {"as measured": (BATCH, None), "dear": (BATCH, 1e9), "free": (FOUR, 0.0)}


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    return run_script(__file__, tmp_path_factory.mktemp("v2") / "result.json")


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_are_the_same_whatever_is_drafted(result, batch):
    assert result[batch]["token ids"] == result["plain"][batch]


def test_rounds_are_timed_at_the_start_for_each_shape(result):
    # Two requests have whole windows and guesses, three have half of them.
    assert list(result["rounds timed for"]) == ["1", "2", "3"]
    assert min(result["rounds timed for"].values()) > 0


def test_rounds_are_made_as_long_as_they_are_worth_their_time(result):
    rounds = {name: result[name]["rounds"] for name in BATCHES}
    assert min(rounds["as measured"], rounds["free"]) > 5
    # Those that the last steps before had asked for.
    assert rounds["dear"] <= 2 * len(BATCH)
    assert result["free"]["accepted tokens"] > 0


def test_nothing_waits_for_the_device(result):
    assert result["waits"] == []


def main() -> dict[str, Any]:
    """In the process with the engines: one without speculation, and one with it."""
    from engines import core, counter, runner
    from vllm import LLM

    from vllm_recycle.core.size_chooser import GraphShape, StepSeconds

    def tokens_of(llm: Any, batch: Any) -> list[list[int]]:
        return [output["token_ids"] for output in generate(llm, [batch])]

    arguments = LLM_ARGUMENTS | {"model": TARGET}
    llm = LLM(**arguments)
    result: dict[str, Any] = {
        "plain": {name: tokens_of(llm, batch) for name, (batch, _) in BATCHES.items()}
    }
    llm.llm_engine.engine_core.shutdown()
    method = {"method": "ouroboros", "model": DRAFT, "max_forwards": FORWARDS, **SIZES}
    llm = LLM(**arguments, speculative_config=method)
    sizes, waits = core(llm).scheduler.sizes, Waits()
    drafter, speculator = runner(llm).drafter, runner(llm).speculator
    propose = speculator.propose

    def watched_propose(*args: Any, **kwargs: Any) -> Any:
        with waits:
            return propose(*args, **kwargs)

    speculator.propose = watched_propose
    result["rounds timed for"] = measured = speculator.times.drafting
    for name, (batch, seconds) in BATCHES.items():
        drafting = measured if seconds is None else {1: seconds}
        sizes.take_times(StepSeconds({GraphShape(64, 64, 64): (60.0, 0.0)}, drafting))
        rounds, accepted = drafter.num_rounds, counter(llm, "spec_decode_num_accepted_tokens")
        token_ids = tokens_of(llm, batch)
        result[name] = {
            "token ids": token_ids,
            "rounds": drafter.num_rounds - rounds,
            "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens") - accepted,
        }
    llm.llm_engine.engine_core.shutdown()
    return result | {"waits": waits.seen}


if __name__ == "__main__":
    import v2_shim

    v2_shim.install()
    Path(sys.argv[1]).write_text(json.dumps(main()))
