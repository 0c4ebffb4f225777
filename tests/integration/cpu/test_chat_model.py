"""Greedy output is vLLM's own on a model of the shape that benchmarks use, with random weights.

That is SmolLM2-135M: five times as deep as the embedded target, and three query heads to a KV head.
The tokenizer and its vocabulary are the embedded models'.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from derived_models import random_weights, write_model
from engines import (
    GROWN,
    PAPER,
    SMALL_BUDGET,
    TARGET,
    counter,
    engine,
    generate,
    read_prompts,
    watch_steps,
)
from transformers import AutoConfig
from vllm import SamplingParams

SHAPE = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "tie_word_embeddings": True,
}
# With less, greedy output is one token again and again; with more, hardly a token comes twice, and
# no draft is accepted.
STANDARD_DEVIATION = 0.035
PROMPTS = read_prompts(4, max_words=30)
MAX_MODEL_LEN = 256
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[str]:
    config = AutoConfig.from_pretrained(TARGET, **SHAPE)
    weights = random_weights(config, norms=1.0, std=STANDARD_DEVIATION)
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    folder = tmp_path_factory.mktemp("chat_model") / "model"
    yield write_model(folder, config.to_dict(), weights=weights)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def expected(model) -> list[list[tuple[int, ...]]]:
    with engine(model=model, max_model_len=MAX_MODEL_LEN) as llm:
        outputs = generate(llm, PROMPTS, GREEDY)
    assert all(len(set(token_ids)) > 8 for (token_ids,) in outputs)
    return outputs


@pytest.mark.parametrize("method", [GROWN, PAPER], ids=["grown", "paper-80"])
def test_output_equals_vllm(model, expected, method):
    with engine(method, model=model, max_model_len=MAX_MODEL_LEN) as llm:
        assert generate(llm, PROMPTS, GREEDY) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_output_equals_vllm_with_prompts_in_chunks_and_trees_cut(model, expected):
    with engine(PAPER, model=model, max_model_len=MAX_MODEL_LEN, **SMALL_BUDGET) as llm:
        steps = watch_steps(llm)
        assert generate(llm, PROMPTS, GREEDY) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    begun = [(step, request) for step in steps for request in step.scheduled_new_reqs]
    assert any(
        step.num_scheduled_tokens[request.req_id] < len(request.prompt_token_ids)
        for step, request in begun
    )
    drafts = [draft for step in steps for draft in step.scheduled_spec_decode_tokens.values()]
    assert 0 < max(map(len, drafts)) < 80
