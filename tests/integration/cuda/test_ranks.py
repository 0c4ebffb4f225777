"""Two ranks on Model Runner V2: the heads of one engine, with the drafts of each method; experts of
a mixture, of one engine or of two that keep step.

The ranks are processes that know of each other by torchrun's variables, and run this file as a
script, see `v2_scripts`. Their schedulers agree as long as their tokens and drafts do.
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

from tests.integration.cuda.test_ouroboros import METHOD as OUROBOROS
from tests.integration.cuda.test_ouroboros import TRUNK
from tests.integration.cuda.v2_engines import GREEDY, LLM_ARGUMENTS, SEEDED, tokens_of
from tests.integration.cuda.v2_scripts import ROOT, command_of
from tests.integration.engines import TARGET, TOKEN_RECYCLING, core, counter, engine, runner
from tests.integration.models.derived_models import mixtral
from vllm_recycle.integration.state.saved_state import rank_file

pytestmark = pytest.mark.slow

NUM_RANKS = 2
SMALL = {**TOKEN_RECYCLING, "k": 4, "context_mib": 1}
# How ranks share the work, and the methods that they draft with.
LAYOUTS = {
    "heads": (
        {"tensor_parallel_size": NUM_RANKS, "model": TARGET},
        {
            "token_recycling": {**SMALL, "max_nodes": 4},
            # The target drafts for itself: the heads of the small draft model are three.
            "ouroboros": {**OUROBOROS, "model": TARGET},
            "trunk": {**TRUNK, "model": TARGET, "max_nodes": 4},
        },
    ),
    "experts": (
        {"tensor_parallel_size": NUM_RANKS, "enable_expert_parallel": True},
        {"trees": {**SMALL, "max_nodes": 8}},
    ),
    # Ranks that a launcher starts keep step in steps that compute, which those of a server,
    # that schedule ahead, need not be.
    "experts of two engines": (
        {
            "data_parallel_size": NUM_RANKS,
            "enable_expert_parallel": True,
            "async_scheduling": False,
        },
        {"chains": SMALL},
    ),
}
RUNS = [(layout, method) for layout, (_, methods) in LAYOUTS.items() for method in methods]
# Which tokens of TEXT are the prompt, and the sampling parameters.
BATCH = [((0, 33), GREEDY | {"max_tokens": 8}), ((3, 30), SEEDED | {"max_tokens": 8})]
# Of the second of two engines, which has nothing to do before the first one has finished.
SHORT = [((1, 30), {**GREEDY, "max_tokens": 3})]
# A port for each engine: on that of the one before, a rank that is early finds what has ended.
PORTS = "PORTS_OF_RANKS"
NUM_ENGINES = len(RUNS) + len(LAYOUTS) + 1
WAITING = ({None}, {None, 0})  # for exit codes of ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What `main` returns in each rank, which has a path for itself."""
    folder = tmp_path_factory.mktemp("ranks")
    with ExitStack() as held:
        address = ("127.0.0.1", 0)
        servers = [held.enter_context(socket.create_server(address)) for _ in range(NUM_ENGINES)]
        ports = [str(server.getsockname()[1]) for server in servers]
    environment = os.environ | {
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        PORTS: " ".join(ports),
        "OMP_NUM_THREADS": "1",  # a core each
    }
    logs, outputs, processes = [], [], []
    try:
        for rank in map(str, range(NUM_RANKS)):
            logs.append(folder / f"{rank}.log")
            outputs.append(folder / f"{rank}.json")
            command = command_of(__file__, outputs[-1], folder / f"{rank}.safetensors")
            of_rank = environment | {"RANK": rank, "LOCAL_RANK": rank}
            with logs[-1].open("w") as log:
                streams = {"stdout": log, "stderr": log}
                processes.append(subprocess.Popen(command, cwd=ROOT, env=of_rank, **streams))
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


