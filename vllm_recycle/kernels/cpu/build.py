"""The C++ kernels: those in the package, or else compiled at first use for the machine's own CPU.

A wheel for x86 has them for three instruction sets. What is compiled is kept in a cache directory,
with its digest behind it; vLLM's default compile mode needs the same compiler.

    python -m vllm_recycle.kernels.cpu.build

compiles those that a wheel has.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path

from vllm_recycle.core.state_file import write_file

logger = logging.getLogger("vllm.recycle")

CPU_INFO = Path("/proc/cpuinfo")
FOLDER = Path(__file__).parent
SOURCES, HEADERS = (tuple(sorted(FOLDER.glob(f"*.{kind}"))) for kind in ("cpp", "h"))
# Not -ffast-math, which would change the floating-point mode of the whole process.
# On x86 lanes.h says what is rounded once.
CONTRACT = "-ffp-contract=" + ("off" if platform.machine() == "x86_64" else "fast")
NATIVE = ("-march=native",)
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fno-strict-aliasing", CONTRACT)
# What a wheel for x86 has, the first that a CPU can run: the flags in /proc/cpuinfo that it needs,
# and those of the compiler. vLLM chooses among its own three by AVX-512 and its bfloat16 alone, and
# so must we: outputs are rounded by what a CPU has of these. AMX is looked for when it is used.
AVX2 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "abm", "movbe")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
VARIANTS = {
    "avx512bf16": (
        (*AVX512, "avx512_bf16"),
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    "avx512": (AVX512, ("-march=x86-64-v4",)),
    "avx2": (AVX2, ("-march=x86-64-v3",)),
}

# Arguments of each function: p pointer, i int64, f float.
SIGNATURES = {
    "tree_attention": "p" + "pi" * 2 + "p" + "pi" * 2 + "p" + "iiiiiii" + "f" + "i",
    "move_slots": "p" + "ii" + "pp" + "ii",
    "walk": "pp" + "i" + "ppp" + "iiiii" + "ppp",
    "draft": "pppppp" + "i" + "pp",
    "learn": "ppppp" + "i" + "pp" + "i" + "ppppp" + "ii",
    "seed": "pp" + "ii",
    "draft_copies": "ppp",
    "learn_copies": "pp" + "i",
    "top_k_rows": "p" + "iiiiii" + "pp",
}
TYPES = {"p": c_void_p, "i": c_int64, "f": c_float}


@dataclass
class Built:
    """What a search for the kernels found.

    Attributes:
        library: the kernels; None where there are none, and this machine cannot compile them.
        path: of the file that they are in; None where they are not kept.
        problems: what went wrong on the way.
    """

    library: ctypes.CDLL | None = None
    path: Path | None = None
    problems: list[str] = field(default_factory=list)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The kernels; None where this machine cannot compile them. One warning says why."""
    built = find_or_build()
    problems = "; ".join(built.problems)
    if built.library is None:
        logger.warning("%s: vllm_recycle decodes without drafts; install the package g++", problems)
        return None
    if problems:
        logger.warning("%s", problems)
    for name, signature in SIGNATURES.items():
        function = getattr(built.library, name)
        function.argtypes = [TYPES[letter] for letter in signature]
        function.restype = None
    built.library.reads_amx_layout.restype = built.library.draft.restype = c_int64
    return built.library


def find_or_build() -> Built:
    """The kernels from the package or the cache, or compiled by the first compiler that can."""
    built = Built()
    if shipped := find_shipped():
        try:
            return Built(ctypes.CDLL(str(shipped)), shipped)
        except OSError as error:
            built.problems.append(f"{shipped} cannot be loaded ({error})")
    for command in compilers(built.problems):
        try:
            _load(command, built)
            return built
        except OSError as error:
            messages = [str(error)]
        except subprocess.CalledProcessError as error:
            messages = error.stderr.splitlines() or [f"exit status {error.returncode}"]
        line = next((line for line in messages if "error:" in line), messages[-1])
        built.problems.append(f"{shlex.join(command)} cannot compile the kernels ({line})")
    built.problems = built.problems or ["no C++ compiler found"]
    return built


