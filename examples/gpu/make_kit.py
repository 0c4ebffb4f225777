"""Pack vLLM for a GPU machine that has PyTorch and reaches no package index.

    .venv/bin/python examples/gpu/make_kit.py [--vllm 0.33.0] [--triton 3.7.1]

writes `.kit/vllm.tar.xz`: vLLM's CUDA wheel, what it imports beside PyTorch, Triton, transformers
and pytest, and this package's entry point. Copy the checkout with its `.kit` to that machine;
`first_hour.sh` runs with it there. `--triton` adds `.kit/triton.tar.xz`, which comes before the
machine's own. Needs an installation of this package, pip and `strip`; no GPU.

That machine needs Python 3.12, PyTorch 2.11 for CUDA 13, Triton, transformers, Hypothesis, and
pytest with its plugins `timeout` and `xdist`. No GPU has run a kit yet.

The kit is for Python 3.12 and compute capability 9.0. All kernels of vLLM's extensions for other
GPUs are zeros, and those of FlashAttention 3 but for bfloat16 and heads of 64 and 128.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCK = ROOT / ".ci" / "cpu" / "requirements.lock"
GLIBC = (5, 17, 24, 26, 27, 28, 31, 34)  # minor versions that wheels name; pip takes none for less
PACKAGES = """
    annotated-types apache-tvm-ffi blake3 cachetools cbor2 compressed-tensors dill distro
    email-validator fastapi gguf httpcore2 httpx2 interegular jiter jsonschema
    jsonschema-specifications lark llguidance msgspec openai opentelemetry-api opentelemetry-sdk
    opentelemetry-semantic-conventions oss-harmony partial-json-parser pybase64 pydantic
    pydantic-core pydantic-extra-types python-multipart pyzmq referencing rpds-py setproctitle
    sniffio starlette truststore typing-inspection xgrammar
"""
# Of vLLM: its frontend in Rust, kernels for later GPUs, and extensions that no engine here calls.
# Of Triton: profilers, other vendors, and the CUDA tools, which the machine's own Triton has.
LEFT_OUT = re.compile(
    r"vllm/vllm-rs|vllm/third_party/(deep_gemm|fmha_sm100|tml_fa4)/|vllm/vllm_flash_attn/cute/"
    r"|vllm/(?!_C_|_moe_C_|vllm_flash_attn/_vllm_fa3_C|cumem_allocator|spinloop).*\.so$"
    r"|triton/.*(/bin/|/lib/cupti|libproton|/instrumentation/|/plugins/|amd/lib/|FileCheck$|\.a$)"
)
FATBIN = re.compile(rb"\x50\xed\x55\xba\x01\x00\x10\x00(.{8})", re.DOTALL)
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, sizes of header and payload, architecture
ARCH_OFFSET, CUBIN, ARCH, UNUSED_ARCH = 28, 2, 90, 121
USED_ATTENTION = re.compile(rb"Li(64|128)ENS_10bfloat16_tEf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vllm", default="0.32.0", help="its version; default: %(default)s")
    parser.add_argument("--triton", help="a version other than the machine's")
    args = parser.parse_args()
    folder = ROOT / ".kit"
    folder.mkdir(exist_ok=True)
    for archive in folder.glob("*.tar.xz"):  # of other versions
        archive.unlink()
    make(folder / "vllm.tar.xz", f"vllm=={args.vllm}", *PACKAGES.split())
    if args.triton:
        make(folder / "triton.tar.xz", f"triton=={args.triton}")


def make(archive: Path, *packages: str) -> None:
    """An archive of the packages, as they would be installed."""
    with tempfile.TemporaryDirectory() as made:
        wheels, site = Path(made, "wheels"), Path(made, "site")
        download(packages, wheels)
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as packed:
                names = [name for name in packed.namelist() if not LEFT_OUT.match(name)]
                packed.extractall(site, names)
        for library in site.rglob("*.so*"):
            if library.is_relative_to(site / "vllm"):
                prune(library)
            subprocess.run(["strip", "--strip-all", library], check=True)
        if (site / "vllm").exists():
            write_metadata(site)
        with tarfile.open(archive, "w:xz", preset=6) as packed:
            packed.add(site, ".")
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


def download(packages: Iterable[str], folder: Path) -> None:
    """Wheels for the GPU machine; versions are the locked ones where there are any."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    command += ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    command += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command += [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    subprocess.run([*command, f"--constraint={LOCK}", *packages], check=True)


def prune(library: Path) -> None:
    """Zeros in place of kernels that the kit does not need: the file keeps its layout.

    Entries that are zeros say an architecture above the GPU's, so that nothing loads them.
    """
    data = bytearray(library.read_bytes())
    for found in FATBIN.finditer(bytes(data)):
        place, end = found.end(), found.end() + int.from_bytes(found[1], "little")
        while place < end:
            kind, _, header, size, arch = ENTRY.unpack_from(data, place)
            payload = slice(place + header, place + header + size)
            if not (kind == CUBIN and arch == ARCH and is_used(bytes(data[payload]))):
                data[payload] = bytes(size)
                struct.pack_into("<I", data, place + ARCH_OFFSET, UNUSED_ARCH)
            place = payload.stop
    library.write_bytes(data)


def is_used(cubin: bytes) -> bool:
    """Of FlashAttention 3, whose cubins are not compressed, a few are."""
    return b"FlashAttnFwdSm90" not in cubin or bool(USED_ATTENTION.search(cubin))


def write_metadata(site: Path) -> None:
    """This package's, with the entry points by which vLLM finds it."""
    own = distribution("vllm_recycle")
    folder = site / f"vllm_recycle-{own.version}.dist-info"
    folder.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (folder / name).write_text(own.read_text(name) or "")


if __name__ == "__main__":
    main()
