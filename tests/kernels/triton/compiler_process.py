"""Scripts in which Triton compiles, in processes of their own: here it interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def printed_by(module: str, *arguments: object) -> Any:
    """The JSON that a module of this folder prints; fails where the module does."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.kernels.triton.{module}", *map(str, arguments)]
    given = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run(command, **given, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)
