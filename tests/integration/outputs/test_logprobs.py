"""Logprobs are those of vLLM without us: in both modes that trainers use, of drafted tokens too."""

from __future__ import annotations

from math import inf
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
def test_logprobs_are_those_without_speculation_and_of_as_many_requests(served, mode):
    (plain, *all_ours), tokens = served[mode]["served"], served[mode]["tokens"]
    expected = {kind: [in_about(one) for one in answers] for kind, answers in plain.items()}
    for ours in all_ours:
        assert ours == expected
    for one in (plain, *all_ours):
        assert len(one["by n"]) == served["samples"]
        assert one["by n"] == [in_about(answer) for answer in one["as requests"]]
    assert 0 < served[mode]["accepted"] < tokens


def test_modes_differ_where_logits_are_processed(served):
    raw, processed = (served[mode]["served"][0]["alone"] for mode in MODES)
    for given, one, other in zip(served["alone"], raw, processed, strict=True):
        is_processed = given["temperature"] == 0.6 or "top_p" in given or "top_k" in given
        assert (one["logprobs"] != other["logprobs"]) == is_processed
        places = given["max_tokens"] + ("prompt_logprobs" in given) * (PROMPT.stop - 1)
        assert len(one["ranks"]) == len(other["ranks"]) == places


def in_about(answer: dict[str, Any], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """With the same tokens at each place, and logprobs that may differ by rounding."""
    return answer | {"logprobs": pytest.approx(answer["logprobs"], abs=tolerance)}


def scored(*texts: Any) -> dict[str, Any]:
    """Of each place of texts the tokens with a probability and their ranks; and all logprobs."""
    places = [place for text in texts for place in text or () if place]
    found = [
        sorted((token, one.rank, one.logprob) for token, one in place.items() if one.logprob > -inf)
        for place in places
    ]
    return {
        "is scored": [text is not None for text in texts],
        "ranks": [[[token, rank] for token, rank, _ in place] for place in found],
        "logprobs": [logprob for place in found for *_, logprob in place],
    }


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
            {"token_ids": [*output.token_ids], **scored(result.prompt_logprobs, output.logprobs)}
            for result in results
            for output in result.outputs
        ]
    return found


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
