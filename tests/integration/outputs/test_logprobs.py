"""Logprobs are those of vLLM without us: in both modes that trainers use, of drafted tokens too."""

from __future__ import annotations

from math import isinf
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.sample.ops import topk_topp_sampler

from tests.integration.cuda.v2_engines import GREEDY, GROWN, IS_V2, LLM_ARGUMENTS, SEEDED, TEXT
from tests.integration.engines import GROWN as FREE_ROWS
from tests.integration.engines import counter, engine

MODES = ["raw_logprobs", "processed_logprobs"]
TOLERANCE = 1e-4
FILTERS = ({}, {"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.8, "top_k": 20})
# The interpreter is slow.
NUM_SAMPLES, LENGTH, FILTERS = (4, 6, FILTERS[::3]) if IS_V2 else (16, 12, FILTERS)
# Room for as many prompts in one step: plain vLLM on a CPU has no seeds with prompts in chunks.
ARGUMENTS = LLM_ARGUMENTS | {
    "max_num_seqs": NUM_SAMPLES,
    "max_num_batched_tokens": 48 * NUM_SAMPLES,
    "num_gpu_blocks_override": None,
}
METHOD = GROWN if IS_V2 else {**FREE_ROWS, "max_nodes": 8}
# Longer than a block, which later requests find in the prefix cache.
PROMPT = slice(0, 34)
ALONE = [
    {**GREEDY, "max_tokens": LENGTH, "logprobs": 3, "prompt_logprobs": 2},
    *(
        {**SEEDED, "temperature": temperature, "max_tokens": LENGTH, "logprobs": 3, **filters}
        for temperature in (0.6, 1.0)
        for filters in FILTERS
    ),
]
ALONE[-1]["prompt_logprobs"] = 1
SAMPLE = {**SEEDED, "temperature": 1.0, "max_tokens": LENGTH, "logprobs": 2}


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_without_speculation(served, mode):
    plain, *ours = served[mode]["served"]
    for one in ours:
        assert_equal(one["alone"], plain["alone"])
        assert_equal(one["by n"], plain["by n"])
        assert_equal(one["as requests"], plain["as requests"])


@pytest.mark.parametrize("mode", MODES)
def test_samples_of_one_request_are_those_of_as_many(served, mode):
    for one in served[mode]["served"]:
        assert len(one["by n"]) == served["samples"]
        assert_equal(one["by n"], one["as requests"])


@pytest.mark.parametrize("mode", MODES)
def test_tokens_were_drafted_and_free(served, mode):
    assert 0 < served[mode]["accepted"] < served[mode]["tokens"]


def test_modes_differ_where_logits_are_processed(served):
    raw, processed = (served[mode]["served"][0]["alone"] for mode in MODES)
    for given, one, other in zip(served["alone"], raw, processed, strict=True):
        is_processed = given["temperature"] == 0.6 or "top_p" in given or "top_k" in given
        assert (one["sampled"] != other["sampled"]) == is_processed
        scored = PROMPT.stop - 1 if "prompt_logprobs" in given else 0
        assert len(one["prompt"]) == len(other["prompt"]) == scored


def assert_equal(ours: list[Any], plain: list[Any]) -> None:
    """The same tokens; and of each place the same tokens with a probability, and logprobs."""
    for one, other in zip(ours, plain, strict=True):
        assert one["token_ids"] == other["token_ids"]
        for kind in ("sampled", "prompt"):
            for step, expected in zip(one[kind], other[kind], strict=True):
                found = {token: value for token, value in step.items() if not isinf(value[0])}
                named = {token: value for token, value in expected.items() if not isinf(value[0])}
                assert found.keys() == named.keys()
                for token, (logprob, rank) in named.items():
                    assert found[token][0] == pytest.approx(logprob, abs=TOLERANCE)
                    assert found[token][1] == rank


def serve(llm: Any) -> dict[str, Any]:
    """Requests with parameters of their own, samples of one request, and as many requests."""
    seeds = range(SAMPLE["seed"], SAMPLE["seed"] + NUM_SAMPLES)
    asked = {
        "alone": ALONE,
        "by n": [{**SAMPLE, "n": NUM_SAMPLES}],
        "as requests": [{**SAMPLE, "seed": seed} for seed in seeds],
    }
    prompt = {"prompt_token_ids": llm.get_tokenizer().encode(TEXT)[PROMPT]}
    found = {}
    for kind, params in asked.items():
        given = [SamplingParams(**one) for one in params]
        results = llm.generate([prompt] * len(given), given, use_tqdm=False)
        found[kind] = [
            {
                "token_ids": [*output.token_ids],
                "sampled": [by_token(step) for step in output.logprobs],
                "prompt": [by_token(step) for step in result.prompt_logprobs or () if step],
            }
            for result in results
            for output in result.outputs
        ]
    return found


def by_token(step: dict[int, Any]) -> dict[str, tuple[float, int]]:
    return {str(token): (one.logprob, one.rank) for token, one in step.items()}


def main(_: Path) -> dict[str, Any]:
    """With each runner."""
    if IS_V2:  # vLLM's kernel for these does not run in the interpreter
        topk_topp_sampler.HAS_TRITON = False
    found: dict[str, Any] = {"alone": ALONE, "samples": NUM_SAMPLES}
    for mode in MODES:
        with engine(logprobs_mode=mode, **ARGUMENTS) as llm:
            served = [serve(llm)]
        with engine(METHOD, logprobs_mode=mode, **ARGUMENTS) as llm:
            # What is asked second is drafted from what was answered first.
            served += [serve(llm) for _ in range(1 if IS_V2 else 2)]
            names = ("spec_decode_num_accepted_tokens", "generation_tokens")
            accepted, tokens = (counter(llm, name) for name in names)
        found[mode] = {"served": served, "accepted": accepted, "tokens": tokens}
    return found
