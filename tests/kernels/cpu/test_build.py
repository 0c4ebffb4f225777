"""Where the C++ kernels come from: the package, the cache, a compiler, or nowhere."""

from __future__ import annotations

import os
import platform
import pwd
import shutil
import tempfile
from pathlib import Path

import pytest

from vllm_recycle.kernels.cpu import build

# Compiled for speed, the same sources take ten times as long.
QUICK = ("-O0", *build.FLAGS[1:])
# Compiles once, and gives the same library whenever it is called again.
COMPILER = """#!/bin/sh
for output; do :; done
test -e {folder}/kept && exec cp {folder}/kept "$output"
{compiler} "$@" && cp "$output" {folder}/kept
"""


@pytest.fixture(scope="module")
def full_cache(tmp_path_factory):
    """A cache with the kernels, and in `bin` the compiler that they are from."""
    folder = tmp_path_factory.mktemp("full")
    compiler = folder / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER.format(folder=folder, compiler=shutil.which("g++")))
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        find_in(folder, compiler.parent, patch)
        assert build.find_or_build().problems == []
    return folder


@pytest.fixture
def cache(full_cache, tmp_path, monkeypatch):
    """The file of the kernels in a copy of it, which is the cache of this test."""
    shutil.copytree(full_cache, tmp_path / "cache")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    find_in(tmp_path / "cache", full_cache / "bin", monkeypatch)
    (library,) = tmp_path.glob("cache/vllm_recycle/*.so")
    yield library
    assert not [*tmp_path.glob("tmp/*")], "what was compiled was left behind"
    build.load_library.cache_clear()


def find_in(cache: Path, compilers: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", str(compilers), prepend=os.pathsep)
    patch.setenv("XDG_CACHE_HOME", str(cache))
    patch.delenv("CXX", raising=False)
    patch.setattr(build, "FLAGS", QUICK)


def start(caplog, *, has_kernels: bool = True) -> list[str]:
    """The warnings of a start with kernels, or without."""
    build.load_library.cache_clear()
    caplog.clear()
    with caplog.at_level("WARNING"):
        library = build.load_library()
        assert library is build.load_library()
    assert (library is not None) == has_kernels
    assert library is None or library.reads_amx_layout() in (0, 1)
    return [record.message for record in caplog.records]


@pytest.mark.parametrize("size", [0, 3000])
def test_a_library_that_was_cut_is_compiled_anew(size, cache, caplog):
    """The loader would end the process by SIGBUS."""
    os.truncate(cache, size)
    assert start(caplog) == [f"{cache} is damaged, and is compiled anew"]
    assert start(caplog) == []


@pytest.mark.parametrize("place", ["no such home", "an unknown home", "an unknown CPU"])
def test_where_kernels_cannot_be_kept_they_are_compiled_all_the_same(
    place, cache, caplog, monkeypatch
):
    if place == "an unknown CPU":
        monkeypatch.setattr(build, "CPU_INFO", cache / "cpuinfo")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", "/proc/nohome")
    if place == "an unknown home":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    (warning,) = start(caplog)
    assert warning.startswith("the kernels cannot be kept (")
    assert warning.endswith("each start: set XDG_CACHE_HOME to a folder that can be written")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", None),
        ("env g++ -m64", None),
        ("no-such-compiler -O", "CXX is 'no-such-compiler -O', expected a compiler that is there"),
        ("'g++", 'CXX is "\'g++", expected a compiler that is there'),
        ("false", f"{shutil.which('false')} cannot compile the kernels (exit status 1)"),
    ],
)
def test_a_compiler_of_the_users(given, problem, cache, caplog, monkeypatch):
    """It may have options; where it is none, g++ is taken, whose kernels are kept."""
    monkeypatch.setenv("CXX", given)
    written, warnings = cache.stat().st_mtime_ns, start(caplog)
    assert len(warnings) == (problem is not None)
    assert all(problem in warning for warning in warnings)
    assert cache.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "no C++ compiler found: "),
        ("no-such-compiler", "CXX is 'no-such-compiler', expected a compiler that is there: "),
        (shutil.which("false"), "false cannot compile the kernels (exit status 1): "),
    ],
)
def test_without_a_compiler_a_warning_says_so(given, problem, cache, caplog, monkeypatch):
    monkeypatch.setenv("PATH", str(cache.parent))
    monkeypatch.setenv("CXX", given)
    (warning,) = start(caplog, has_kernels=False)
    assert problem in warning
    assert warning.endswith("decodes without drafts; install the package g++")


# Kernels in the package.


# The best that vLLM has for a CPU, and what /proc/cpuinfo says of the CPU, as far as it matters.
HASWELL = "sse4_2 avx fma movbe f16c abm bmi1 avx2 bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
CPUS = {
    "avx2": HASWELL,
    "avx512": SKYLAKE,
    "avx512bf16": f"{SKYLAKE} avx512_vnni avx512_bf16",  # as AMD's Zen 4 has it, without AMX
    None: "sse4_2 avx",
}


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that has files of all kernels, which are none; it is looked at before the cache."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "FLAGS", QUICK)
    (tmp_path / "shipped").mkdir()
    for name in build.VARIANTS:
        build._shipped_path(name).write_text("no library")
    yield tmp_path / "shipped"
    build.load_library.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a wheel has kernels for x86-64 alone")
def test_the_package_has_kernels_for_each_cpu_and_needs_no_compiler(shipped, monkeypatch, caplog):
    build.main()
    names = [path.name.split("-")[0] for path in sorted(shipped.iterdir())]
    assert names == sorted(build.VARIANTS)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert start(caplog) == []
    found = build.find_or_build()
    assert found.path == build.find_shipped()
    assert found.path.parent == shipped


@pytest.mark.parametrize("name", CPUS)
def test_a_cpu_has_the_kernels_that_round_as_vllms_do_there(name, shipped, monkeypatch):
    monkeypatch.setattr(build, "_cpu_flags", lambda: CPUS[name])
    found = build.find_shipped()
    assert (found and found.name.split("-")[0]) == name


@pytest.mark.parametrize("what", ["SOURCES", "FLAGS"])
def test_kernels_of_other_sources_or_flags_are_passed_over(what, shipped, monkeypatch):
    assert build.find_shipped() is not None
    monkeypatch.setattr(build, what, getattr(build, what)[1:])
    assert build.find_shipped() is None


def test_kernels_of_the_package_that_do_not_load_are_compiled(shipped, cache, caplog):
    (warning,) = start(caplog)
    assert warning.startswith(f"{shipped}")
    assert "cannot be loaded" in warning
