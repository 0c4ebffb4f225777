"""Adapters and the base model in one batch, each request as vLLM answers it without speculation.

With Model Runner V2 in the interpreter vLLM's LoRA kernels are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from tests.integration.cuda.v2_engines import (
    GREEDY,
    GROWN,
    IS_V2,
    LLM_ARGUMENTS,
    MODEL,
    SCHEDULE,
    SEEDED,
    TEXT,
    with_sizes,
)
from tests.integration.engines import GROWN as FREE_ROWS
from tests.integration.engines import (
    OUROBOROS,
    SMALL_BUDGET,
    SMALL_OUROBOROS,
    TARGET,
    TOKEN_RECYCLING,
    counter,
    engine,
    runner,
)
from tests.integration.models import heads
from tests.integration.models.adapters import write_adapter

pytestmark = pytest.mark.slow

# Which tokens of TEXT are the prompt, and the sampling parameters. One has two full blocks: with a
# head vLLM takes the last one of a prompt from no cache.
REQUESTS = [
    ((0, 40), {**GREEDY, "max_tokens": 16}),
    ((0, 16), SEEDED),
    ((3, 75), {**GREEDY, "max_tokens": 24, "logprobs": 1}),
    ((5, 50), {**GREEDY, "max_tokens": 24, "repetition_penalty": 1.2}),
]
ARGUMENTS = {"enable_lora": True, "max_loras": 2, "enable_prefix_caching": True, "block_size": 32}
# For each runner the model, how many of the requests, and by name the method and vLLM's
# flags. With one adapter the base model's requests are beside each in turn, in the only slot.
V1 = (
    TARGET,
    len(REQUESTS),
    {
        "priced with an adapter": (TOKEN_RECYCLING, {}),
        "ouroboros": (SMALL_OUROBOROS, {"max_loras": 1}),
    },
)
V2 = (MODEL, 2, {"grown": (with_sizes(GROWN, SCHEDULE), LLM_ARGUMENTS)})


def test_all_adapters_mixed_in_one_batch(served):
    for answers in zip(*served["alone"], strict=True):
        assert len(set(map(tuple, answers))) == 3, "else nothing here would say anything"
    expected = [tokens for answers in served["alone"] for tokens in answers]
    # Layers have an empty adapter only where vLLM needs it. Remove when vLLM 0.32 is dropped.
    needs = Version(vllm.__version__) < Version("0.33")
    for found in served["mixed"].values():
        assert found["adapters at the start"] == [], "those that steps were timed with"
        assert found["empty adapters of a layer"] == [int(needs)]
        assert found["answers"] == [expected] * 2
        assert found["accepted"] > 0
        assert found["hits"] > 0


def test_lora_with_the_flags_that_vllm_has_by_default(served):
    for answers in served["by default"]:
        assert answers == served["alone"]


def answer(llm: Any, adapters: Sequence[LoRARequest | None], count: int) -> list[list[int]]:
    """The tokens of so many requests with the first adapter, then with the next."""
    token_ids, requests = llm.get_tokenizer().encode(TEXT), REQUESTS[:count]
    results = llm.generate(
        [{"prompt_token_ids": token_ids[slice(*at)]} for at, _ in requests] * len(adapters),
        [SamplingParams(**params) for _, params in requests] * len(adapters),
        lora_request=[adapter for adapter in adapters for _ in requests],
        use_tqdm=False,
    )
    return [[*result.outputs[0].token_ids] for result in results]


def empty_adapters(llm: Any) -> list[int]:
    """How many adapters layers have beside those that vLLM makes room for."""
    stacked = [one.lora_b_stacked for one in runner(llm).model.lora_manager.modules.values()]
    sizes = {len(tensors if torch.is_tensor(tensors) else tensors[0]) for tensors in stacked}
    return [size - runner(llm).lora_config.max_loras for size in sizes]


def main(folder: Path) -> dict[str, Any]:
    """For each runner: one engine without speculation, and those with it."""
    model, count, methods = V2 if IS_V2 else V1
    if not IS_V2:
        eagle = {"method": "eagle", "model": heads.eagle(folder / "eagle")}
        methods = methods | {"cut, along a head": ({**FREE_ROWS, "trunk": eagle}, SMALL_BUDGET)}
    arguments = ARGUMENTS | (LLM_ARGUMENTS if IS_V2 else {}) | {"model": model}
    head = write_adapter(folder / "head", model, seed=1, has_head=True)
    plain = write_adapter(folder / "plain", model, seed=2, has_head=False)
    # None is the base model. It comes first: as vLLM is, it gets an adapter's head once there is
    # one in the last slot.
    adapters = [None, LoRARequest("plain", 1, plain), LoRARequest("head", 2, head)]
    with engine(**arguments) as llm:
        alone = [answer(llm, [adapter], count) for adapter in adapters]
    mixed = {}
    for name, (method, flags) in methods.items():
        with engine(method, **arguments | flags | {"model": model}) as llm:
            mixed[name] = {
                "adapters at the start": [*runner(llm).list_loras()],
                "empty adapters of a layer": empty_adapters(llm),
                # The second time prompts come from the cache, and drafts from what was learnt.
                "answers": [answer(llm, adapters, count) for _ in range(2)],
                "accepted": counter(llm, "spec_decode_num_accepted_tokens"),
                "hits": counter(llm, "prefix_cache_hits"),
            }
    by_default = []
    of_default = ({**FREE_ROWS, "tree": "default"}, {**OUROBOROS, "row_cost": 0})
    for method in () if IS_V2 else of_default:
        # But for what makes outputs comparable, and the memory of this machine.
        flags = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 28, "disable_log_stats": False}
        llm = LLM(TARGET, enable_lora=True, speculative_config=method, **flags)
        try:
            by_default.append([answer(llm, [adapter], count) for adapter in adapters])
            assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        finally:
            llm.llm_engine.engine_core.shutdown()
    return {"alone": alone, "mixed": mixed, "by default": by_default}
