"""Twenty minutes of everything at once, then every bad end: `make soak`.

A server with Token Recycling has a KV cache that is too small for its requests, so that they
preempt each other, and clients who ask for everything that vLLM has, stream, and leave. What it
answers is compared, text for text, with a server without speculation. The report is printed, and
written as JSON; the exit status is 1 where anything in it is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")

import psutil

from tests.integration.engines import TARGET
from tests.integration.models.adapters import write_adapter
from tests.integration.server.servers import Server
from tests.soak import faults
from tests.soak.traffic import ADAPTER, Case, make_cases

CLIENTS = 12
TINY_CACHE = ("--kv-cache-memory-bytes", str(8 << 20), "--max-model-len", "1024")


class Report(dict[str, Any]):
    """Says each part when it is known."""

    def __setitem__(self, name: str, part: Any) -> None:
        super().__setitem__(name, part)
        print(f"{name}: {json.dumps(part)}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20, help="of all of it, about")
    parser.add_argument("--json", type=Path, help="file for the report")
    arguments = parser.parse_args()
    started = time.monotonic()
    cases = make_cases(160)
    plain = [case for case in cases if case.settings.get("model") != ADAPTER]
    adapted = [case for case in cases if case not in plain]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapter = write_adapter(folder / ADAPTER, TARGET, seed=1, has_head=True)
        given = f"{ADAPTER}={adapter}"
        with_adapter = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", given)
        # Without our plugin vLLM's kernels give requests of the base model an adapter too, where
        # there is one (patches/0006).
        expected = reference(folder, plain) + reference(folder, adapted, *with_adapter)
        # Bad ends take about seven minutes.
        seconds = max(30.0, arguments.minutes * 60 - (time.monotonic() - started) - 420)
        report, cases = Report(), plain + adapted
        # What grows without speculation is vLLM's own.
        server = Server(folder / "plain.log", *TINY_CACHE)
        report["traffic without speculation"] = soak(server, plain, expected, seconds / 3)
        server = faults.serve(folder, "soak", *TINY_CACHE, *with_adapter)
        report["traffic"] = soak(server, cases, expected, 2 * seconds / 3)
        report["ends"] = faults.ends_in_traffic(folder, plain, kills=4)
        report["full disk"] = faults.full_disk(folder, plain)
        report["hostile files"] = faults.hostile_files(folder)
        report["answers with odd caches"] = faults.odd_caches(folder, plain[:4])
    report["minutes"] = round((time.monotonic() - started) / 60, 1)
    report["as it should be"] = is_good(report)
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(f"{text}\n", encoding="utf-8")
    return 0 if report["as it should be"] else 1


def reference(folder: Path, cases: list[Case], *flags: str) -> list[list[str]]:
    """What vLLM answers without speculation."""
    server = Server(folder / "reference.log", *TINY_CACHE, *flags)
    try:
        server.wait_until_healthy()
        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(lambda case: case.ask(server), cases))
    finally:
        server.kill()


def soak(
    server: Server, cases: list[Case], expected: list[list[str]], seconds: float
) -> dict[str, Any]:
    """Ask for so many seconds, and compare."""
    counts = Counter(sent=0, left=0, answered=0, equal=0)
    differences: list[dict[str, Any]] = []
    memory: list[int] = []
    try:
        server.wait_until_healthy()
        end = time.monotonic() + seconds

        def client(number: int) -> None:
            choose = random.Random(number)
            while time.monotonic() < end:
                index = choose.randrange(len(cases))
                counts["sent"] += 1
                if choose.random() < 0.15:
                    cases[index].abort(server)
                    counts["left"] += 1
                    continue
                texts = cases[index].ask(server, stream=choose.random() < 0.3)
                counts["answered"] += 1
                counts["equal"] += texts == expected[index]
                if texts != expected[index]:
                    got = {"kind": cases[index].kind, "got": texts, "expected": expected[index]}
                    differences.append(got)

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client, number) for number in range(CLIENTS)]
            while any(not done.done() for done in clients):
                memory.append(resident_mib(server))
                threading.Event().wait(10)
            failed = [repr(done.exception()) for done in clients if done.exception()]
        server.wait_until_idle()
        return {
            **counts,
            "failed": failed,
            "differences": differences[:20],
            "accepted draft tokens": server.counter("spec_decode_num_accepted_tokens_total"),
            "preemptions": server.counter("num_preemptions_total"),
            # Of slots that were not returned.
            "KV cache in use at the end": server.counter("kv_cache_usage_perc"),
            "resident MiB over time": memory[:: max(1, len(memory) // 40)],
            "exit status": server.stop(),
        }
    finally:
        server.kill()


def resident_mib(server: Server) -> int:
    """Memory of all processes; what they share is counted for each."""
    resident = 0
    for process in server.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            resident += process.memory_info().rss
    return resident >> 20


def grown(traffic: dict[str, Any]) -> float:
    """Memory at the end in parts of that after a third of the time."""
    memory = traffic["resident MiB over time"]
    return memory[-1] / memory[len(memory) // 3]


def is_good(report: dict[str, Any]) -> bool:
    traffic, ends, disk = report["traffic"], report["ends"], report["full disk"]
    return all(
        [
            traffic["answered"] == traffic["equal"] > 0,
            traffic["sent"] == traffic["answered"] + traffic["left"],
            not traffic["failed"],
            traffic["accepted draft tokens"] > 0,
            traffic["preemptions"] > 0,
            traffic["KV cache in use at the end"] == 0,
            grown(traffic) < 1.1 * grown(report["traffic without speculation"]),
            ends["starts that knew what was learnt"] == ends["SIGKILL"] + 1,
            not ends["leftovers"],
            traffic["exit status"] == ends["exit status at SIGTERM"] == disk["exit status"] == 0,
            disk["answered"] > 0,
            disk["the log names the file"],
            disk["the file is the old one"],
            all(found["refused"] for found in report["hostile files"].values()),
            all(answered == 4 for answered in report["answers with odd caches"].values()),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
