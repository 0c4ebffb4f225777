"""Who may import whom: core and CPU kernels need neither vllm nor triton to be installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_recycle"


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
    files = [*PACKAGE.glob("core/*.py"), *PACKAGE.glob("kernels/cpu/*.py")]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    assert "vllm_recycle.core.tree" in modules
    assert "vllm_recycle.kernels.cpu.kv_cache" in modules
    statements = "\n".join(f"import {module.removesuffix('.__init__')}" for module in modules)
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
