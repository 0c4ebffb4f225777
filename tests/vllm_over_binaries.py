"""A version of vLLM without a CPU wheel, for CPU: its Python over the installed binaries.

    python tests/vllm_over_binaries.py WHEEL FOLDER

takes the sources from a CUDA wheel of vLLM, and links the compiled extensions of the CPU build that
is installed. With FOLDER in PYTHONPATH that is `vllm`. Operators whose arguments changed between
the two versions fail when they are called.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

# Compiled, or sources of what is compiled on a GPU.
LEFT_OUT = {".so", ".h", ".hpp", ".cuh", ".cu", ".inl"}


def merge(wheel: Path, folder: Path) -> None:
    installed = Path(find_spec("vllm").origin).parent
    shutil.rmtree(folder / "vllm", ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("vllm/")]
        archive.extractall(folder, [name for name in names if Path(name).suffix not in LEFT_OUT])
    for binary in installed.rglob("*.so"):
        (folder / "vllm" / binary.relative_to(installed)).symlink_to(binary)


if __name__ == "__main__":
    merge(Path(sys.argv[1]), Path(sys.argv[2]))
