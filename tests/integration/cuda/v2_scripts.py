"""Runs what a test file does with engines of Model Runner V2, in a process of its own.

    python -m tests.integration.cuda.v2_scripts FILE OUTPUT FOLDER

installs `v2_shim`, which must come before vLLM, calls `main(FOLDER)` of the file, and writes what
that returns as JSON. Without arguments it reads such arguments from its input, a JSON list and a
line for each script, forks a process for it, and answers with the exit status. So what takes
seconds to import is imported once.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

TIMEOUT_S = 550
ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.integration.cuda.v2_scripts"]


def command_of(file: Path | str, output: Path, argument: Path) -> list[str]:
    return [*COMMAND, *map(str, (file, output, argument))]


@cache
def script_server() -> subprocess.Popen[str]:
    """What forks the processes of this test process; it ends with its input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(COMMAND, cwd=ROOT, text=True, **pipes)


def run_script(file: Path | str, folder: Path) -> dict[str, Any]:
    """What `main` of a file returns; fails where the process does."""
    output, log, server = folder / "result.json", folder / "log", script_server()
    print(json.dumps([*map(str, (file, output, folder, log))]), file=server.stdin, flush=True)
    status = server.stdout.readline()
    assert status == "0\n", log.read_text() if log.exists() else status
    return json.loads(output.read_text())


def prepare() -> None:
    """Import what all scripts need."""
    from tests.integration.cuda import v2_shim

    v2_shim.install()
    importlib.import_module("tests.integration.cuda.v2_engines")


def run_main(file: str, output: str, folder: str) -> None:
    """In the process of a script."""
    name = ".".join(Path(file).resolve().relative_to(ROOT).with_suffix("").parts)
    result = importlib.import_module(name).main(Path(folder))
    Path(output).write_text(json.dumps(result, indent=1) + "\n")


def run_in_fork(file: str, output: str, folder: str, log: str) -> int:
    """The exit status of a process that runs a script and writes what it prints to a log."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(TIMEOUT_S)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
    status = 1
    try:
        run_main(file, output, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main(arguments: list[str]) -> None:
    prepare()
    if arguments:
        run_main(*arguments)
        return
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed is no answer
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            print(run_in_fork(*json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
