"""An engine on a machine that has no kernels, and no compiler for them."""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest
from vllm import SamplingParams

from tests.integration.engines import (
    SMALL_OUROBOROS,
    TOKEN_RECYCLING,
    engine,
    generate,
    read_prompts,
)
from vllm_recycle.kernels.cpu import build

PROMPTS = read_prompts(2)
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture
def _no_compiler(monkeypatch, tmp_path):
    (tmp_path / "lscpu").symlink_to(shutil.which("lscpu"))  # which vLLM needs
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


@cache
def outputs_of_vllm() -> list[Any]:
    with engine(None) as llm:
        return generate(llm, PROMPTS, GREEDY)


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("method", [TOKEN_RECYCLING, SMALL_OUROBOROS], ids=lambda of: of["method"])
def test_it_decodes_without_drafts_and_says_so_once(method, caplog):
    expected = outputs_of_vllm()
    caplog.clear()
    with caplog.at_level("WARNING"), engine(method) as llm:
        assert llm.llm_engine.vllm_config.speculative_config is None
        assert generate(llm, PROMPTS, GREEDY) == expected
    said = [record.message for record in caplog.records if "g++" in record.message]
    assert said == [
        "no C++ compiler found: vllm_recycle decodes without drafts; install the package g++"
    ]
