"""Two stages of a pipeline on Model Runner V2, which draft chains: the last one, for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import TOKEN_RECYCLING, counter, engine
from test_runner import GRAMMARS, MIXED
from v2_engines import LLM_ARGUMENTS, tokens_of
from v2_scripts import run_script

pytestmark = pytest.mark.slow

NUM_STAGES = 2
BATCHES = [MIXED, MIXED, GRAMMARS]


@pytest.fixture(scope="module")
def result(request, tmp_path_factory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        # Workers are forked, so that they have the shim too, and threads are not.
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        return run_script(request.path, tmp_path_factory.mktemp("v2"))


def test_tokens_equal_those_without_speculation(result):
    assert result["chains"] == result["plain"]
    assert result["accepted tokens"] > 0


def test_the_last_stage_learns_and_saves(result):
    first, last = result["known"]
    assert first == 0 < last
    assert result["has a file"]


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one of two stages, and one without drafts."""
    file = folder / "matrix.safetensors"
    method = TOKEN_RECYCLING | {"context_mib": 1, "matrix_file": str(file)}
    stages = {"pipeline_parallel_size": NUM_STAGES, "distributed_executor_backend": "mp"}
    with engine(method, **LLM_ARGUMENTS | stages) as llm:
        result: dict[str, Any] = {
            "chains": tokens_of(llm, *BATCHES),
            "known": [found["table_fill"] for found in llm.collective_rpc("draft_statistics")],
            "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens"),
        }
    with engine(**LLM_ARGUMENTS) as llm:
        result["plain"] = tokens_of(llm, *BATCHES)
    return result | {"has a file": file.exists()}
