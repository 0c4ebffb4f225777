"""Kinds of models and flags: where they are drafted for, and whether in trees.

`test_reach` serves each of them, and `reach_table` makes a table of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.integration.engines import TARGET, THINKING, read_prompts
from tests.integration.models import derived_models, random_models
from tests.integration.models.mrope_model import with_mrope
from tests.integration.models.quantized_models import awq, gptq, quantized
from tests.integration.models.vision_models import SHOWN, SIDE, gemma3_vision, qwen2_5_vl

COUNT = 6
WAVE = np.sin(np.arange(16_000) / 20).astype(np.float32), 16_000
BEGIN, END, SOUND = derived_models.AUDIO
HEARS = partial(derived_models.qwen2_audio, hears=True)


def texts(_: Any) -> list[Any]:
    return read_prompts(COUNT, max_words=60)


def thoughts(_: Any) -> list[Any]:
    return [f"{text} Question" for text in texts(_)]


def few(_: Any) -> list[Any]:
    return read_prompts(4, max_words=30)


def images(llm: Any) -> list[Any]:
    shown = SHOWN[llm.model_config.hf_config.model_type]
    noise = np.random.default_rng(0).integers(0, 256, (COUNT, SIDE, SIDE, 3), dtype=np.uint8)
    return [
        {"prompt": text + shown, "multi_modal_data": {"image": Image.fromarray(noise[i])}}
        if i % 2
        else text
        for i, text in enumerate(texts(llm))
    ]


def audio(llm: Any) -> list[Any]:
    heard = {"multi_modal_data": {"audio": WAVE}}
    return [
        {"prompt": BEGIN + SOUND + END + text, **heard} if i % 2 else text
        for i, text in enumerate(texts(llm))
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
    ids = [llm.get_tokenizer()(text).input_ids for text in texts(llm)]
    return [
        {"prompt_embeds": table[one]} if i % 2 else {"prompt_token_ids": one}
        for i, one in enumerate(ids)
    ]


def copied(folder: Path) -> str:
    """The target, for itself: with embeddings vLLM adds a token to a tokenizer that it keeps."""
    return derived_models.write_model(folder, derived_models.config_of(TARGET))


# vLLM's other attention for MLA needs AMX, and bfloat16.
IN_FLOAT32 = {"attention_backend": "CPU_MLA"}
# As in compiled models: vLLM's kernel rotates the first head of an LFM2 alone.
ROTATED_BY_TORCH = {"compilation_config": {"custom_ops": ["none"]}}
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


# vLLM's kernels of these take no float32, that of W8A8 with AMX. A row has the same bits there in
# any batch.
IN_16_BITS = {"dtype": "bfloat16"}
W8A8 = IN_16_BITS if torch.cpu._is_amx_tile_supported() else {}
SINKS = [-1.0, 2.0, 4.0, 6.0]
WINDOW = 40  # of blocks of 32
IN_BLOCKS = {"block_size": 32, "max_model_len": 256}
EMBEDDED = "the embedded target"
# Models that have trees.
KINDS = {
    EMBEDDED: Row(),
    "sinks": Row(partial(random_models.gpt_oss, window=WINDOW, sinks=SINKS), IN_BLOCKS),
    "experts": Row(derived_models.mixtral),
    "M-RoPE": Row(with_mrope),
    "W8A8": Row(quantized, W8A8),
    "AWQ": Row(awq, IN_16_BITS),
    "GPTQ": Row(gptq, IN_16_BITS),
    "text part": Row(derived_models.qwen2_audio, {"language_model_only": True}),
}
# vLLM keeps layers with a window in KV cache groups of their own, each with a block table, and
# takes back the blocks that fell out of a window.
WINDOWS = {
    "windows in some layers": Row(
        partial(derived_models.with_windows, window=WINDOW, windowed="fssfss"), IN_BLOCKS
    ),
    "windows in all layers": Row(partial(derived_models.mistral, window=WINDOW), IN_BLOCKS),
    "windows out of reach": Row(
        partial(derived_models.mistral, window=IN_BLOCKS["max_model_len"]), IN_BLOCKS
    ),
    "Gemma 3": Row(random_models.gemma3, IN_BLOCKS),
}
# The shape of SmolLM2-135M, which benchmarks use: five times as deep as the embedded target, and
# three query heads to a KV head. With weights that deviate less, greedy output is one token again
# and again; with more, hardly a token comes twice, and no draft is accepted.
deep = random_models.random_model(
    "Llama",
    std=0.035,
    dtype=torch.bfloat16,
    vocab_size=random_models.SMALL["vocab_size"],
    num_hidden_layers=30,
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    tie_word_embeddings=True,
)
DEEP = {"many layers": Row(deep, {"max_model_len": 256}, few, {"max_tokens": 20})}
# Models and flags, most of which have chains.
ROWS = {
    "a thinking budget": Row(None, THINKING, thoughts, {"thinking_token_budget": 7}),
    "lm-format-enforcer, no grammar": Row(None, ENFORCER),
    "expert parallelism on one rank": Row(derived_models.mixtral, {"enable_expert_parallel": True}),
    "soft cap": Row(random_models.gemma2, reason="soft cap"),
    "chunked attention": Row(random_models.llama4, {"block_size": 32}, reason="chunked"),
    "reference sliding windows, which vLLM leaves out on CPU": Row(
        None, {"hf_overrides": {"rswa_window": 64}}, reason="reference sliding-window attention"
    ),
    "ALiBi": Row(random_models.bloom, reason="ALiBi"),
    "fp8 cache": Row(None, {"kv_cache_dtype": "fp8"}, reason="--kv-cache-dtype fp8"),
    "fast prefill of a shared KV cache (Gemma 4)": Row(
        random_models.gemma4, {"kv_sharing_fast_prefill": True}, reason="--kv-sharing-fast-prefill"
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
    "MLA": Row(random_models.deepseek, IN_FLOAT32, reason="MLA"),
    "Mamba2": Row(random_models.mamba2, reason=STATES),
    "Mamba2, attention and prefix caching (Granite 4)": Row(
        random_models.granite_hybrid, {"enable_prefix_caching": True}, reason=STATES
    ),
    "Mamba2 beside attention (Falcon-H1)": Row(random_models.falcon_h1, reason=STATES),
    "gated delta nets (Qwen3-Next)": Row(
        random_models.qwen3_next, {"dtype": "bfloat16"}, reason=STATES
    ),
    "short convolutions (LFM2)": Row(random_models.lfm2, ROTATED_BY_TORCH, reason=STATES),
    "encoder-decoder": Row(random_models.whisper, {"max_model_len": 128}, speech, reason=INPUT),
}
TESTED = KINDS | WINDOWS | DEEP | ROWS
# What is compared with these.
NO_SINKS, HALF = "no sinks", "16 bits"
ALL = TESTED | {
    NO_SINKS: Row(
        partial(random_models.gpt_oss, window=WINDOW, sinks=[-100.0] * len(SINKS)), IN_BLOCKS
    ),
    HALF: Row(None, IN_16_BITS),
}
