"""Compile Triton kernels for GPUs that need not be there, and print what came out as JSON.

    python -m tests.kernels.triton.compile_kernels [FILE]

Kernels are compiled as on a GPU, by launching them (`fake_gpu`). Without TRITON_INTERPRET, under
which they never are, and what only the compiler refuses goes unseen. `compile_cases` lists the
launches; a file has those of an engine instead (`recorded_launches`), for sm_90. The output is a
list of objects, one a kernel of a case:

    case, kernel    their names
    arch            the compute capability times ten
    registers       of a thread
    spilled         bytes of a thread's stack, where registers go that are too many
    shared          bytes of shared memory of a program
    threads         of a program
    resident        programs that a multiprocessor of an H100 holds at a time
    taken_for       what `resident` is taken to be where launches are planned
    wgmma           whether Hopper's matrix instruction is used
    async_copies    instructions that copy 16 bytes a thread into shared memory meanwhile
"""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import triton  # noqa: TID253 - a script of its own, which nothing imports

from tests.kernels.triton import fake_gpu
from tests.kernels.triton.compile_cases import Case, cases


def compiled_by(case: Case, arch: int) -> Iterator[dict[str, Any]]:
    """Figures of the kernels that a case launches, each once."""
    kernels: dict[int, Any] = {}
    fake_gpu.select(arch, lambda kernel, *_: kernels.setdefault(id(kernel), kernel))
    case.launch()
    for place, kernel in enumerate(kernels.values()):
        taken_for = 1 if place else case.resident
        yield {"case": case.name, "arch": arch, "taken_for": taken_for, **figures(kernel)}


def recorded(file: Path) -> Iterator[Case]:
    for module, name, given in pickle.loads(file.read_bytes()):
        kernel = getattr(import_module(module), name)
        yield Case(name, partial(kernel[(1, 1, 1)], **given), (90,))


def figures(compiled: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    registers, shared = int(registers), compiled.metadata.shared
    threads, ptx = compiled.metadata.num_warps * 32, compiled.asm["ptx"]
    return {
        "kernel": compiled.name,
        "registers": registers,
        "spilled": int(stack),
        "shared": shared,
        "threads": threads,
        "resident": min(
            # A warp's registers are given out eight a thread, and a program takes 1 KB of shared
            # memory more than it asks for.
            65536 // (-(-registers // 8) * 8 * threads),
            228 * 1024 // (shared + 1024),
        ),
        "wgmma": "wgmma.mma_async" in ptx,
        "async_copies": len(re.findall(r"cp\.async\.cg\.shared\.global.*0x10,", ptx)),
    }


if __name__ == "__main__":
    launches = recorded(Path(sys.argv[1])) if sys.argv[1:] else cases()
    found = [one for case in launches for arch in case.archs for one in compiled_by(case, arch)]
    print(json.dumps(found))
