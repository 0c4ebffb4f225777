"""What goes wrong around a server: ends of every kind, full disks, and files that are none."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.integration.server.servers import Server
from tests.soak.traffic import Case

FILE_LIMIT = 1 << 20  # bytes; a matrix file is larger, and a log is not


def serve(folder: Path, name: str, *flags: str, **options: Any) -> Server:
    """Start a server that keeps what it learns, a second's worth at most apart."""
    method = {"method": "token_recycling", "matrix_file": str(folder / "matrix"), "save_every": 1}
    return Server(
        folder / f"{name}.log",
        *("--speculative-config", json.dumps(method), "--shutdown-timeout", "30", *flags),
        **options,
    )


def ends_in_traffic(folder: Path, cases: list[Case], kills: int) -> dict[str, Any]:
    """SIGKILL at any moment, some of them in mid-write, then SIGTERM; each time starting again."""
    choose, warm = random.Random(1), 0
    for number in range(kills + 1):
        server = serve(folder, f"end-{number}")
        server.wait_until_healthy()
        lines = server.log.read_text().splitlines()
        learnt = next(line for line in lines if "token_recycling: dynamic trees" in line)
        warm += ", 0 of " not in learnt
        end = server.kill if number < kills else partial(server.stop, signal.SIGTERM)
        answered, status = _under_traffic(server, cases, choose.uniform(2, 6), end)
        assert answered, "nothing was answered before the end"
    return {
        "SIGKILL": kills,
        "starts that knew what was learnt": warm,
        "exit status at SIGTERM": status,
        "leftovers": sorted(path.name for path in folder.glob(".*")),
    }


def full_disk(folder: Path, cases: list[Case]) -> dict[str, Any]:
    """No file may grow: the server serves, names the file it could not write, and keeps the old."""
    before = (folder / "matrix").read_bytes()
    server = serve(folder, "full")
    server.wait_until_healthy()  # not before: vLLM's shared memory is files too
    for process in server.processes():
        process.rlimit(psutil.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
    texts = [case.ask(server) for case in cases[:4]]
    status = server.stop(signal.SIGTERM)
    return {
        "answered": len(texts),
        "exit status": status,
        "the log names the file": _says(server, str(folder / "matrix"), "File too large"),
        "the file is the old one": (folder / "matrix").read_bytes() == before,
    }


def hostile_files(folder: Path) -> dict[str, Any]:
    """Each is refused at start-up by a line that names the file."""
    path = folder / "matrix"
    good = path.read_bytes()
    makers: dict[str, Callable[[], Any]] = {
        "torn": lambda: path.write_bytes(good[: len(good) // 2]),
        "noise": lambda: path.write_bytes(random.Random(2).randbytes(4096)),
        "a header of 2^60 bytes": lambda: path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}"),
        "empty": lambda: path.write_bytes(b""),
        "a pipe": lambda: os.mkfifo(path),
    }
    refused = {}
    for name, make in makers.items():
        make()
        started = time.monotonic()
        server = serve(folder, name.replace(" ", "-"))
        status: int | None = None  # it serves
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = server.process.wait(timeout=240)
        server.kill()
        refused[name] = {
            "refused": bool(status) and _says(server, str(path)),
            "seconds": round(time.monotonic() - started, 1),
        }
        path.unlink()
    path.write_bytes(good)
    return refused


def odd_caches(folder: Path, cases: list[Case]) -> dict[str, Any]:
    """A cache of kernels that is a file, and libraries in one that are damaged: it answers."""
    place = folder / "cache"
    place.write_text("")
    answered = {"a file": _answers(folder, "cache-is-a-file", place, cases)}
    place.unlink()
    _answers(folder, "cache-is-filled", place, cases[:1])
    for name, damage in (("cut", lambda data: data[:3000]), ("empty", lambda data: b"")):
        for library in place.glob("vllm_recycle/*.so"):
            library.write_bytes(damage(library.read_bytes()))
        answered[name] = _answers(folder, f"cache-is-{name}", place, cases)
    return answered


def _answers(folder: Path, name: str, cache: Path, cases: list[Case]) -> int:
    """How many cases a server answers that keeps its kernels there."""
    server = serve(folder, name, environment={"XDG_CACHE_HOME": str(cache)})
    try:
        server.wait_until_healthy()
        return sum(bool(case.ask(server)) for case in cases)
    finally:
        server.kill()


def _says(server: Server, *texts: str) -> bool:
    """Whether a line of the log has all of these; vLLM's own repeats what was asked for."""
    lines = server.log.read_text().splitlines()
    return any(
        all(text in line for text in texts) for line in lines if "non-default args" not in line
    )


def _under_traffic(
    server: Server, cases: list[Case], seconds: float, end: Callable[[], Any]
) -> tuple[int, Any]:
    """Ask from eight clients, and `end` the server so long after the first answer.

    Returns:
        How many were answered, as nobody may wait for ever, and what `end` returned.

    """

    def ask(case: Case) -> bool:
        try:
            return bool(case.ask(server))
        except openai.APIError:
            return False  # it ended

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, case) for case in cases]
        wait(answers, timeout=120, return_when=FIRST_COMPLETED)
        time.sleep(seconds)
        ended = end()
        return sum(answer.result(timeout=120) for answer in answers), ended
