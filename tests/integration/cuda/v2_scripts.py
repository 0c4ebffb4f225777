"""Runs what a test file does with engines of Model Runner V2, in a process of its own.

    python tests/integration/cuda/v2_scripts.py FILE OUTPUT FOLDER

installs `v2_shim`, which must come before vLLM, calls `main(FOLDER)` of the file, and writes what
that returns as JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def command_of(file: Path | str, output: Path, argument: Path) -> list[str]:
    return [sys.executable, __file__, *map(str, (file, output, argument))]


def run_script(file: Path | str, folder: Path) -> dict[str, Any]:
    """What `main` of a file returns; fails where the process does."""
    output = folder / "result.json"
    command = command_of(file, output, folder)
    run = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(output.read_text())


def main(file: str, output: str, argument: str) -> None:
    tests = Path(__file__).parents[2]
    sys.path[1:1] = [str(tests / "integration"), str(tests / "kernels" / "triton")]
    import v2_shim

    v2_shim.install()
    found = importlib.import_module(Path(file).stem).main(Path(argument))
    Path(output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
