"""`make model` where nothing has to be done, nothing can be fetched, or another file comes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[2] / "examples/models"
NAME = "smollm2-135m-instruct"


@pytest.fixture
def script(tmp_path) -> Path:
    """The script and its lock file, in a folder without the model."""
    for file in ("get_smollm2.py", "requirements.lock"):
        shutil.copy(MODELS / file, tmp_path)
    return tmp_path / "get_smollm2.py"


def run(script: Path) -> subprocess.CompletedProcess:
    """Run it with a pip that has no index."""
    empty = script.parent / "empty"
    empty.mkdir()
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(empty), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(script)]
    return subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)


def test_without_an_index_one_line_says_what_to_do(script):
    done = run(script)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"{NAME}: pip could not install {script.parent}/requirements.lock")
    assert "this needs the network" in line
    assert sorted(path.name for path in script.parent.iterdir()) == [
        "empty",
        "get_smollm2.py",
        "requirements.lock",
    ]


def test_a_model_that_is_there_is_left_alone(script):
    model = script.parent / NAME
    model.mkdir()
    (model / "config.json").write_text("{}")
    done = run(script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [file.name for file in model.iterdir()] == ["config.json"]


def test_what_is_no_model_is_not_replaced(script):
    (script.parent / NAME).mkdir()
    (script.parent / NAME / "pytorch_model.bin").write_bytes(b"weights")
    done = run(script)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"{script.parent / NAME} has no config.json: remove it, or put a model there\n"
    )


def test_another_file_is_refused(script, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    import get_smollm2

    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match=r"model\.gguf has the SHA-256 \w+, expected b179c952"):
        get_smollm2.check(file)
