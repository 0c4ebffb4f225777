"""A model with attention sinks, and windows in every other layer: output is vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
from derived_models import gpt_oss
from engines import GROWN, PAPER, counter, engine, generate, read_prompts
from vllm import SamplingParams

WINDOW = 40  # of blocks of 32
PROMPTS = read_prompts(6, max_words=60)
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.7 * (index % 2), seed=index, ignore_eos=True)
    for index in range(len(PROMPTS))
]
SETTINGS = {"max_num_seqs": len(PROMPTS), "max_model_len": 256, "block_size": 32}
SMALL_BUDGET = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}
SINKS = [-1.0, 2.0, 4.0, 6.0]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return gpt_oss(tmp_path_factory.mktemp("sinks") / "model", WINDOW, SINKS)


@pytest.fixture(scope="module")
def expected(model) -> list[Any]:
    with engine(model=model, **SETTINGS) as llm:
        return generate(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(GROWN, {}, id="grown"),
        pytest.param(PAPER, SMALL_BUDGET, id="paper-80, prompts in chunks"),
    ],
)
def test_output_equals_vllm(model, expected, method, settings):
    with engine(method, model=model, **{**SETTINGS, **settings}) as llm:
        assert generate(llm, PROMPTS, PARAMS) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_sinks_matter(expected, tmp_path):
    none = gpt_oss(tmp_path / "model", WINDOW, [-100.0] * len(SINKS))
    with engine(model=none, **SETTINGS) as llm:
        assert generate(llm, PROMPTS, PARAMS) != expected
