# SPDX-License-Identifier: Apache-2.0
"""For `tests/entrypoints/` of vLLM: its command where no distribution is called `vllm`."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
import vllm
from vllm.entrypoints.cli import main as cli
from vllm.platforms import current_platform


def test_the_command_knows_its_version_without_a_distribution_of_its_name(monkeypatch, capsys):
    version = importlib.metadata.version
    assert current_platform.device_type  # is found by the version of a distribution, too

    def only_others(name):
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", only_others)
    monkeypatch.setattr(sys, "argv", ["vllm", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert capsys.readouterr().out.split()[-1] == vllm.__version__
