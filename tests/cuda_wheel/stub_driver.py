"""A `libcuda.so.1` for machines without a GPU, which vLLM's compiled parts are linked against.

    python tests/cuda_wheel/stub_driver.py FOLDER WHEEL

writes one to FOLDER, with all functions that libraries of the unpacked wheel ask it for; each
returns 100, as a driver does that finds no device.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def build(folder: Path, wheel: Path) -> None:
    libraries = map(str, wheel.rglob("*.so"))
    asked = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True
    )
    names = sorted(set(re.findall(r"\bU (cu[A-Z]\w*)", asked.stdout)))
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    library = folder / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, str(library), str(source)], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
