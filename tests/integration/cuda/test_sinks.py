"""Model Runner V2 with attention sinks: what V2 gives without trees.

It runs under the Triton interpreter, in a process of its own: see `test_runner`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from v2_scripts import run_script

pytestmark = pytest.mark.slow

WINDOW = 24
GROUPS = {"num_gpu_blocks_override": 24}  # for two groups


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("v2")
    return run_script(__file__, folder / "result.json", folder)


def test_tokens_equal_those_without_speculation(result):
    assert result["trees"] == result["plain"]
    assert result["accepted tokens"] > 0
    assert result["moved rows"] > 0


def test_the_layers_have_sinks(result):
    assert result["layers with sinks"] == 4


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one without trees, and one with."""
    import torch
    from derived_models import gpt_oss
    from engines import counter, runner
    from test_runner import GREEDY, LLM_ARGUMENTS, SEEDED, generate
    from vllm import LLM

    from vllm_recycle.integration.cuda import runner as v2_runner

    batch = [((0, 60), GREEDY | {"max_tokens": 16}), ((3, 50), SEEDED | {"max_tokens": 16})]
    model = gpt_oss(folder / "model", WINDOW, [-1.0, 2.0, 4.0, 6.0])
    arguments = LLM_ARGUMENTS | GROUPS | {"model": model}
    method = {"method": "token_recycling", "max_nodes": 8, "context_mib": 1}
    method["num_speculative_tokens_per_batch_size"] = [(1, 4, 8)]
    moved: list[int] = []
    compact_path = v2_runner.compact_path

    def watched(layers: Any, slots: Any, rows: Any, starts: Any, path: Any) -> None:
        moved.append(int((path > torch.arange(path.shape[1])).sum()))
        compact_path(layers, slots, rows, starts, path)

    v2_runner.compact_path = watched

    def tokens_of(llm: Any) -> list[list[int]]:
        return [output["token_ids"] for output in generate(llm, [batch])]

    result: dict[str, Any] = {}
    llm = LLM(**arguments)
    result["plain"] = tokens_of(llm)
    llm.llm_engine.engine_core.shutdown()
    llm = LLM(**arguments, speculative_config=method)
    result["trees"] = tokens_of(llm)
    result["accepted tokens"] = counter(llm, "spec_decode_num_accepted_tokens")
    result["moved rows"] = sum(moved)
    names = [name for name, _ in runner(llm).model.named_parameters()]
    result["layers with sinks"] = sum(name.endswith(".sinks") for name in names)
    llm.llm_engine.engine_core.shutdown()
    return result


if __name__ == "__main__":
    import v2_shim

    v2_shim.install()
    outputs = Path(sys.argv[1])
    (outputs / "result.json").write_text(json.dumps(main(outputs)))
