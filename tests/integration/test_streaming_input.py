"""A request whose prompt comes in chunks gets, behind each, what it gets without speculation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from engines import SMALL_OUROBOROS, TARGET, TOKEN_RECYCLING, read_prompts
from vllm.v1.metrics.reader import get_metrics_snapshot

CHUNK = 24


async def stream(speculative_config: dict[str, Any] | None, texts: list[str]) -> list[list[int]]:
    """Token ids of what follows the chunks of each text."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        TARGET,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculative_config,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    # Short outputs of several lengths end within accepted paths, and behind them.
    lengths = [3, 5, 8, 13]
    tokenizer = engine.get_tokenizer()

    async def chunks(token_ids: list[int]) -> AsyncIterator[StreamingInput]:
        for index, start in enumerate(range(0, len(token_ids), CHUNK)):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=lengths[index % len(lengths)],
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": token_ids[start : start + CHUNK]}
            yield StreamingInput(prompt=prompt, sampling_params=params)

    async def output(index: int, text: str) -> list[int]:
        params = SamplingParams(temperature=0.0, output_kind=RequestOutputKind.DELTA)
        given = chunks(tokenizer.encode(text))
        results = engine.generate(given, params, request_id=str(index))
        return [token async for result in results for token in result.outputs[0].token_ids]

    try:
        return await asyncio.gather(*(output(*indexed) for indexed in enumerate(texts)))
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return read_prompts(6)


@pytest.fixture(scope="module")
def expected(texts) -> list[list[int]]:
    return asyncio.run(stream(None, texts))


@pytest.mark.parametrize("method", [TOKEN_RECYCLING, SMALL_OUROBOROS])
def test_what_follows_each_chunk_is_the_same(method, texts, expected):
    assert asyncio.run(stream(method, texts)) == expected
    # Those of the last engine, whose start unregisters what was there.
    name = "vllm:spec_decode_num_accepted_tokens"
    assert sum(metric.value for metric in get_metrics_snapshot() if metric.name == name) > 30
