"""Compile Triton kernels for GPUs that need not be there, and print what came out as JSON.

    python tests/kernels/triton/compile_kernels.py [part of a case's name]

To be run without TRITON_INTERPRET, under which kernels are never compiled and what only the
compiler refuses goes unseen. `compile_cases` lists what is compiled; another module's kernels are
added there. The output is a list of objects:

    case, arch      the name, and the compute capability times ten
    registers       of a thread
    spilled         instructions that read or write a thread's stack
    shared          bytes of shared memory of a program
    threads         of a program
    resident        programs that a multiprocessor of an H100 holds at a time
    taken_for       what `resident` is taken to be where launches are planned
    wgmma           whether Hopper's matrix instruction is used
    async_copies    instructions that copy 16 bytes a thread into shared memory meanwhile
    seconds         that it took
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import triton  # noqa: TID253 - a script of its own, which nothing imports
from compile_cases import Case, cases


def figures(case: Case, arch: int) -> dict[str, Any]:
    start = time.perf_counter()
    compiled = case.compile(arch)
    seconds = time.perf_counter() - start
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    usage = re.search(r"REG:(\d+)", cuobjdump(cubin, "--dump-resource-usage"))
    assert usage, case.name
    registers, shared = int(usage[1]), compiled.metadata.shared
    sass = cuobjdump(cubin, "-sass")
    threads = compiled.metadata.num_warps * 32
    return {
        "case": case.name,
        "arch": arch,
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
        "taken_for": case.resident,
        "wgmma": "wgmma.mma_async" in ptx,
        "async_copies": len(re.findall(r"cp\.async\.cg\.shared\.global.*0x10,", ptx)),
        "seconds": round(seconds, 1),
    }


def cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    print(json.dumps([figures(case, arch) for case, arch in cases() if wanted in case.name]))


if __name__ == "__main__":
    main()
