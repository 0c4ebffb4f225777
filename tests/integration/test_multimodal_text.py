"""The text part of a multimodal model, with --language-model-only: output is vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
from derived_models import qwen2_audio
from engines import GROWN, SMALL_OUROBOROS, TARGET, counter, engine, generate, read_prompts
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from vllm_recycle.integration.plugin import register

PROMPTS = read_prompts(6, max_words=60)
PARAMS = [
    SamplingParams(max_tokens=32, temperature=0.7 * (index % 2), seed=index, ignore_eos=True)
    for index in range(len(PROMPTS))
]
TEXT_ONLY = {"language_model_only": True}
NO_AUDIO = {"limit_mm_per_prompt": {"audio": 0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return qwen2_audio(tmp_path_factory.mktemp("multimodal") / "model")


@pytest.fixture(scope="module")
def expected(model) -> list[Any]:
    with engine(model=model, **TEXT_ONLY) as llm:
        return generate(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(GROWN, TEXT_ONLY, id="token recycling"),
        pytest.param(GROWN, NO_AUDIO, id="token recycling, no audio"),
        pytest.param(SMALL_OUROBOROS, TEXT_ONLY, id="ouroboros"),
    ],
)
def test_output_equals_vllm(model, expected, method, settings):
    with engine(method, model=model, **settings) as llm:
        assert generate(llm, PROMPTS, PARAMS) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_it_is_the_text_model(expected):
    with engine(model=TARGET) as llm:
        assert generate(llm, PROMPTS, PARAMS) == expected


def make_config(model: str, method: dict[str, Any], **flags: Any) -> Any:
    register()
    arguments = EngineArgs(model, speculative_config=method, dtype="float32", **flags)
    return arguments.create_engine_config()


def test_other_inputs_are_refused(model):
    with pytest.raises(NotImplementedError, match="model without --language-model-only"):
        make_config(model, GROWN)


def test_multimodal_draft_models_are_refused(model):
    method = {**SMALL_OUROBOROS, "model": model}
    with pytest.raises(NotImplementedError, match="a multimodal draft model"):
        make_config(model, method, **TEXT_ONLY)
