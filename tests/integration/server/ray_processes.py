"""Processes on Ray: its daemons, its workers and the engines of these, each group on its own."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from tests.integration.server.servers import wait_until

MARK = "VLLM_RECYCLE_TEST"


@contextmanager
def marked() -> Iterator[dict[str, str]]:
    """An environment for a process, by which all that it starts are found, and ended at the end."""
    environment = os.environ | {
        MARK: uuid.uuid4().hex,
        "SPT_NOENV": "1",  # else who sets a title for itself loses its environment in /proc
        "RAY_worker_niceness": "0",  # else workers starve beside other tests
    }
    try:
        yield environment
    finally:
        for process in find(environment):
            with suppress(psutil.Error):
                process.kill()


def find(environment: Mapping[str, str]) -> list[psutil.Process]:
    """The processes that run in this environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == environment[MARK]:
                found.append(process)
    return found


def wait_for_end(environment: Mapping[str, str], seconds: float = 60) -> None:
    """Return when none of them runs any more; raise where one does after so long."""
    wait_until(lambda: not find(environment), seconds)
