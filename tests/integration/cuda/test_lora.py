"""Adapters and the base model in one batch of Model Runner V2 with trees.

vLLM's LoRA kernels are those of a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from engines import counter, engine
from v2_engines import GREEDY, GROWN, LLM_ARGUMENTS, MODEL, SCHEDULE, SEEDED, TEXT, with_sizes
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

pytestmark = pytest.mark.slow

# Which tokens of TEXT are the prompt, and the sampling parameters.
REQUESTS = [((0, 40), {**GREEDY, "max_tokens": 16}), ((0, 16), SEEDED)]
ARGUMENTS = {**LLM_ARGUMENTS, "enable_lora": True, "max_loras": 2}


def test_all_adapters_mixed_in_one_batch(result):
    base, plain, head = (result["alone"][i : i + len(REQUESTS)] for i in (0, 2, 4))
    for answers in zip(base, plain, head, strict=True):
        assert len(set(map(tuple, answers))) == 3
    assert result["mixed"] == [result["alone"]] * 2
    assert result["accepted"] > 0


def generate(llm: Any, adapters: list[Any]) -> list[list[int]]:
    """In the process with the engines: the tokens of all requests with the first adapter, ..."""
    token_ids = llm.get_tokenizer().encode(TEXT)
    prompts = [{"prompt_token_ids": token_ids[slice(*at)]} for at, _ in REQUESTS]
    outputs = llm.generate(
        prompts * len(adapters),
        [SamplingParams(**params) for _, params in REQUESTS] * len(adapters),
        lora_request=[adapter for adapter in adapters for _ in REQUESTS],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one without trees, and one with them."""
    plain = write_adapter(folder / "plain", MODEL, seed=2, has_head=False)
    head = write_adapter(folder / "head", MODEL, seed=1, has_head=True)
    adapters = [None, LoRARequest(plain, 1, plain), LoRARequest(head, 2, head)]
    with engine(**ARGUMENTS) as llm:
        alone = [tokens for adapter in adapters for tokens in generate(llm, [adapter])]
    with engine(with_sizes(GROWN, SCHEDULE), **ARGUMENTS) as llm:
        mixed = [generate(llm, adapters) for _ in range(2)]
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
    return {"alone": alone, "mixed": mixed, "accepted": accepted}
