# SPDX-License-Identifier: Apache-2.0
"""For `tests/v1/sample/` of vLLM: what a partial prefill samples is thrown away."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig
from vllm import LLM, SamplingParams

PROMPT_LEN = 20


@pytest.fixture
def model(tmp_path):
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def llm(model, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    llm = LLM(
        model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=2,
        max_num_batched_tokens=PROMPT_LEN + 4,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_a_seed_gives_the_same_tokens_however_its_prompt_is_chunked(llm):
    prompts = [{"prompt_token_ids": [*range(first, first + PROMPT_LEN)]} for first in (10, 40)]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True, detokenize=False)
        for seed in range(2)
    ]

    def token_ids(prompts, params):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    # Of two prompts the second is cut; one alone is whole.
    whole = [token_ids([prompts[i]], [params[i]])[0] for i in range(2)]
    assert token_ids(prompts, params) == whole
