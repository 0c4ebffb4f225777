"""A request whose prompt comes in chunks gets, behind each, what it gets without speculation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

from tests.integration.engines import SMALL_OUROBOROS, TARGET, TOKEN_RECYCLING, read_prompts
from tests.integration.models.adapters import write_adapter
from vllm_recycle.integration.versions import FEATURES

CHUNK = 24
# At a price that does not go by how busy this machine is.
PRICED = {**TOKEN_RECYCLING, "row_cost": 0.02}


def make_engine(speculative_config: dict[str, Any] | None, **settings: Any) -> AsyncLLM:
    arguments = AsyncEngineArgs(
        TARGET,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculative_config,
        **settings,
    )
    return AsyncLLM.from_engine_args(arguments)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


async def stream(speculative_config: dict[str, Any] | None, texts: list[str]) -> list[list[int]]:
    """Token ids of what follows the chunks of each text."""
    engine = make_engine(speculative_config, max_num_seqs=4)
    # Short outputs of several lengths end within accepted paths, and behind them.
    lengths = [3, 5, 8, 13]
    tokenizer = engine.get_tokenizer()

    async def chunks(token_ids: list[int]) -> AsyncIterator[StreamingInput]:
        for index, start in enumerate(range(0, len(token_ids), CHUNK)):
            params = greedy(lengths[index % len(lengths)])
            prompt = {"prompt_token_ids": token_ids[start : start + CHUNK]}
            yield StreamingInput(prompt=prompt, sampling_params=params)

    async def output(index: int, text: str) -> list[int]:
        given = chunks(tokenizer.encode(text))
        results = engine.generate(given, greedy(16), request_id=str(index))
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


@pytest.mark.parametrize("method", [PRICED, SMALL_OUROBOROS])
def test_what_follows_each_chunk_is_the_same(method, texts, expected):
    assert asyncio.run(stream(method, texts)) == expected
    # Those of the last engine, whose start unregisters what was there.
    name = "vllm:spec_decode_num_accepted_tokens"
    accepted = sum(metric.value for metric in get_metrics_snapshot() if metric.name == name)
    # With vLLM 0.30 it is 20.
    assert accepted > (30 if FEATURES.cpu_runs_heads else 15)


async def table_fill(cache_salt: str | None) -> float:
    """The part of what is shared that a session has written, whose first chunk had this salt."""
    engine = make_engine({**PRICED, "scope": "shared"}, max_num_seqs=2)

    async def chunks() -> AsyncIterator[StreamingInput]:
        first = {"prompt_token_ids": [*range(9, 40)]}
        if cache_salt is not None:
            first["cache_salt"] = cache_salt
        yield StreamingInput(first, sampling_params=greedy(4))
        yield StreamingInput({"prompt_token_ids": [*range(50, 70)]}, sampling_params=greedy(8))

    try:
        async for _ in engine.generate(chunks(), greedy(8), request_id="session"):
            pass
        [statistics] = await engine.collective_rpc("draft_statistics")
        return statistics["table_fill"]
    finally:
        engine.shutdown()


def test_a_session_keeps_the_cache_salt_that_it_began_with():
    assert asyncio.run(table_fill("salt")) == 0 < asyncio.run(table_fill(None))


async def crowd(speculative_config: dict[str, Any] | None, folder: Path) -> list[list[int]]:
    """A session of one adapter waits for its turn while requests of another take all places."""
    adapters = [LoRARequest(name, i, str(folder / name)) for i, name in enumerate("ab", start=1)]
    engine = make_engine(speculative_config, max_num_seqs=2, enable_lora=True, max_loras=1)
    first_turn, other_runs, others_ended = asyncio.Event(), asyncio.Event(), list[int]()

    async def chunks() -> AsyncIterator[StreamingInput]:
        yield StreamingInput({"prompt_token_ids": [*range(9, 40)]}, sampling_params=greedy(4))
        await other_runs.wait()
        yield StreamingInput({"prompt_token_ids": [*range(50, 70)]}, sampling_params=greedy(8))

    async def session() -> list[int]:
        token_ids: list[int] = []
        async for result in engine.generate(
            chunks(), greedy(8), request_id="session", lora_request=adapters[0]
        ):
            token_ids += result.outputs[0].token_ids
            if len(token_ids) == 4:
                first_turn.set()
        assert others_ended, "the second turn has to wait for the other adapter's requests"
        return token_ids

    async def other(index: int) -> list[int]:
        await first_turn.wait()
        token_ids: list[int] = []
        prompt = {"prompt_token_ids": [*range(100 + index, 130)]}
        async for result in engine.generate(
            prompt, greedy(150), request_id=str(index), lora_request=adapters[1]
        ):
            token_ids += result.outputs[0].token_ids
            other_runs.set()
        others_ended.append(index)
        return token_ids

    try:
        return await asyncio.gather(session(), *map(other, range(3)))
    finally:
        engine.shutdown()


@pytest.mark.slow
def test_a_session_that_waits_takes_nobodys_place(tmp_path):
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, TARGET, seed=seed, has_head=False)
    expected = asyncio.run(crowd(None, tmp_path))
    assert [*map(len, expected)] == [12, 150, 150, 150]
    assert asyncio.run(crowd(PRICED, tmp_path)) == expected
