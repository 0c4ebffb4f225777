"""The matrix file of a template on Model Runner V2: read behind warm-up steps, and written.

In Triton's interpreter, in a process of its own that this file is the script of; `test_runner`
says what that leaves out. Warm-up steps are vLLM's for a GPU, but for top-k and top-p.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from test_runner import GREEDY, LLM_ARGUMENTS, SCHEDULE, TREE, generate
from v2_scripts import run_script

pytestmark = pytest.mark.slow

FIRST, SECOND = [((0, 16), GREEDY)], [((0, 16), GREEDY), ((20, 48), GREEDY)]


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("v2")
    return run_script(__file__, folder / "result.json", folder)


def test_warm_up_teaches_and_is_forgotten(result):
    for engine in ("first", "second"):
        assert result[engine]["rows behind warm-up"] > 0
    assert result["first"]["rows at the start"] == 0


@pytest.mark.parametrize("engine", ["first", "second"])
def test_what_was_learnt_is_written(result, engine):
    assert result[engine]["learnt"] != result[engine]["known at the start"]
    assert result[engine]["written"] == result[engine]["learnt"]
    assert result[engine]["written at the end"] == result[engine]["learnt at the end"]


def test_an_engine_starts_with_what_was_written(result):
    assert result["second"]["known at the start"] == result["first"]["written at the end"]


def test_tokens_do_not_depend_on_what_is_known(result):
    assert result["second"]["token ids"][:1] == result["first"]["token ids"]


def main(folder: Path) -> dict[str, Any]:
    """In the process with the engines: one that starts with nothing, and one with its file."""
    from engines import core, runner
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import warmup_kernels

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
    method["num_speculative_tokens_per_batch_size"] = SCHEDULE
    result: dict[str, Any] = {}
    for name, batch in (("first", FIRST), ("second", SECOND)):
        llm = LLM(**LLM_ARGUMENTS, speculative_config=method)
        matrix = runner(llm).drafter.state.matrix
        found = {"rows behind warm-up": taught.pop(), "rows at the start": matrix.num_written}
        found["known at the start"] = digest(matrix.shared_entries())
        found["token ids"] = [output["token_ids"] for output in generate(llm, [batch])]
        found["learnt"] = digest(matrix.shared_entries())
        core(llm).model_executor.collective_rpc("save_draft_state")
        found["written"] = written()
        file.unlink()
        generate(llm, [batch])  # so that there is something to write at the end
        found["learnt at the end"] = digest(matrix.shared_entries())
        llm.llm_engine.engine_core.shutdown()
        result[name] = found | {"written at the end": written()}
    return result


if __name__ == "__main__":
    import v2_shim

    v2_shim.install()
    outputs = Path(sys.argv[1])
    (outputs / "result.json").write_text(json.dumps(main(outputs)))
