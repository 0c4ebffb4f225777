"""Adapters and the base model in one batch, each request as vLLM answers it without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from adapters import write_adapter
from engines import (
    GROWN,
    OUROBOROS,
    SMALL_BUDGET,
    SMALL_OUROBOROS,
    TARGET,
    TOKEN_RECYCLING,
    counter,
    engine,
    read_prompts,
    runner,
)
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.slow

PROMPTS = read_prompts(4, max_words=40)
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
PARAMS = [
    SamplingParams(**(GREEDY | extra))
    for extra in ({}, {"temperature": 0.7, "seed": 3}, {"logprobs": 1}, {"repetition_penalty": 1.2})
]
# Of each method: its options, how many adapters are in a step, and vLLM's flags. With one adapter
# the base model's requests are beside each in turn, in the only slot.
METHODS = {
    "priced with an adapter": (TOKEN_RECYCLING, 2, {}),
    "template": ({**TOKEN_RECYCLING, "tree": "default"}, 2, {}),
    "ouroboros": (SMALL_OUROBOROS, 1, {}),
    "cut": (GROWN, 2, SMALL_BUDGET),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[LoRARequest | None]:
    """None, which is the base model; one with a head of its own, and one without."""
    folder = tmp_path_factory.mktemp("adapters")
    with_head = write_adapter(folder / "head", TARGET, seed=1, has_head=True)
    without_head = write_adapter(folder / "plain", TARGET, seed=2, has_head=False)
    return [None, LoRARequest("plain", 1, without_head), LoRARequest("head", 2, with_head)]


def answer(llm: Any, adapters: Sequence[LoRARequest | None]) -> list[tuple[int, ...]]:
    """The tokens of all prompts with the first adapter, then with the next."""
    results = llm.generate(
        PROMPTS * len(adapters),
        PARAMS * len(adapters),
        lora_request=[adapter for adapter in adapters for _ in PROMPTS],
        use_tqdm=False,
    )
    return [tuple(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def expected(adapters) -> list[tuple[int, ...]]:
    """By vLLM alone, each adapter in a batch of its own.

    The base model first: as vLLM is, it gets an adapter's head once there is one in the last slot.
    """
    with engine(enable_lora=True, max_loras=2) as llm:
        return [tokens for adapter in adapters for tokens in answer(llm, [adapter])]


def test_adapters_differ(expected):
    """Else nothing here would say anything."""
    base, plain, head = (expected[i : i + len(PROMPTS)] for i in range(0, len(expected), 4))
    for answers in zip(base, plain, head, strict=True):
        assert len(set(answers)) == 3


@pytest.mark.parametrize("name", METHODS)
def test_all_adapters_mixed_in_one_batch(name, adapters, expected):
    method, max_loras, flags = METHODS[name]
    flags = {**flags, "enable_prefix_caching": True, "block_size": 32}
    with engine(method, enable_lora=True, max_loras=max_loras, **flags) as llm:
        assert not runner(llm).list_loras(), "those that steps were timed with"
        assert answer(llm, adapters) == expected
        # Again, with prompts from the cache, and drafts from what was learnt.
        before = counter(llm, "spec_decode_num_accepted_tokens")
        assert answer(llm, adapters) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > before
        assert counter(llm, "prefix_cache_hits") > 0


@pytest.mark.parametrize("method", [GROWN, {**OUROBOROS, "row_cost": 0}])
def test_lora_with_the_flags_that_vllm_has_by_default(method, adapters, expected):
    """But for what makes outputs comparable, and the memory of this machine."""
    flags = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 28, "disable_log_stats": False}
    llm = LLM(TARGET, enable_lora=True, speculative_config=method, **flags)
    try:
        for index, adapter in enumerate(adapters):
            first = index * len(PROMPTS)
            assert answer(llm, [adapter]) == expected[first : first + len(PROMPTS)]
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
    finally:
        llm.llm_engine.engine_core.shutdown()
