"""Greedy output is vLLM's own on a model of the shape that benchmarks use, with random weights.

That is SmolLM2-135M: five times as deep as the embedded target, and three query heads to a KV head.
The tokenizer and its vocabulary are the embedded models'.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engines import PAPER, TARGET, TOKEN_RECYCLING, core, counter, engine, generate, read_prompts
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
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
# Less than two prompts, or two trees.
SMALL_BUDGET = {"max_num_batched_tokens": 96, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("chat_model")
    config = AutoConfig.from_pretrained(TARGET, **SHAPE)
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TARGET) / name, folder)
    with torch.device("meta"):
        shapes = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(weight.shape)
        if weight.dim() == 1
        else torch.empty(weight.shape).normal_(std=STANDARD_DEVIATION, generator=generator)
        for name, weight in shapes.items()
    }
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    yield str(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def expected(model) -> list[list[tuple[int, ...]]]:
    with engine(model=model, max_model_len=MAX_MODEL_LEN) as llm:
        outputs = generate(llm, PROMPTS, GREEDY)
    assert all(len(set(token_ids)) > 8 for (token_ids,) in outputs)
    return outputs


@pytest.mark.parametrize("method", [TOKEN_RECYCLING, PAPER], ids=["default", "paper-80"])
def test_output_equals_vllm(model, expected, method):
    with engine(method, model=model, max_model_len=MAX_MODEL_LEN) as llm:
        assert generate(llm, PROMPTS, GREEDY) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_output_equals_vllm_with_prompts_in_chunks_and_trees_cut(model, expected, monkeypatch):
    with engine(PAPER, model=model, max_model_len=MAX_MODEL_LEN, **SMALL_BUDGET) as llm:
        scheduler, steps = core(llm).scheduler, []
        schedule = scheduler.schedule
        monkeypatch.setattr(
            scheduler, "schedule", lambda *args: steps.append(schedule(*args)) or steps[-1]
        )
        assert generate(llm, PROMPTS, GREEDY) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    begun = [(step, request) for step in steps for request in step.scheduled_new_reqs]
    assert any(
        step.num_scheduled_tokens[request.req_id] < len(request.prompt_token_ids)
        for step, request in begun
    )
    drafts = [draft for step in steps for draft in step.scheduled_spec_decode_tokens.values()]
    assert 0 < max(map(len, drafts)) < 80
