"""Scripts in which Triton compiles, in processes of their own: here it interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]


def printed_by(script: str, *arguments: object) -> Any:
    """The JSON that a script of this folder prints; fails where the script does."""
    # Behind what is there already, which may be another Triton.
    paths = filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)
