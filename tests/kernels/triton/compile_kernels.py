"""Compile Triton kernels for GPUs that need not be there, and print what came out as JSON.

    python -m tests.kernels.triton.compile_kernels [part of a case's name]
    python -m tests.kernels.triton.compile_kernels --recorded FILE

Kernels are compiled as on a GPU, by launching them (`fake_gpu`). Without TRITON_INTERPRET, under
which they never are, and what only the compiler refuses goes unseen. `compile_cases` lists the
launches; a file that is `recorded` has those of an engine (`recorded_launches`), for sm_90. The
output is a list of objects, one a kernel of a case:

    case, kernel    their names
    arch            the compute capability times ten
    registers       of a thread
    spilled         instructions that read or write a thread's stack
    shared          bytes of shared memory of a program
    threads         of a program
    resident        programs that a multiprocessor of an H100 holds at a time
    taken_for       what `resident` is taken to be where launches are planned
    wgmma           whether Hopper's matrix instruction is used
    async_copies    instructions that copy 16 bytes a thread into shared memory meanwhile
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton  # noqa: TID253 - a script of its own, which nothing imports

from tests.kernels.triton import fake_gpu, recorded_launches
from tests.kernels.triton.compile_cases import cases


def compiled_by(launch: Callable[[], object], arch: int) -> list[Any]:
    """The kernels that were launched, each once."""
    kernels: dict[int, Any] = {}
    fake_gpu.select(arch, lambda kernel, *_: kernels.setdefault(id(kernel), kernel))
    launch()
    return list(kernels.values())


def figures(compiled: Any) -> dict[str, Any]:
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    usage = re.search(r"REG:(\d+)", cuobjdump(cubin, "--dump-resource-usage"))
    assert usage, compiled.name
    registers, shared = int(usage[1]), compiled.metadata.shared
    sass = cuobjdump(cubin, "-sass")
    threads = compiled.metadata.num_warps * 32
    return {
        "kernel": compiled.name,
        "registers": registers,
        "spilled": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
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


def cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    found = []
    if sys.argv[1:2] == ["--recorded"]:
        for name, launch in recorded_launches.read(Path(sys.argv[2])):
            found += [{"case": name, "kernel": one.name} for one in compiled_by(launch, 90)]
    else:
        wanted = sys.argv[1] if len(sys.argv) > 1 else ""
        for case in cases():
            for arch in case.archs if wanted in case.name else ():
                for place, one in enumerate(compiled_by(case.launch, arch)):
                    taken_for = 1 if place else case.resident
                    where = {"case": case.name, "arch": arch, "taken_for": taken_for}
                    found.append(where | figures(one))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
