"""A model with M-RoPE, whose positions have several dimensions: output is vLLM's own."""

from __future__ import annotations

from typing import Any

import mrope_model
import pytest
from derived_models import with_mrope
from engines import GROWN, PAPER, SMALL_OUROBOROS, TARGET, counter, engine, generate, read_prompts
from engines import runner as model_runner
from vllm import SamplingParams

PROMPTS = read_prompts(6, max_words=60)
PARAMS = [
    SamplingParams(max_tokens=32, temperature=0.7 * (index % 2), seed=index, ignore_eos=True)
    for index in range(len(PROMPTS))
]
SMALL_BUDGET = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    mrope_model.register()
    return with_mrope(tmp_path_factory.mktemp("mrope") / "model")


@pytest.fixture(scope="module")
def expected(model) -> list[Any]:
    with engine(model=model) as llm:
        return generate(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(GROWN, {}, id="grown"),
        pytest.param(PAPER, {"max_model_len": 256, **SMALL_BUDGET}, id="paper-80, in chunks"),
        pytest.param(SMALL_OUROBOROS, {}, id="ouroboros"),
    ],
)
def test_output_equals_vllm(model, expected, method, settings):
    with engine(method, model=model, **settings) as llm:
        assert model_runner(llm).uses_mrope
        assert generate(llm, PROMPTS, PARAMS) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_positions_matter(expected):
    with engine(model=TARGET) as llm:
        assert generate(llm, PROMPTS, PARAMS) != expected


def test_a_draft_model_may_not_have_it(model):
    method = {**SMALL_OUROBOROS, "model": model}
    with (
        pytest.raises(NotImplementedError, match="a draft model with M-RoPE"),
        engine(method, model=model),
    ):
        pass
