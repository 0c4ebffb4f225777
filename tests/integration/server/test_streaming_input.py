"""A request whose prompt comes in chunks gets, behind each, what it gets without speculation."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.reader import get_metrics_snapshot

from tests.integration.engines import SMALL_OUROBOROS, TARGET, TOKEN_RECYCLING, read_prompts
from tests.integration.models.adapters import write_adapter
from vllm_recycle.integration.start.versions import FEATURES

CHUNK = 24
# At a price that does not go by how busy this machine is.
PRICED = {**TOKEN_RECYCLING, "row_cost": 0.02}


@pytest.fixture(autouse=True)
def _forks(monkeypatch):
    """Processes import nothing once more. On a CPU vLLM spawns them, whatever it is told."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda *_, **__: fork)


def run(
    ask: Callable[..., Awaitable[Any]],
    speculative_config: dict[str, Any] | None,
    *given: Any,
    **settings: Any,
) -> Any:
    """What it says of an engine and what is given."""
    arguments = AsyncEngineArgs(
        TARGET,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculative_config,
        **settings,
    )

    async def main() -> Any:
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            return await ask(engine, *given)
        finally:
            engine.shutdown()

    return asyncio.run(main())


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def seeded(max_tokens: int) -> SamplingParams:
    """Sampling that ends a turn at one token of eight, or where it repeats itself."""
    params = greedy(max_tokens)
    params.temperature, params.seed = 0.6, 1
    params.stop_token_ids = [*range(0, 4096, 8)]
    params.repetition_detection = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
    return params


def chunk(
    prompt: Any, max_tokens: int, params: Callable[[int], SamplingParams] = greedy, **given: Any
) -> StreamingInput:
    ids = {"prompt_token_ids": [*prompt], **given}
    return StreamingInput(prompt=ids, sampling_params=params(max_tokens))


async def answer(
    engine: AsyncLLM,
    name: str,
    chunks: AsyncIterator[StreamingInput],
    params: Callable[[int], SamplingParams] = greedy,
) -> list[int]:
    """All token ids of a session."""
    results = engine.generate(chunks, params(16), request_id=name)
    return [token async for result in results for token in result.outputs[0].token_ids]


async def stream(engine: AsyncLLM, params: Callable[[int], SamplingParams]) -> list[list[int]]:
    """Token ids of what follows the chunks of each text."""
    # Short outputs of several lengths end within accepted paths, and behind them.
    lengths = [3, 5, 8, 13]
    tokenizer = engine.get_tokenizer()

    async def chunks(token_ids: list[int]) -> AsyncIterator[StreamingInput]:
        for index, start in enumerate(range(0, len(token_ids), CHUNK)):
            yield chunk(token_ids[start : start + CHUNK], lengths[index % len(lengths)], params)

    texts = map(tokenizer.encode, read_prompts(6))
    return await asyncio.gather(
        *(answer(engine, str(i), chunks(token_ids), params) for i, token_ids in enumerate(texts))
    )


@cache
def expected(params: Callable[[int], SamplingParams]) -> list[list[int]]:
    return run(stream, None, params, max_num_seqs=4)


def accepted_tokens() -> float:
    """Those of the last engine, whose start unregisters what was there."""
    name = "vllm:spec_decode_num_accepted_tokens"
    return sum(metric.value for metric in get_metrics_snapshot() if metric.name == name)


@pytest.mark.parametrize("method", [PRICED, SMALL_OUROBOROS])
def test_what_follows_each_chunk_is_the_same(method):
    plain = expected(greedy)
    assert run(stream, method, greedy, max_num_seqs=4) == plain
    # With vLLM 0.30 it is 20.
    assert accepted_tokens() > (30 if FEATURES.cpu_runs_heads else 15)


@pytest.mark.parametrize("method", [{**PRICED, "row_cost": 0}, SMALL_OUROBOROS])
def test_a_turn_that_ends_within_a_path_leaves_the_seed_where_it_was(method):
    plain = expected(seeded)
    assert run(stream, method, seeded, max_num_seqs=4) == plain
    assert accepted_tokens() > 0


async def table_fill(engine: AsyncLLM, salts: list[dict[str, str]]) -> list[float]:
    """The part of what is shared that was written, behind sessions whose first chunks had these."""

    async def chunks(salt: dict[str, str]) -> AsyncIterator[StreamingInput]:
        yield chunk(range(9, 40), 4, **salt)
        yield chunk(range(50, 70), 8)

    fills = []
    for index, salt in enumerate(salts):
        await answer(engine, str(index), chunks(salt))
        [statistics] = await engine.collective_rpc("draft_statistics")
        fills.append(statistics["table_fill"])
    return fills


def test_a_session_keeps_the_cache_salt_that_it_began_with():
    salts = [{"cache_salt": "salt"}, {}]
    salted, free = run(table_fill, {**PRICED, "scope": "shared"}, salts, max_num_seqs=2)
    assert salted == 0 < free


async def crowd(engine: AsyncLLM, adapters: list[LoRARequest]) -> list[list[int]]:
    """A session of one adapter waits for its turn while requests of another take all places."""
    first_turn, other_runs, others_ended = asyncio.Event(), asyncio.Event(), list[int]()

    async def chunks() -> AsyncIterator[StreamingInput]:
        yield chunk(range(9, 40), 4)
        await other_runs.wait()
        yield chunk(range(50, 70), 8)

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

    return await asyncio.gather(session(), *map(other, range(3)))


@pytest.mark.slow
def test_a_session_that_waits_takes_nobodys_place(tmp_path):
    adapters = []
    for index, name in enumerate("ab"):
        path = write_adapter(tmp_path / name, TARGET, seed=index, has_head=False)
        adapters.append(LoRARequest(name, 1 + index, path))
    few = {"max_num_seqs": 2, "enable_lora": True, "max_loras": 1}
    plain = run(crowd, None, adapters, **few)
    assert [*map(len, plain)] == [12, 150, 150, 150]
    assert run(crowd, PRICED, adapters, **few) == plain
