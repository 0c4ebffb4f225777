# SPDX-License-Identifier: Apache-2.0
"""For `tests/v1/streaming_input/` of vLLM: a turn that ends within the accepted draft tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE, NUM_BLOCKS = 16, 32
DRAFT = [101, 102, 103]
FIRST_CHUNK, SECOND_CHUNK = [*range(10, 18)], [*range(30, 35)]


@pytest.fixture
def scheduler(tmp_path):
    LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    config = EngineArgs(
        str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        async_scheduling=False,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": len(DRAFT)},
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def chunk_of(token_ids, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request("session", [*token_ids], params, pooling_params=None, resumable=True)


def step(scheduler, sampled_token_ids):
    """Returns how many tokens the step computed."""
    output = scheduler.schedule()
    [num_tokens] = output.num_scheduled_tokens.values()
    result = ModelRunnerOutput(["session"], {"session": 0}, [[*sampled_token_ids]])
    scheduler.update_from_output(output, result)
    return num_tokens


def test_a_session_resumes_behind_the_tokens_that_were_kept(scheduler):
    session = chunk_of(FIRST_CHUNK, max_tokens=2)
    scheduler.add_request(session)
    assert step(scheduler, [100]) == len(FIRST_CHUNK)
    scheduler.update_draft_token_ids(DraftTokenIds(["session"], [DRAFT]))
    # All drafts are accepted, but the turn has room for one token.
    assert step(scheduler, [*DRAFT, 104]) == 1 + len(DRAFT)
    # The last token that was kept has not been computed, and is left out of the next prompt.
    kept = [*FIRST_CHUNK, 100]
    assert session.num_computed_tokens == len(kept)
    scheduler.add_request(chunk_of(SECOND_CHUNK, max_tokens=2))
    assert [*session.prompt_token_ids] == [*kept, *SECOND_CHUNK]
    assert step(scheduler, [105]) == len(SECOND_CHUNK)
