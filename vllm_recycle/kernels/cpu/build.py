"""Compiling the C++ kernels at first use, for the machine's own instruction set.

vLLM's default compile mode needs the same compiler. What is compiled is kept in a cache directory.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_double, c_float, c_int64, c_void_p
from pathlib import Path

logger = logging.getLogger("vllm.recycle")

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / f"{name}.cpp" for name in ("matrix", "phrases", "tree_attention", "walk"))
HEADERS = tuple(
    FOLDER / f"{name}.h" for name in ("amx", "lanes", "softmax", "top_k", "tree_columns")
)
# Not -ffast-math, which would change the floating-point mode of the whole process.
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-strict-aliasing")

# Arguments of each function: p pointer, i int64, f float, d double.
SIGNATURES = {
    "tree_attention": "pppppppppppp" + "iiiiiiiiiiiiiiii" + "f" + "i",
    "walk": "ppppp" + "iiiii" + "ppp",
    "choose": "pp" + "iiii" + "p",
    "newest_phrases": "pp" + "iiii" + "p",
    "insert_phrases": "pppp" + "iii",
    "grow": "ppppp" + "ii" + "d" + "ppp",
    "fill": "pppppppp" + "ii" + "pp",
    "learn": "ppppp" + "i" + "ppppp" + "ii",
    "seed": "pp" + "ii",
    "top_k_rows": "p" + "iiiiii" + "p",
}
TYPES = {"p": c_void_p, "i": c_int64, "f": c_float, "d": c_double}


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where this machine cannot compile them."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        logger.warning(
            "no C++ compiler found: vllm_recycle drafts in Python, which takes longer than it "
            "saves; install the package g++"
        )
        return None
    library = ctypes.CDLL(str(_build(compiler)))
    for name, signature in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [TYPES[letter] for letter in signature]
        function.restype = None
    library.reads_amx_layout.restype = c_int64
    return library


def _build(compiler: str) -> Path:
    """Compile once for each source, compiler, flags and CPU; safe against other processes."""
    cpu = Path("/proc/cpuinfo")
    flags = [line for line in cpu.read_text().splitlines() if line.startswith("flags")][:1]
    texts = [path.read_text() for path in (*SOURCES, *HEADERS)]
    identity = repr((texts, compiler, FLAGS, platform.machine(), flags))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm_recycle"
    path = root / f"cpu_native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder:
            built = Path(folder) / path.name
            command = [compiler, *FLAGS, "-shared", "-fPIC", *map(str, SOURCES), "-o", str(built)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError(
                    f"{compiler} cannot compile the kernels; set CXX to a compiler with C++17:\n"
                    f"{result.stderr}"
                )
            built.replace(path)
    return path
