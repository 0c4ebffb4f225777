"""patches/: each diff applies to the versions that the README names, and does its work there."""

from __future__ import annotations

import os
import py_compile
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from vllm import SamplingParams, __version__
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.integration.engines import SMALL_BUDGET, engine, generate, watch_steps
from vllm_recycle.integration.start.versions import SUPPORTED_VLLM

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "patches"
PATCHES = sorted(FOLDER.glob("*.patch"))
README = (FOLDER / "README.md").read_text()
VLLM = Path(find_spec("vllm").origin).parent
# By number of the patch, the first and the last version that has the defect, and that it is for.
ROWS = re.findall(
    r"^\| \[(\d{4})\].* \| (0\.\d+) to (0\.\d+) \| (0\.\d+) to (0\.\d+) \|$", README, re.M
)
DEFECTS = {number: [Version(one) for one in pair] for number, *pair, _, _ in ROWS}
VERSIONS = {number: [Version(one) for one in pair] for number, _, _, *pair in ROWS}
# Tests that go upstream with a patch: they need nothing but vLLM.
UPSTREAM = {
    "0001": "test_discarded_generators.py",
    "0002": "test_cli_version.py",
    "0005": "test_streaming_session_stop.py",
    "0008": "test_rotary_embedding_heads_cpu.py",
}

pytestmark = pytest.mark.versions

needs_patch = pytest.mark.skipif(not shutil.which("patch"), reason="needs the command `patch`")


def touched(patch):
    """The files of a patch, relative to the directory that contains the package."""
    return re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)


def copy_touched(patch, target):
    for name in touched(patch):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(VLLM.parent / name, target / name)


def apply(patch, target, *options):
    # No fuzz: a diff whose surroundings have changed is to be looked at again.
    command = ["patch", "-p1", "--fuzz=0", "--batch", "--forward", *options, "--input", str(patch)]
    return subprocess.run(command, cwd=target, capture_output=True, text=True)


def is_installed(versions):
    first, last = versions
    return first.release <= Version(__version__).release[:2] <= last.release


def is_for_installed_vllm(patch):
    return is_installed(VERSIONS[patch.name[:4]])


def run_upstream_test(name, vllm_folder):
    """A test of `patches/tests`, with the package `vllm` of a folder, and without us."""
    paths = os.pathsep.join(filter(None, [str(vllm_folder), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER / "tests" / name],
        env=os.environ | {"PYTHONPATH": paths, "VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
    )


@needs_patch
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_applies_to_the_versions_that_the_readme_names_and_only_once(patch, tmp_path):
    copy_touched(patch, tmp_path)
    dry = apply(patch, tmp_path, "--dry-run")
    assert (dry.returncode == 0) == is_for_installed_vllm(patch), dry.stdout
    if dry.returncode:
        return
    done = apply(patch, tmp_path)
    assert done.returncode == 0, done.stdout
    for name in touched(patch):
        assert (tmp_path / name).read_bytes() != (VLLM.parent / name).read_bytes()
        py_compile.compile(str(tmp_path / name), doraise=True)
    assert apply(patch, tmp_path, "--dry-run").returncode != 0


@needs_patch
def test_all_patches_apply_together_in_any_order(tmp_path):
    patches = [*filter(is_for_installed_vllm, PATCHES)]
    for order in (patches, patches[::-1]):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        for patch in order:
            copy_touched(patch, tmp_path)
        for patch in order:
            done = apply(patch, tmp_path)
            assert done.returncode == 0, done.stdout


def test_the_readme_lists_exactly_the_patches_there():
    assert re.findall(r"\((\S+\.patch)\)", README) == [patch.name for patch in PATCHES]
    assert list(VERSIONS) == [patch.name[:4] for patch in PATCHES]
    assert sorted(UPSTREAM.values()) == sorted(path.name for path in FOLDER.glob("tests/*.py"))
    supported = SpecifierSet(SUPPORTED_VLLM)
    assert all(version in supported for row in ROWS for version in map(Version, row[1:]))
    sections = re.split(r"^## ", README, flags=re.MULTILINE)[1:]
    sections = {heading[:4]: heading for heading in sections if heading[:4].isdecimal()}
    # The last has no diff.
    assert sorted(sections) == [*(patch.name[:4] for patch in PATCHES), "0009"]
    for patch in PATCHES:
        section = sections[patch.name[:4]]
        assert all(f"`{name}`" in section for name in touched(patch))
        for word in ("**Title.**", "**Why.**", "**How.**", "**Test.**", "**Upstream**"):
            assert word in section
        assert "**Remove when**" in section
        if test := UPSTREAM.get(patch.name[:4]):
            assert f"tests/{test}" in section


@needs_patch
@pytest.mark.nightly
@pytest.mark.parametrize("number", UPSTREAM)
def test_a_test_for_upstream_fails_where_the_defect_is_and_passes_with_the_patch(number, tmp_path):
    [patch] = [patch for patch in PATCHES if patch.name.startswith(number)]
    shutil.copytree(VLLM, tmp_path / "vllm", copy_function=os.symlink)
    has_defect = is_installed(DEFECTS[number])
    stock = run_upstream_test(UPSTREAM[number], tmp_path)
    assert (stock.returncode == 1) == has_defect, stock.stdout
    if has_defect and is_for_installed_vllm(patch):
        for name in touched(patch):
            (tmp_path / name).unlink()
        copy_touched(patch, tmp_path)
        assert apply(patch, tmp_path).returncode == 0
        patched = run_upstream_test(UPSTREAM[number], tmp_path)
        assert patched.returncode == 0, patched.stdout


@needs_patch
def test_with_0001_a_seed_gives_the_same_tokens_however_its_prompt_is_cut(tmp_path, monkeypatch):
    patch = next(patch for patch in PATCHES if patch.name.startswith("0001"))
    [name] = touched(patch)
    copy_touched(patch, tmp_path)
    assert apply(patch, tmp_path).returncode == 0
    spec = spec_from_file_location("vllm.v1.worker.patched", tmp_path / name)
    patched = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, patched)
    spec.loader.exec_module(patched)
    for method in ("_sample", "_bookkeeping_sync"):
        monkeypatch.setattr(GPUModelRunner, method, getattr(patched.GPUModelRunner, method))
    # One prompt is whole in a step; of two the second is cut.
    prompts = [{"prompt_token_ids": [*range(first, first + 20)]} for first in range(10, 90, 20)]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=8) for seed in range(4)
    ]
    with engine(max_num_seqs=2, **SMALL_BUDGET | {"max_num_batched_tokens": 24}) as llm:
        alone = [
            generate(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)
        ]
        steps = watch_steps(llm)
        assert generate(llm, prompts, params) == alone
    assert {*steps[0].num_scheduled_tokens.values()} == {20, 4}
