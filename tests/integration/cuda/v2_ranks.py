"""Engines of Model Runner V2 over two ranks, each a process that knows of the other by torchrun's
variables: they run one script, see `v2_scripts`.

Their schedulers agree as long as their tokens and drafts do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from v2_scripts import command_of

NUM_RANKS = 2
# A port for each engine: on that of the one before, a rank that is early finds what has ended.
PORTS = "PORTS_OF_RANKS"
WAITING = ({None}, {None, 0})  # for exit codes of ranks


def run_ranks(file: str, folder: Path, *, num_engines: int) -> list[dict[str, Any]]:
    """What `main` of a file returns in each rank, where it makes so many engines.

    `main` is given a path that each rank has for itself.
    """
    with ExitStack() as held:
        servers = [
            held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num_engines)
        ]
        ports = [str(server.getsockname()[1]) for server in servers]
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
            command = command_of(file, outputs[rank], folder / f"{rank}.safetensors")
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


def take_port() -> None:
    """In a rank, before each engine: where it is to find the other rank."""
    os.environ["MASTER_PORT"], *rest = os.environ[PORTS].split()
    os.environ[PORTS] = " ".join(rest)
