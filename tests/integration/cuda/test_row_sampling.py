"""Rows that a walk cannot visit are not sampled on Model Runner V2, and nothing is lost by it.

In Triton's interpreter, in a process of its own that this file is the script of; `test_runner`
says what that leaves out. Each step whose rows are chosen is sampled at all its rows as well.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_runner import (
    GREEDY,
    LLM_ARGUMENTS,
    LOGPROB_TOLERANCE,
    SEEDED,
    Waits,
    generate,
)
from v2_scripts import run_script

pytestmark = pytest.mark.slow

NODES, MOST_ROWS = 20, 6
SAMPLED = {**SEEDED, "logprobs": None}
CUT = {**SEEDED, "temperature": 0.5, "min_p": 0.02}
BATCHES = {
    "cut and biased": [((0, 40), {**CUT, "logit_bias": {14: 1.0}})],
    "greedy beside": [((0, 33), GREEDY), ((0, 24), SAMPLED)],
    # Of these all rows are sampled, in one pass.
    "greedy": [((0, 33), {**GREEDY, "max_tokens": 4})],
}
CHOSEN = ("cut and biased", "greedy beside")


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    return run_script(__file__, tmp_path_factory.mktemp("v2") / "result.json")


def test_tokens_equal_those_without_speculation(result):
    for name, plain in result["plain"].items():
        for expected, found in zip(plain, result["trees"][name], strict=True):
            assert found["token_ids"] == expected["token_ids"]


def test_logprobs_are_those_of_the_accepted_path(result):
    (expected,), (found,) = (result[kind]["cut and biased"] for kind in ("plain", "trees"))
    logprobs = expected["logprobs"]["sampled"]
    assert found["logprobs"]["sampled"] == pytest.approx(logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("batch", BATCHES)
def test_rows_are_chosen_where_sampling_passes_over_them_again_and_again(result, batch):
    assert (result["seen"][batch].get("chosen steps", 0) > 0) == (batch in CHOSEN)


@pytest.mark.parametrize("batch", CHOSEN)
def test_no_row_that_would_be_visited_is_left_out(result, batch):
    seen = result["seen"][batch]
    assert seen["chosen rows"] < seen["rows"] / 2
    # But where more rows can be visited than are sampled.
    assert seen.get("shorter walks", 0) <= seen.get("walks with more rows", 0)
    assert seen.get("shorter walks", 0) < seen["walks"] / 10


def test_drafts_were_accepted(result):
    assert sum(result["seen"][batch]["accepted tokens"] for batch in CHOSEN) > 3


def test_nothing_waits_for_the_device(result):
    assert result["waits"] == []


def watch(model_runner: Any, seen: Counter, waits: Waits) -> None:
    """In the process with the engines: compare the walks of chosen rows with those of all."""
    from vllm_recycle.integration.cuda import row_sampling
    from vllm_recycle.integration.cuda import runner as v2_runner
    from vllm_recycle.integration.cuda.sampling import sample_rows

    operations = model_runner.drafter.proposer.operations
    walk, choose = operations.walk, row_sampling.choose_rows
    sample = row_sampling.sample_visitable_rows
    choices: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched_choose(logits: torch.Tensor, *args: Any, **given: Any) -> Any:
        rows, drafts = choose(logits, *args, **given)
        choices.append((rows, choose(logits, *args, **given | {"most": len(logits)})[0]))
        return rows, drafts

    def watched_sample(sampler: Any, logits: torch.Tensor, batch: Any, *args: Any, **given: Any):
        sampled, _ = sample_rows(sampler, logits, batch, model_runner.row_token_ids)
        whole.append((sampled, model_runner.req_states.draft_tokens[batch.idx_mapping]))
        with waits:
            result = sample(sampler, logits, batch, *args, **given)
        rows, all_rows = choices.pop()
        seen["chosen steps"] += 1
        seen["chosen rows"] += rows.numel()
        seen["rows"] += len(logits)
        # The root fills up.
        visitable = [len(set(of_request)) for of_request in all_rows.tolist()]
        seen["walks with more rows"] += sum(count > MOST_ROWS for count in visitable)
        return result

    def watched_walk(sampled: torch.Tensor, drafts: torch.Tensor, *args: Any, **given: Any) -> Any:
        result = walk(sampled, drafts, *args, **given)
        if whole:
            expected = walk(*whole.pop(), *args, **given)
            seen["walks"] += len(result.lengths)
            seen["shorter walks"] += int((result.lengths != expected.lengths).sum())
        return result

    row_sampling.choose_rows = watched_choose
    v2_runner.sample_visitable_rows = watched_sample
    object.__setattr__(operations, "walk", watched_walk)


def main() -> dict[str, Any]:
    """In the process with the engines: one without trees, and one with them."""
    from engines import counter, runner
    from vllm import LLM

    from vllm_recycle.integration.cuda import row_sampling

    llm = LLM(**LLM_ARGUMENTS)
    plain = {name: generate(llm, [batch]) for name, batch in BATCHES.items()}
    llm.llm_engine.engine_core.shutdown()
    row_sampling.MOST_ROWS = MOST_ROWS
    method: dict[str, Any] = {"method": "token_recycling", "max_nodes": NODES, "context_mib": 1}
    method["num_speculative_tokens_per_batch_size"] = [(1, 4, NODES)]
    llm = LLM(**LLM_ARGUMENTS | {"max_num_batched_tokens": 96}, speculative_config=method)
    seen: Counter = Counter()
    waits, trees, seen_of = Waits(), {}, {}
    watch(runner(llm), seen, waits)
    for name, batch in BATCHES.items():
        seen.clear()
        before = counter(llm, "spec_decode_num_accepted_tokens")
        trees[name] = generate(llm, [batch])
        seen["accepted tokens"] = counter(llm, "spec_decode_num_accepted_tokens") - before
        seen_of[name] = dict(seen)
    llm.llm_engine.engine_core.shutdown()
    return {"plain": plain, "trees": trees, "seen": seen_of, "waits": waits.seen}


if __name__ == "__main__":
    import v2_shim

    v2_shim.install()
    Path(sys.argv[1]).write_text(json.dumps(main()))
