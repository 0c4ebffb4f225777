"""Adapters and the base model in one batch of Model Runner V2 with trees.

See `test_runner` for how it runs without a GPU. vLLM's LoRA kernels are those of a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from test_runner import GREEDY, LLM_ARGUMENTS, MODEL, SCHEDULE, SEEDED, TEXT, TREE
from v2_scripts import run_script

# Which tokens of TEXT are the prompt, and the sampling parameters.
REQUESTS = [((0, 40), {**GREEDY, "max_tokens": 16}), ((0, 16), SEEDED)]
ARGUMENTS = {**LLM_ARGUMENTS, "enable_lora": True, "max_loras": 2}
METHOD = {
    "method": "token_recycling",
    "max_nodes": TREE.num_nodes,
    "context_mib": 1,
    "num_speculative_tokens_per_batch_size": SCHEDULE,
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("v2")
    plain = write_adapter(folder / "plain", MODEL, seed=2, has_head=False)
    head = write_adapter(folder / "head", MODEL, seed=1, has_head=True)
    output = folder / "result.json"
    return run_script(__file__, output, output, plain, head)


def test_all_adapters_mixed_in_one_batch(result):
    base, plain, head = (result["alone"][i : i + len(REQUESTS)] for i in (0, 2, 4))
    for answers in zip(base, plain, head, strict=True):
        assert len(set(map(tuple, answers))) == 3
    assert result["mixed"] == [result["alone"]] * 2
    assert result["accepted"] > 0


def generate(llm: Any, adapters: list[Any]) -> list[list[int]]:
    """In the process with the engines: the tokens of all requests with the first adapter, ..."""
    from vllm import SamplingParams

    token_ids = llm.get_tokenizer().encode(TEXT)
    prompts = [{"prompt_token_ids": token_ids[slice(*at)]} for at, _ in REQUESTS]
    outputs = llm.generate(
        prompts * len(adapters),
        [SamplingParams(**params) for _, params in REQUESTS] * len(adapters),
        lora_request=[adapter for adapter in adapters for _ in REQUESTS],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def main(*paths: str) -> dict[str, Any]:
    """In the process with the engines: one without trees, and one with them."""
    from engines import counter
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    adapters = [None, *(LoRARequest(path, i + 1, path) for i, path in enumerate(paths))]
    llm = LLM(**ARGUMENTS)
    alone = [tokens for adapter in adapters for tokens in generate(llm, [adapter])]
    llm.llm_engine.engine_core.shutdown()
    llm = LLM(**ARGUMENTS, speculative_config=METHOD)
    mixed = [generate(llm, adapters) for _ in range(2)]
    accepted = counter(llm, "spec_decode_num_accepted_tokens")
    llm.llm_engine.engine_core.shutdown()
    return {"alone": alone, "mixed": mixed, "accepted": accepted}


if __name__ == "__main__":
    import v2_shim

    v2_shim.install()
    Path(sys.argv[1]).write_text(json.dumps(main(*sys.argv[2:])))
