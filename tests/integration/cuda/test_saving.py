"""The matrix file of a template on Model Runner V2: read behind warm-up steps, and written.

Warm-up steps are vLLM's for a GPU, but for top-k and top-p.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from engines import core, engine, runner
from safetensors.torch import load_file
from v2_engines import GREEDY, LLM_ARGUMENTS, SCHEDULE, TREE, tokens_of, with_sizes
from vllm import SamplingParams
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.warmup import warmup_kernels

pytestmark = pytest.mark.slow

FIRST, SECOND = [((0, 16), GREEDY)], [((0, 16), GREEDY), ((20, 48), GREEDY)]


def test_warm_up_teaches_and_is_forgotten(result):
    for name in ("first", "second"):
        assert result[name]["rows behind warm-up"] > 0
    assert result["first"]["rows at the start"] == 0


@pytest.mark.parametrize("name", ["first", "second"])
def test_what_was_learnt_is_written(result, name):
    assert result[name]["learnt"] != result[name]["known at the start"]
    assert result[name]["written"] == result[name]["learnt"]
    assert result[name]["written at the end"] == result[name]["learnt at the end"]


def test_an_engine_starts_with_what_was_written(result):
    assert result["second"]["known at the start"] == result["first"]["written at the end"]


def test_tokens_do_not_depend_on_what_is_known(result):
    assert result["second"]["token ids"][:1] == result["first"]["token ids"]


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one that starts with nothing, and one with its file."""
    tree, file = folder / "tree.json", folder / "matrix.safetensors"
    TREE.save(tree)
    compile_or_warm_up = CPUWorker.compile_or_warm_up_model
    taught: list[int] = []

    def warm_up_as_on_a_gpu(worker: Any) -> Any:
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)
        taught.append(worker.drafter.state.matrix.num_written)
        return compile_or_warm_up(worker)

    CPUWorker.compile_or_warm_up_model = warm_up_as_on_a_gpu
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(**GREEDY))

    def digest(tensor: Any) -> str:
        return sha256(tensor.contiguous().numpy().tobytes()).hexdigest()

    def written() -> str:
        return digest(load_file(file)["adjacency_matrix"])

    method = {"method": "token_recycling", "tree": str(tree), "matrix_file": str(file)}
    result: dict[str, Any] = {}
    for name, batch in (("first", FIRST), ("second", SECOND)):
        with engine(with_sizes(method, SCHEDULE), **LLM_ARGUMENTS) as llm:
            matrix = runner(llm).tree_drafter.state.matrix
            found = {"rows behind warm-up": taught.pop(), "rows at the start": matrix.num_written}
            found["known at the start"] = digest(matrix.shared_entries())
            found["token ids"] = tokens_of(llm, batch)
            found["learnt"] = digest(matrix.shared_entries())
            core(llm).model_executor.collective_rpc("save_draft_state")
            found["written"] = written()
            file.unlink()
            tokens_of(llm, batch)  # so that there is something to write at the end
            found["learnt at the end"] = digest(matrix.shared_entries())
        result[name] = found | {"written at the end": written()}
    return result
