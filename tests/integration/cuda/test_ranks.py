"""Two tensor-parallel ranks on Model Runner V2, with the drafts of either method.

Each rank is a process with an engine of its own; the environment tells them of each other, as
torchrun would. Their schedulers agree as long as their tokens and drafts do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from engines import TARGET, counter, engine, runner
from test_ouroboros import FORWARDS, SIZES
from v2_engines import GREEDY, LLM_ARGUMENTS, SEEDED, tokens_of
from v2_scripts import command_of

pytestmark = pytest.mark.slow

NUM_RANKS, NUM_ENGINES = 2, 4
# A port for each engine: on that of the one before, a rank that is early finds what has ended.
PORTS = "PORTS_OF_RANKS"
WAITING = ({None}, {None, 0})  # for exit codes of ranks
METHODS = {
    "token_recycling": {"k": 4, "max_nodes": 4, "context_mib": 1},
    # The target drafts for itself: the heads of the small draft model are three.
    "ouroboros": {"model": TARGET, "max_forwards": FORWARDS, **SIZES},
}
ARGUMENTS = {
    **LLM_ARGUMENTS,
    "model": TARGET,
    "tensor_parallel_size": NUM_RANKS,
    "distributed_executor_backend": "external_launcher",
}
# Which tokens of TEXT are the prompt, and the sampling parameters.
BATCH = [((0, 33), GREEDY), ((3, 40), SEEDED)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank has to say."""
    with ExitStack() as held:
        servers = [
            held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(NUM_ENGINES)
        ]
        ports = [str(server.getsockname()[1]) for server in servers]
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        PORTS: " ".join(ports),
        "OMP_NUM_THREADS": "1",  # a core each
    }
    logs = [folder / f"{rank}.log" for rank in range(NUM_RANKS)]
    outputs = [folder / f"{rank}.json" for rank in range(NUM_RANKS)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = command_of(__file__, outputs[rank], folder / f"{rank}.safetensors")
            of_rank = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as said:
                process = subprocess.Popen(command, env=of_rank, stdout=said, stderr=said)
            processes.append(process)
        end = time.monotonic() + 550
        # Where one has died the other waits for it.
        while time.monotonic() < end and {process.poll() for process in processes} in WAITING:
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
    codes = [process.wait() for process in processes]
    assert codes == [0] * NUM_RANKS, "\n".join(log.read_text() for log in logs)
    return [json.loads(output.read_text()) for output in outputs]


def test_each_rank_has_its_share_of_the_heads(ranks):
    assert [rank["ouroboros"]["KV heads"] for rank in ranks] == [1, 1]


@pytest.mark.parametrize("method", METHODS)
def test_tokens_equal_those_without_speculation(ranks, method):
    for rank in ranks:
        assert rank[method]["token ids"] == ranks[0]["plain"]["token ids"]


@pytest.mark.parametrize("method", METHODS)
def test_drafts_were_accepted(ranks, method):
    for rank in ranks:
        assert rank[method]["accepted tokens"] > 0


@pytest.mark.parametrize("method", [*METHODS, "started again"])
def test_ranks_know_the_same(ranks, method):
    known = [rank[method]["known"] for rank in ranks]
    assert known[0]["entries"] > 100
    assert known[1] == known[0]


def test_the_first_rank_alone_writes_the_state_file(ranks):
    assert [rank["has a file"] for rank in ranks] == [True, False]


def serve(method: dict[str, Any] | None, *batches: list) -> dict[str, Any]:
    """In a rank: an engine's tokens, and with a method what it was like."""
    os.environ["MASTER_PORT"], *rest = os.environ[PORTS].split()
    os.environ[PORTS] = " ".join(rest)
    with engine(method, **ARGUMENTS) as llm:
        result: dict[str, Any] = {
            "token ids": tokens_of(llm, *batches),
            "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens"),
        }
        if method is not None:
            tensors = list(runner(llm).drafter.state.tensors.values())
            digest = sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
            result["known"] = {"entries": int((tensors[0] >= 0).sum()), "digest": digest}
            result["KV heads"] = runner(llm).paged_layers[0].kv_caches[0].shape[1]
    return result


def main(state_file: Path) -> dict[str, Any]:
    """In a rank: an engine without speculation, one with each method, and one of them again."""
    result = {"plain": serve(None, BATCH)}
    methods = {name: {"method": name, **given} for name, given in METHODS.items()}
    methods["token_recycling"]["matrix_file"] = str(state_file)
    result |= {name: serve(method, BATCH) for name, method in methods.items()}
    result["started again"] = serve(methods["token_recycling"])
    return result | {"has a file": state_file.exists()}