@pytest.mark.parametrize(("layout", "method"), RUNS)
def test_tokens_equal_those_without_speculation(ranks, layout, method):
    for rank in ranks:
        assert rank[layout][method]["token ids"] == rank[layout]["plain"]["token ids"]
    for rank in ranks[: 1 if layout == "experts of two engines" else NUM_RANKS]:
        assert rank[layout][method]["accepted tokens"] > 0


@pytest.mark.parametrize("method", [*LAYOUTS["heads"][1], "started again"])
def test_ranks_know_the_same_of_their_share_of_the_heads(ranks, method):
    found = [rank["heads"][method] for rank in ranks]
    assert found[0]["known"]["entries"] > 100
    assert found[1]["known"] == found[0]["known"]
    assert [of_rank["KV heads"] for of_rank in found] == [1, 1]


def test_the_first_rank_alone_writes_the_state_file(ranks):
    assert [rank["has a file"] for rank in ranks] == [True, False]
    # Each engine of a launcher has a first rank.
    assert [rank["engine has a file"] for rank in ranks] == [True, True]


def test_ranks_of_one_engine_verify_trees_and_engines_that_keep_step_chains(ranks):
    for rank in ranks:
        found = rank["experts"]["trees"]
        assert (found["has trees"], found["sizes"][1][0]) == (True, 8)
        found = rank["experts of two engines"]["chains"]
        # Of one length.
        assert (found["has trees"], found["sizes"][1:]) == (False, [[4]] * 4)
        # An engine without work keeps step.
        assert (found["dummy steps"] > 0) == (rank is ranks[1])


def serve(method: dict[str, Any] | None, *batches: list, **arguments: Any) -> dict[str, Any]:
    """In a rank: an engine's tokens, and with a method what it was like."""
    # Where it is to find the other rank.
    os.environ["MASTER_PORT"], *rest = os.environ[PORTS].split()
    os.environ[PORTS] = " ".join(rest)
    arguments["distributed_executor_backend"] = "external_launcher"
    with engine(method, **LLM_ARGUMENTS | arguments) as llm:
        dummy_steps, run = [], core(llm).execute_dummy_batch
        core(llm).execute_dummy_batch = lambda: dummy_steps.append(run())
        result: dict[str, Any] = {
            "token ids": tokens_of(llm, *batches),
            "accepted tokens": counter(llm, "spec_decode_num_accepted_tokens"),
            "dummy steps": len(dummy_steps),
        }
        if method is not None:
            ours = runner(llm)
            tensors = list(ours.tree_drafter.state.tensors.values())
            digest = sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
            result["known"] = {"entries": int((tensors[0] >= 0).sum()), "digest": digest}
            result |= {"has trees": ours.verifies_trees, "sizes": ours.sizes_of_batch}
            if ours.verifies_trees:
                result["KV heads"] = ours.paged_layers[0].kv_caches[0].shape[1]
    return result


def main(state_file: Path) -> dict[str, Any]:
    """In a rank: of each layout an engine without speculation, and one with each method.

    The first of these starts again, from its file.
    """
    result: dict[str, Any] = {}
    experts = {"model": mixtral(state_file.with_suffix(""))}
    kept = LAYOUTS["heads"][1]["token_recycling"] | {"matrix_file": str(state_file)}
    file = state_file.with_name("engines.safetensors")  # of both
    of_engines = {"matrix_file": str(file)}
    for layout, (arguments, methods) in LAYOUTS.items():
        arguments = experts | arguments
        batches = [BATCH] if layout == "heads" else [BATCH, BATCH]
        if layout == "experts of two engines" and os.environ["RANK"] == "1":
            batches = [SHORT, SHORT]
        result[layout] = {"plain": serve(None, *batches, **arguments)}
        for name, method in methods.items():
            given = {"token_recycling": kept, "chains": method | of_engines}.get(name, method)
            result[layout][name] = serve(given, *batches, **arguments)
        if layout == "heads":
            result[layout]["started again"] = serve(kept, **arguments)
    own_file = rank_file(str(file), int(os.environ["RANK"]))
    files = {"has a file": state_file.exists(), "engine has a file": Path(own_file).exists()}
    return result | files
