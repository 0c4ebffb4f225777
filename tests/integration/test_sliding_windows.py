"""Models with sliding windows in some layers, or in all: output is vLLM's own, token for token.

vLLM keeps such layers in KV cache groups of their own, each with a block table, and takes back the
blocks that fell out of a window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from derived_models import gemma3, mistral, with_windows
from engines import (
    GROWN,
    PAPER,
    SMALL_BUDGET,
    SMALL_OUROBOROS,
    TOKEN_RECYCLING,
    core,
    counter,
    engine,
    generate,
    mixed_params,
    read_prompts,
)

WINDOW = 40  # of blocks of 32
PROMPTS = read_prompts(8, max_words=60)
PARAMS = mixed_params(len(PROMPTS), max_tokens=40)
SETTINGS = {"max_num_seqs": len(PROMPTS), "max_model_len": 256, "block_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("windows")


@pytest.fixture(scope="module")
def models(folder) -> dict[str, str]:
    return {
        "some layers": with_windows(folder / "some", WINDOW, "fssfss"),
        "all layers": mistral(folder / "all", WINDOW),
        "out of reach": mistral(folder / "unreached", SETTINGS["max_model_len"]),
        "gemma": gemma3(folder / "gemma", WINDOW),
    }


@pytest.fixture(scope="module")
def expected(models) -> dict[str, Any]:
    outputs = {}
    for kind, model in models.items():
        with engine(model=model, **SETTINGS) as llm:
            outputs[kind] = generate(llm, PROMPTS, PARAMS)
    return outputs


def passes_blocks_on(scheduler: Any) -> bool:
    """Whether vLLM took back the first block of a running request."""
    manager = scheduler.kv_cache_manager
    blocks = [manager.get_block_ids(request.request_id) for request in scheduler.running]
    return any(ids and ids[0] == 0 for groups in blocks for ids in groups)


@pytest.mark.parametrize(
    ("kind", "method", "settings"),
    [
        pytest.param("some layers", TOKEN_RECYCLING, {}, id="default"),
        pytest.param("some layers", PAPER, SMALL_BUDGET, id="paper-80, prompts in chunks"),
        pytest.param(
            "some layers", GROWN, {"disable_hybrid_kv_cache_manager": True}, id="one block table"
        ),
        pytest.param("some layers", SMALL_OUROBOROS, {}, id="ouroboros"),
        pytest.param("all layers", GROWN, {}, id="all layers"),
        pytest.param("out of reach", GROWN, {}, id="out of reach"),
        pytest.param("gemma", GROWN, {}, id="gemma"),
    ],
)
def test_output_equals_vllm(models, expected, kind, method, settings):
    with engine(method, model=models[kind], **{**SETTINGS, **settings}) as llm:
        assert generate(llm, PROMPTS, PARAMS) == expected[kind]
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize(("kind", "num_blocks"), [("some layers", 40), ("all layers", 16)])
def test_output_equals_vllm_under_preemption_and_on_prefix_hits(
    models, expected, kind, num_blocks, monkeypatch
):
    crowded = {"enable_prefix_caching": True, "num_gpu_blocks_override": num_blocks}
    with engine(GROWN, model=models[kind], **SETTINGS, **crowded) as llm:
        scheduler, passed = core(llm).scheduler, []
        schedule = scheduler.schedule
        monkeypatch.setattr(
            scheduler,
            "schedule",
            lambda *args: (schedule(*args), passed.append(passes_blocks_on(scheduler)))[0],
        )
        assert generate(llm, PROMPTS, PARAMS) == expected[kind]
        for _ in range(2):  # so few leave room for what others may hit
            assert generate(llm, PROMPTS[:2], PARAMS[:2]) == expected[kind][:2]
        assert any(passed)
        assert counter(llm, "num_preemptions") > 0
        assert counter(llm, "prefix_cache_hits") > 0
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_a_draft_model_with_a_window_that_texts_can_reach_is_refused(models, folder):
    draft = with_windows(folder / "draft", WINDOW, "ss", source=SMALL_OUROBOROS["model"])
    method, message = {**SMALL_OUROBOROS, "model": draft}, f"a sliding window of {WINDOW} tokens"
    with (
        pytest.raises(NotImplementedError, match=message),
        engine(method, model=models["all layers"], **SETTINGS),
    ):
        pass


def test_a_draft_model_must_have_one_kind_of_layers(models, folder):
    draft = with_windows(folder / "mixed", WINDOW, "fsfsfs")
    method, message = {**SMALL_OUROBOROS, "model": draft}, r"in \d KV cache groups, expected one"
    with (
        pytest.raises(NotImplementedError, match=message),
        engine(method, model=models["some layers"], **SETTINGS),
    ):
        pass
