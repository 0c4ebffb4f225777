"""The wheel, outside of the checkout: what it has, and that every command runs from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import vllm

import vllm_recycle
from tests.cli.commands import MODEL, PROMPTS, ROOT

PACKAGE = ROOT / "vllm_recycle"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def test_the_wheel_has_every_file_that_is_read():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["vllm_recycle"]
    packed = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    there = {file for file in PACKAGE.rglob("*.*") if file.suffix not in (".py", ".md", ".pyc")}
    assert there == packed
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder that pip has installed the wheel of this checkout into."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / PACKAGE.name)
    compile_kernels = [sys.executable, "-m", "vllm_recycle.kernels.cpu.build"]
    subprocess.run(compile_kernels, cwd=source, check=True)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source)]
    subprocess.run([*PIP, *build, str(source)], check=True)
    (wheel,) = source.glob("*.whl")
    subprocess.run(
        [*PIP, "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)], check=True
    )
    return target


@pytest.mark.slow
def test_kernels_of_the_wheel_have_the_bits_of_vllms(installed, tmp_path):
    tests = ROOT / "tests" / "kernels" / "cpu" / "test_bits.py"
    code = (
        "import sys, pytest; from vllm_recycle.kernels.cpu import build;"
        f"assert build.find_or_build().path.is_relative_to({str(installed)!r});"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', {str(tests)!r}]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, " passed" in result.stdout) == (0, True), result.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, f"vllm-recycle {vllm_recycle.__version__}, vllm {vllm.__version__}"),
        (["check", str(MODEL), "--dtype=float32"], 0, "target with token_recycling"),
        (["check", "--build"], 0, "/vllm_recycle/kernels/cpu/shipped/"),
        (["tree", "show", "paper-80"], 0, "paper-80"),
        (["demo"], 2, "demo: error: no --model: the embedded models come with the repository"),
        (
            ["demo", f"--model={MODEL}", "--max-tokens=4", "--num-prompts=1"],
            0,
            "token recycling ",
        ),
        (
            [
                "bench", f"--model={MODEL}", f"--prompts={PROMPTS}", "--num-prompts=1",
                "--max-tokens=4", "--repeats=1", "--dtype=float32",
                "--methods=none,token_recycling", '--engine-args={"enforce_eager": true}',
            ],
            0,
            "token_recycling",
        ),
    ],
)  # fmt: skip
def test_commands_of_an_installed_package(arguments, status, said, installed, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "vllm_recycle", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    output = result.stdout + result.stderr
    assert (result.returncode, said in output) == (status, True), output
    assert str(Path(installed, "examples")) not in output
