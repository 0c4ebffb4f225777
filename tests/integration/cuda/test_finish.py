"""What Model Runner V2 is configured with, by vLLM and us, for many flags; no engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import OUROBOROS, TARGET, TOKEN_RECYCLING

METHODS = {
    "token_recycling": TOKEN_RECYCLING,
    "ouroboros": OUROBOROS | {"model": TARGET},
}  # of even heads
MINE = [(1, 4, 16), (5, 1024, 0)]
# By name: flags, and keys of the method.
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "two replicas": ({"data_parallel_size": 2}, {}),
    "two replicas, a table": (
        {"data_parallel_size": 2},
        {"num_speculative_tokens_per_batch_size": MINE},
    ),
    "two ranks": ({"tensor_parallel_size": 2}, {}),
    "eager": ({"enforce_eager": True}, {}),
    "adapters": ({"enable_lora": True}, {}),
    "one request": ({"max_num_seqs": 1}, {}),
    "1,024 requests": ({"max_num_seqs": 1024}, {}),
    "capture sizes": ({"cudagraph_capture_sizes": [8, 16]}, {}),
}
CASES = [(method, name) for method in METHODS for name in FLAGS]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_vllm_has_the_table_that_we_have_and_there_are_sizes(result, method, name):
    found = result[f"{method}, {name}"]
    assert found["table of vLLM"] == found["our table"]
    assert found["sizes of one request"]
    mine = "num_speculative_tokens_per_batch_size" in FLAGS[name][1]
    assert not mine or found["our table"] == [list(entry) for entry in MINE]


def main(_: Path) -> dict[str, Any]:
    """In a process where V2 is what a GPU has."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_recycle.integration.draft_sizes import sizes_of
    from vllm_recycle.integration.options import table_of

    def make(model: str, method: dict[str, Any], **flags: Any) -> Any:
        args = EngineArgs(model, dtype="float32", speculative_config=method, **flags)
        return args.create_engine_config()

    result: dict[str, Any] = {}
    for method, name in CASES:
        flags, keys = FLAGS[name]
        config = make(TARGET, METHODS[method] | keys, **flags)
        result[f"{method}, {name}"] = {
            "table of vLLM": config.speculative_config.num_speculative_tokens_per_batch_size,
            "our table": table_of(config),
            "sizes of one request": sizes_of(config)[1],
        }
    return result
