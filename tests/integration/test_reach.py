"""Wherever vLLM's own methods go: output is vLLM's, token for token, where trees do not go too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from derived_models import (
    AUDIO,
    bloom,
    config_of,
    deepseek,
    gemma2,
    gemma4,
    llama4,
    mixtral,
    qwen2_audio,
    whisper,
    write_model,
)
from engines import (
    GROWN,
    TARGET,
    THINKING,
    TOKEN_RECYCLING,
    counter,
    engine,
    generate,
    mixed_params,
    read_prompts,
    runner,
)
from PIL import Image
from reach_table import NGRAM
from recurrent_models import falcon_h1, granite_hybrid, lfm2, mamba2, qwen3_next
from vision_models import SHOWN, SIDE, gemma3_vision, qwen2_5_vl
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_recycle.core.curve import CHAINS, MeasuredCurve
from vllm_recycle.integration import config

COUNT = 6
WAVE = np.sin(np.arange(16_000) / 20).astype(np.float32), 16_000
BEGIN, END, SOUND = AUDIO
HEARS = partial(qwen2_audio, hears=True)


def texts(_: Any) -> list[Any]:
    return read_prompts(COUNT, max_words=60)


def thoughts(_: Any) -> list[Any]:
    return [f"{text} Question" for text in texts(_)]


def images(llm: Any) -> list[Any]:
    shown = SHOWN[llm.model_config.hf_config.model_type]
    noise = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
    return [
        {"prompt": text + shown, "multi_modal_data": {"image": Image.fromarray(noise[i])}}
        if i % 2
        else text
        for i, text in enumerate(read_prompts(COUNT, max_words=60))
    ]


def audio(_: Any) -> list[Any]:
    return [
        {"prompt": BEGIN + SOUND + END + text, "multi_modal_data": {"audio": WAVE}}
        if i % 2
        else text
        for i, text in enumerate(read_prompts(COUNT, max_words=60))
    ]


def speech(_: Any) -> list[Any]:
    return [
        {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": WAVE}},
            "decoder_prompt": {"prompt_token_ids": [1] + [7, 8, 9] * (2 + i)},
        }
        for i in range(COUNT)
    ]


def embeddings(llm: Any) -> list[Any]:
    """Prompts of embeddings and of tokens in turn."""
    [table] = llm.apply_model(lambda model: model.model.embed_tokens.weight.clone())
    prompts = read_prompts(COUNT, max_words=60)
    ids = [llm.get_tokenizer()(prompt).input_ids for prompt in prompts]
    return [
        {"prompt_embeds": table[one]} if i % 2 else {"prompt_token_ids": one}
        for i, one in enumerate(ids)
    ]


def copied(folder: Path) -> str:
    """The target, for itself: with embeddings vLLM adds a token to a tokenizer that it keeps."""
    return write_model(folder, config_of(TARGET))


# vLLM's other attention for MLA needs AMX, and bfloat16.
IN_FLOAT32 = {"attention_backend": "CPU_MLA"}
FOLDER = "the folder of a test"
KV_CONNECTOR = {
    "kv_connector": "ExampleConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"shared_storage_path": FOLDER},
}
EC_CONNECTOR = {
    "ec_connector": "ECExampleConnector",
    "ec_role": "ec_both",
    "ec_connector_extra_config": {"shared_storage_path": FOLDER},
}
ENFORCER = {"structured_outputs_config": {"backend": "lm-format-enforcer"}}
STATES = "a hybrid or Mamba model"
INPUT = "a multimodal model"


@dataclass(frozen=True)
class Row:
    """A kind of model, or a flag.

    Attributes:
        make: what makes the model; none for the target.
        settings: of its engines.
        prompts: of an engine, those that are asked.
        params: of all requests.
        reason: why chains are drafted, as the line at start-up calls it; none for trees.
    """

    make: Callable[[Path], str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: Callable[[Any], list[Any]] = texts
    params: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def made(self, folder: Path) -> dict[str, Any]:
        """The settings of an engine with the model."""
        model = TARGET if self.make is None else self.make(folder / "model")
        settings = json.dumps(self.settings).replace(FOLDER, str(folder / "stored"))
        return {"model": model, **json.loads(settings)}


ROWS = {
    "a thinking budget": Row(None, THINKING, thoughts, {"thinking_token_budget": 7}),
    "lm-format-enforcer, no grammar": Row(None, ENFORCER),
    "expert parallelism on one rank": Row(mixtral, {"enable_expert_parallel": True}),
    "soft cap": Row(gemma2, reason="soft cap"),
    "chunked attention": Row(llama4, {"block_size": 32}, reason="chunked"),
    "reference sliding windows, which vLLM leaves out on CPU": Row(
        None, {"hf_overrides": {"rswa_window": 64}}, reason="reference sliding-window attention"
    ),
    "ALiBi": Row(bloom, reason="ALiBi"),
    "fp8 cache": Row(None, {"kv_cache_dtype": "fp8"}, reason="--kv-cache-dtype fp8"),
    "fast prefill of a shared KV cache (Gemma 4)": Row(
        gemma4, {"kv_sharing_fast_prefill": True}, reason="--kv-sharing-fast-prefill"
    ),
    "KV connector": Row(None, {"kv_transfer_config": KV_CONNECTOR}, reason="--kv-transfer-config"),
    "embeddings": Row(
        copied, {"enable_prompt_embeds": True}, embeddings, reason="--enable-prompt-embeds"
    ),
    "audio": Row(HEARS, {}, audio, reason=INPUT),
    "audio, encoder connector": Row(
        HEARS, {"ec_transfer_config": EC_CONNECTOR}, audio, reason=INPUT
    ),
    "images (Gemma 3)": Row(gemma3_vision, {}, images, reason=INPUT),
    "images and M-RoPE (Qwen2.5-VL)": Row(qwen2_5_vl, {}, images, reason=INPUT),
    "MLA": Row(deepseek, IN_FLOAT32, reason="MLA"),
    "Mamba2": Row(mamba2, reason=STATES),
    "Mamba2, attention and prefix caching (Granite 4)": Row(
        granite_hybrid, {"enable_prefix_caching": True}, reason=STATES
    ),
    "Mamba2 beside attention (Falcon-H1)": Row(falcon_h1, reason=STATES),
    "gated delta nets (Qwen3-Next)": Row(qwen3_next, {"dtype": "bfloat16"}, reason=STATES),
    "encoder-decoder": Row(whisper, {"max_model_len": 128}, speech, reason=INPUT),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_output_equals_vllm(row, tmp_path, monkeypatch):
    if row == "fp8 cache" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM needs AVX-512 for it")
    if "images" in row and find_spec("torchvision") is None:
        pytest.skip("vLLM needs torchvision for it: make vision")
    row = ROWS[row]
    settings, params = row.made(tmp_path), mixed_params(COUNT, max_tokens=40, **row.params)
    with engine(**settings) as llm:
        prompts = row.prompts(llm)
        expected = generate(llm, prompts, params)
    said = []
    monkeypatch.setattr(config.logger, "info", lambda *words: said.append(words[0] % words[1:]))
    with engine(GROWN, **settings) as llm:
        reasons = [line for line in said if "drafts chains" in line]
        assert [row.reason in line for line in reasons] == [True] * bool(row.reason)
        # Drafts are right more often where the text came before.
        assert [generate(llm, prompts, params) for _ in range(2)] == [expected] * 2
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        assert has_our_attention(llm) != bool(row.reason)


def has_our_attention(llm: Any) -> bool:
    layers = runner(llm).compilation_config.static_forward_context.values()
    return any("Tree" in type(getattr(layer, "impl", None)).__name__ for layer in layers)


def test_chains_can_be_asked_for_and_are_verified_as_vllm_does():
    prompts, params = read_prompts(COUNT), mixed_params(COUNT, max_tokens=40)
    with engine() as llm:
        expected = generate(llm, prompts, params)
    with engine({**GROWN, "tree": "chain", "max_nodes": 8}) as llm:
        assert generate(llm, prompts, params) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        assert not has_our_attention(llm)
        assert runner(llm).step.trees.are_chains


def test_chains_are_drafted_where_trees_never_pay(monkeypatch):
    prompts, params = read_prompts(COUNT), mixed_params(COUNT, max_tokens=40)
    with engine() as llm:
        expected = generate(llm, prompts, params)
    with engine({**TOKEN_RECYCLING, "row_cost": 0.01}) as llm:
        ours = runner(llm)
        ours.tree_drafter.curve = MeasuredCurve.linear(0.01, ours.tree_drafter.max_rows, [CHAINS])
        compact, are_chains = ours._compact_kv_cache, []

        def watched(path: torch.Tensor) -> None:
            are_chains.append(ours.step.trees.are_chains)
            compact(path)

        monkeypatch.setattr(ours, "_compact_kv_cache", watched)
        assert generate(llm, prompts, params) == expected
        assert counter(llm, "spec_decode_num_accepted_tokens") > 0
        assert are_chains
        assert all(are_chains)


def test_what_is_no_token_is_not_learnt_from(tmp_path):
    with engine(GROWN, model=copied(tmp_path / "model"), enable_prompt_embeds=True) as llm:
        table = torch.zeros(12, runner(llm).model_config.get_hidden_size())
        generate(llm, [{"prompt_embeds": table}], mixed_params(1, max_tokens=1))
        assert runner(llm).tree_drafter.state.matrix.num_written == 0


@pytest.mark.skipif(find_spec("torchvision") is None, reason="make vision")
@pytest.mark.parametrize("make", [gemma3_vision, qwen2_5_vl])
def test_what_is_an_image_matters_and_is_not_learnt_from(make, tmp_path):
    params = SamplingParams(temperature=0, max_tokens=24)
    with engine({**GROWN, "scope": "shared"}, model=make(tmp_path / "model")) as llm:
        prompts = images(llm)
        seen = generate(llm, prompts, params)
        for prompt in prompts[1::2]:
            prompt["multi_modal_data"] = {"image": Image.new("RGB", (SIDE, SIDE))}
        dark = generate(llm, prompts, params)
        assert [a == b for a, b in zip(seen, dark, strict=True)] == [True, False] * (COUNT // 2)
        matrix, shown = (
            runner(llm).tree_drafter.state.matrix,
            llm.model_config.hf_config.image_token_id,
        )
        assert matrix.num_written > 0
        assert not matrix.known_entries([shown], 0)


@pytest.mark.parametrize("method", [None, NGRAM, GROWN], ids=["plain", "ngram", "ours"])
def test_a_request_for_lm_format_enforcer_meets_the_error_that_it_meets_without_us(method):
    follows = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    # The library looks for what vLLM no longer has; else vLLM would refuse its grammars for drafts.
    with engine(method, **ENFORCER) as llm, pytest.raises(ImportError, match="is not installed"):
        generate(llm, texts(llm), follows)


def test_a_model_with_other_states_is_refused(tmp_path):
    with (
        pytest.raises(NotImplementedError, match="its states are those of ShortConv, expected"),
        engine(TOKEN_RECYCLING, model=lfm2(tmp_path / "model")),
    ):
        pass


def test_a_model_whose_heads_vllm_does_not_rotate_is_refused(tmp_path):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    with (
        pytest.raises(NotImplementedError, match="rotates its first head alone"),
        engine(TOKEN_RECYCLING, model=deepseek(tmp_path / "model", rope=plain), **IN_FLOAT32),
    ):
        pass