def find_shipped() -> Path | None:
    """The kernels in the package for this CPU, made of these very sources with these flags."""
    with contextlib.suppress(OSError):
        flags = set(_cpu_flags().split())
        for name, (required_flags, _) in VARIANTS.items():
            if flags.issuperset(required_flags) and (path := _shipped_path(name)).is_file():
                return path
    return None


def _shipped_path(name: str) -> Path:
    return FOLDER / "shipped" / f"{name}-{_digest((_sources(), FLAGS, VARIANTS[name]))}.so"


def _sources() -> list[str]:
    return [path.read_text() for path in (*SOURCES, *HEADERS)]


def _digest(identity: object) -> str:
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:16]


def _cpu_flags() -> str:
    """What the CPU can do, as the system says it; raises OSError where it does not."""
    lines = CPU_INFO.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def compilers(problems: list[str]) -> list[list[str]]:
    """The compilers that are there: CXX, which may have options, then g++."""
    setting = os.environ.get("CXX", "")
    try:
        cxx_command = shlex.split(setting)
    except ValueError:  # a quotation without its end
        cxx_command = [setting]
    commands: list[list[str]] = []
    for program, *options in filter(None, (cxx_command, ["g++"])):
        if path := shutil.which(program):
            commands += [[path, *options]] if [path, *options] not in commands else []
        elif program != "g++":
            problems.append(f"CXX is {setting!r}, expected a compiler that is there")
    return commands


def _load(command: list[str], built: Built) -> None:
    """Load the kernels that a compiler has compiled, or does; safe against other processes.

    Raises OSError or CalledProcessError where it cannot.
    """
    with contextlib.suppress(OSError):
        path = _path(command)
        if _is_whole(path):
            built.library, built.path = ctypes.CDLL(str(path)), path
            return
    # Nobody else's, and gone as soon as it is loaded, if not kept.
    with tempfile.TemporaryDirectory(prefix="vllm_recycle-") as folder:
        compiled_path = Path(folder) / "cpu_native.so"
        compile_to(compiled_path, [*command, *NATIVE])
        try:
            path = _path(command)
            _keep(compiled_path, path)
            built.library, built.path = ctypes.CDLL(str(path)), path
        except OSError as error:
            built.library = ctypes.CDLL(str(compiled_path))
            built.problems.append(
                f"the kernels cannot be kept ({error}) and are compiled at each start: set "
                "XDG_CACHE_HOME to a folder that can be written"
            )


def compile_to(path: Path, command: list[str]) -> None:
    """Compile the kernels; raises CalledProcessError."""
    arguments = [*FLAGS, "-shared", "-fPIC", *map(str, SOURCES), "-o", str(path)]
    subprocess.run([*command, *arguments], capture_output=True, errors="replace", check=True)


def _path(command: list[str]) -> Path:
    """Where the kernels are kept, for each source, compiler, flags, C library and CPU.

    Raises OSError where it cannot be known.
    """
    cpu, libc = _cpu_flags(), platform.libc_ver()
    digest = _digest((_sources(), command, FLAGS, platform.machine(), libc, cpu))
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a home
        raise FileNotFoundError(error) from error
    return root / "vllm_recycle" / f"cpu_native-{digest}.so"


def _keep(compiled_path: Path, path: Path) -> None:
    """Put a library in its place, with its digest, which the loader does not look at."""
    content = compiled_path.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content + hashlib.sha256(content).digest(), kind="kernels")


def _is_whole(path: Path) -> bool:
    """Whether a library is what was written, since one that was cut ends the process by SIGBUS."""
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(content[:-size]).digest() == content[-size:]:
        return True
    logger.warning("%s is damaged, and is compiled anew", path)
    return False


def main() -> None:
    """Compile all variants into the package, for `make wheel`; for x86 alone."""
    problems: list[str] = []
    commands = compilers(problems)
    if platform.machine() != "x86_64" or not commands:
        raise SystemExit("; ".join(problems) or "expected x86-64, and the package g++")
    shutil.rmtree(FOLDER / "shipped", ignore_errors=True)
    (FOLDER / "shipped").mkdir()
    for name, (_, flags) in VARIANTS.items():
        try:
            compile_to(_shipped_path(name), [*commands[0], *flags])
        except subprocess.CalledProcessError as error:
            raise SystemExit(error.stderr) from error


if __name__ == "__main__":
    main()
