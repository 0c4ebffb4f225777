"""`distributed_executor_backend="ray"`: two ranks on two nodes of Ray, both on this machine.

This file is also the script that the engine is in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from vllm import SamplingParams

from tests.integration.engines import TOKEN_RECYCLING, core, counter, engine, generate, read_prompts
from tests.integration.server.servers import wait_until

PROMPTS = read_prompts(6)
GREEDY = SamplingParams(temperature=0, max_tokens=24)
ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_output_equals_vllm_with_ranks_on_two_nodes(tmp_path):
    pytest.importorskip("ray", reason="needs Ray, which `make ray` installs")
    from tests.integration.server import ray_platform
    from tests.integration.server.ray_processes import marked, wait_for_end

    ray_platform.install(tmp_path)
    output, matrix = tmp_path / "output.json", tmp_path / "matrix.safetensors"
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with marked() as environment, (tmp_path / "log").open("w+") as log:
        command = [sys.executable, __file__, str(output), str(matrix)]
        environment["PYTHONPATH"] = path
        run = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=500)
        log.seek(0)
        assert run.returncode == 0, log.read()[-6000:]
        wait_for_end(environment)
    ran = json.loads(output.read_text())
    assert ran["nodes"] == 2
    assert ran["accepted"] > 0
    with engine() as llm:
        expected = generate(llm, PROMPTS, GREEDY)
    assert [list(map(tuple, one)) for one in ran["outputs"]] == expected
    # Ray's workers are killed at the end: it was written before.
    assert load_file(matrix)


def main(output: str, matrix: str) -> None:
    """In a process of its own: serve, say what came, and shut down."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=head)
    cluster.add_node(num_cpus=1, num_gpus=1)
    method = {**TOKEN_RECYCLING, "matrix_file": matrix, "save_every": 0.1}
    with engine(method, tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
        found = {
            "outputs": generate(llm, PROMPTS, GREEDY),
            "accepted": counter(llm, "spec_decode_num_accepted_tokens"),
            "nodes": len({one.node_id for one in core(llm).model_executor.ray_worker_handles}),
        }
        wait_until(Path(matrix).exists, 60)
    ray.shutdown()
    cluster.shutdown()
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
