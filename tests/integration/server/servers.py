"""`vllm serve` as a user runs it, on the embedded target in float32, and the `openai` client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.integration.engines import TARGET

CHAT_TEMPLATE = "{% for message in messages %}Question: {{ message.content }}\nAnswer:{% endfor %}"
START_TIMEOUT_S = 240
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    # Else it closes idle connections after seconds, maybe while a client sends its next request.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
}
MAX_TOKENS = 24  # of an answer, unless told
VLLM = str(Path(sys.executable).with_name("vllm"))
# vLLM's command, whose engines and workers are forks that import nothing once more. On a CPU vLLM
# spawns them, whatever the environment says.
FORKING = """import multiprocessing
from vllm.utils import system_utils
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
from vllm.entrypoints.cli.main import main
main()"""


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


class Server:
    """A server in processes of its own, which end with it."""

    def __init__(
        self,
        log: Path,
        *flags: str,
        forks: bool = False,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            log: file for what it prints.
            flags: of `vllm serve`, beside those of all tests.
            forks: whether its engine is a fork, which is fast, or started as vLLM does it.
            environment: beside that of this process.

        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [
            *([sys.executable, "-c", FORKING] if forks else [VLLM]), "serve", TARGET,
            "--served-model-name", "target", "--port", str(self.port), "--host", "127.0.0.1",
            "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8",
            "--kv-cache-memory-bytes", str(64 << 20), "--chat-template", CHAT_TEMPLATE, *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | (environment or {}),
            start_new_session=True,
        )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
            except OSError:
                time.sleep(0.5)
            else:
                return
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def processes(self) -> list[psutil.Process]:
        """All that run now."""
        return [(server := psutil.Process(self.process.pid)), *server.children(recursive=True)]

    def metrics(self) -> list[str]:
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        return [line for line in text.splitlines() if line.startswith("vllm:")]

    def counter(self, name: str, label: str = "") -> float:
        """A counter of vLLM's metrics, summed over its labels, or over those with this one."""
        lines = [line for line in self.metrics() if line.startswith(f"vllm:{name}")]
        lines = [line for line in lines if label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_until_idle(self) -> None:
        """Until no request runs, half a minute at most."""
        wait_until(lambda: not self.counter("num_requests_running"))

    def complete(self, prompt: str, **kwargs: Any) -> Any:
        settings = {"model": "target", "max_tokens": MAX_TOKENS, "temperature": 0} | kwargs
        return self.client.completions.create(prompt=prompt, **settings)

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        """Signal the server, then end what is left of its processes; returns its exit status."""
        self.process.send_signal(how)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """End all of its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
