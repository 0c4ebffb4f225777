"""Models of other architectures: output is vLLM's own, token for token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mrope_model
import pytest
import torch
from derived_models import gpt_oss, mixtral, qwen2_audio, with_mrope
from engines import (
    GROWN,
    PAPER,
    SMALL_BUDGET,
    SMALL_OUROBOROS,
    TARGET,
    counter,
    engine,
    generate,
    mixed_params,
    read_prompts,
    runner,
)
from quantized_models import awq, gptq, quantized
from vllm.engine.arg_utils import EngineArgs

from vllm_recycle.integration.plugin import register

PROMPTS = read_prompts(6, max_words=60)
PARAMS = mixed_params(len(PROMPTS), max_tokens=40)
SINKS = [-1.0, 2.0, 4.0, 6.0]
TEXT_ONLY = {"language_model_only": True}
# vLLM's kernels of these take no float32, that of W8A8 with AMX. A row has the same bits there in
# any batch.
IN_16_BITS = {"dtype": "bfloat16"}
W8A8 = IN_16_BITS if torch.cpu._is_amx_tile_supported() else {}
# By kind: what makes the model, and the settings of its engines.
KINDS: dict[str, tuple[Callable[[Path], str], dict[str, Any]]] = {
    "sinks": (lambda folder: gpt_oss(folder, 40, SINKS), {"block_size": 32, "max_model_len": 256}),
    "experts": (mixtral, {}),
    "M-RoPE": (with_mrope, {}),
    "W8A8": (quantized, W8A8),
    "AWQ": (awq, IN_16_BITS),
    "GPTQ": (gptq, IN_16_BITS),
    "text part": (qwen2_audio, TEXT_ONLY),
}


HAS_AVX512 = torch.cpu._is_avx512_supported()
needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason="vLLM needs AVX-512 for 4 bits")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    mrope_model.register()
    folder = tmp_path_factory.mktemp("models")
    return {kind: make(folder / kind) for kind, (make, _) in KINDS.items()}


def answers(model: str, settings: dict[str, Any]) -> list[Any]:
    with engine(model=model, **settings) as llm:
        return generate(llm, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def expected(models) -> Callable[[str], list[Any]]:
    return cache(lambda kind: answers(models[kind], KINDS[kind][1]))


@pytest.mark.parametrize(
    ("kind", "method", "settings"),
    [
        pytest.param("sinks", GROWN, {}, id="sinks"),
        pytest.param("sinks", PAPER, SMALL_BUDGET, id="sinks, paper-80, prompts in chunks"),
        pytest.param("experts", GROWN, {}, id="experts"),
        pytest.param("W8A8", GROWN, {}, id="W8A8"),
        pytest.param("AWQ", GROWN, {}, id="AWQ", marks=needs_avx512),
        pytest.param("GPTQ", GROWN, {}, id="GPTQ", marks=needs_avx512),
        pytest.param("M-RoPE", GROWN, {}, id="M-RoPE"),
        pytest.param(
            "M-RoPE", PAPER, {"max_model_len": 256, **SMALL_BUDGET}, id="M-RoPE, paper-80, chunks"
        ),
        pytest.param("M-RoPE", SMALL_OUROBOROS, {}, id="M-RoPE, ouroboros"),
        pytest.param("text part", GROWN, {}, id="text part"),
        pytest.param(
            "text part",
            GROWN,
            {"language_model_only": False, "limit_mm_per_prompt": {"audio": 0}},
            id="text part, no audio",
        ),
        pytest.param("text part", SMALL_OUROBOROS, {}, id="text part, ouroboros"),
    ],
)
def test_output_equals_vllm(models, expected, kind, method, settings):
    plain = expected(kind)
    with engine(method, model=models[kind], **KINDS[kind][1] | settings) as llm:
        assert runner(llm).uses_mrope == (kind == "M-RoPE")
        assert generate(llm, PROMPTS, PARAMS) == plain
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0


def test_what_is_other_about_a_model_matters(expected, tmp_path):
    target, in_16_bits = answers(TARGET, {}), answers(TARGET, IN_16_BITS)
    in_4_bits = ("AWQ", "GPTQ") if HAS_AVX512 else ()
    for kind in ("experts", "M-RoPE", "W8A8", *in_4_bits):
        assert expected(kind) not in (target, in_16_bits)
    assert expected("text part") == target
    none = gpt_oss(tmp_path / "model", 40, [-100.0] * len(SINKS))
    assert expected("sinks") != answers(none, KINDS["sinks"][1])


@pytest.mark.parametrize(
    ("draft", "flags", "message"),
    [
        (None, {}, "model without --language-model-only"),
        ("text part", TEXT_ONLY, "a multimodal draft model"),
        ("M-RoPE", {}, "a draft model with M-RoPE"),
    ],
)
def test_models_that_are_refused(models, draft, flags, message):
    register()
    method = {**SMALL_OUROBOROS, "model": models[draft]} if draft else PAPER
    model = models[draft or "text part"]
    with pytest.raises(NotImplementedError, match=message):
        EngineArgs(
            model, speculative_config=method, dtype="float32", **flags
        ).create_engine_config()
