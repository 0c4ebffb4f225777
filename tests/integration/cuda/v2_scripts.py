"""Test files of Model Runner V2 that are scripts too: the engines need a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# What scripts import beside what is in their own folder.
FOLDER = Path(__file__).parents[1]


def script_environment() -> dict[str, str]:
    """In which a test file finds, as a script, what it finds as a test."""
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def run_script(file: str, output: Path, *arguments: object) -> dict[str, Any]:
    """What a file writes, as JSON, when it is run; it gets `arguments`, or else the output's path.

    The test is skipped where there is no Triton, and fails where the script does.
    """
    if find_spec("triton") is None:
        pytest.skip("Model Runner V2 needs triton, which is not installed")
    command = [sys.executable, file, *map(str, arguments or (output,))]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=550, env=script_environment()
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(output.read_text())
