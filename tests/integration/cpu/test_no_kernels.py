"""An engine on a machine that has no kernels, and no compiler for them."""

from __future__ import annotations

import shutil

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
    yield
    build.load_library.cache_clear()


@pytest.mark.usefixtures("_no_compiler")
def test_it_decodes_without_drafts_and_says_so_once(caplog):
    said, outputs = [], []
    for method in (None, TOKEN_RECYCLING, SMALL_OUROBOROS):
        build.load_library.cache_clear()  # as in a new process
        caplog.clear()
        with caplog.at_level("WARNING"), engine(method) as llm:
            assert llm.llm_engine.vllm_config.speculative_config is None
            outputs.append(generate(llm, PROMPTS, GREEDY))
        said.append([record.message for record in caplog.records if "g++" in record.message])
    plain, *ours = outputs
    assert ours == [plain, plain]
    text = "no C++ compiler found: vllm_recycle decodes without drafts; install the package g++"
    assert said == [[], [text], [text]]
