"""Small models that see images, for which vLLM needs torchvision (`make vision`)."""

from __future__ import annotations

import importlib
from pathlib import Path

import transformers
from vllm import ModelRegistry

from tests.integration.engines import TARGET
from tests.integration.models.derived_models import (
    add_tokens,
    as_qwen2,
    change_tokenizer,
    make_room,
    mrope_of,
    random_weights,
    write_model,
)
from tests.integration.models.random_models import SMALL

SIDE = 56  # of an image, in pixels
GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
# vLLM looks for these after an image.
NEW_LINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# What stands for an image in a prompt.
SHOWN = {"gemma3": "<start_of_image>", "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>"}


def let_vllm_have(module: str, name: str) -> None:
    """Import code of vLLM here, which it does in another process otherwise, to look at it."""
    found = importlib.import_module(f"vllm.model_executor.models.{module}")
    ModelRegistry.register_model(name, getattr(found, name))


def gemma3_vision(folder: Path) -> str:
    """A Gemma 3 that sees images, with random weights."""
    let_vllm_have("gemma3_mm", "Gemma3ForConditionalGeneration")
    vocab_size = SMALL["vocab_size"]
    config = transformers.Gemma3Config(
        architectures=["Gemma3ForConditionalGeneration"],
        text_config={
            **SMALL,
            "vocab_size": vocab_size + len(GEMMA_TOKENS) + len(NEW_LINES),
            "max_position_embeddings": 2048,
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        **{f"{name}_index": vocab_size + i for i, name in enumerate(GEMMA_TOKENS)},
    )
    # The norms of the text multiply by one more than their numbers.
    weights, eyes = (
        random_weights(config, norms=norms, kind=transformers.Gemma3ForConditionalGeneration)
        for norms in (0.0, 1.0)
    )
    for name in [name for name in weights if "vision_tower" in name]:
        del weights[name]
        weights[name.replace("vision_tower", "vision_tower.vision_model")] = eyes[name]
    write_model(folder, config.to_dict(), weights=weights)
    size = dict.fromkeys(("height", "width"), SIDE)
    transformers.Gemma3ImageProcessorPil(size=size).save_pretrained(folder)
    add_tokens(folder, (*GEMMA_TOKENS.values(), *NEW_LINES))
    change_tokenizer(folder, processor_class="Gemma3Processor", extra_special_tokens=GEMMA_TOKENS)
    (folder / "processor_config.json").write_text('{"image_seq_length": 4}')
    return str(folder)


def qwen2_5_vl(folder: Path) -> str:
    """The target as the text part of a Qwen2.5-VL, whose eyes have random weights."""
    let_vllm_have("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration")
    text, weights = as_qwen2(TARGET)
    first = text["vocab_size"]
    make_room(text, weights, len(QWEN_TOKENS))
    text |= {"model_type": "qwen2_5_vl_text", "rope_parameters": mrope_of(text)}
    places = ("vision_start", "vision_end", "image", "video")
    config = transformers.Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        text_config=text,
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "out_hidden_size": text["hidden_size"],
        },
        tie_word_embeddings=True,
        **{f"{name}_token_id": first + i for i, name in enumerate(places)},
    )
    eyes = random_weights(config, norms=1.0, kind=transformers.Qwen2_5_VLForConditionalGeneration)
    wrapped = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in weights.items()
    }
    wrapped |= {name: weight for name, weight in eyes.items() if ".visual." in name}
    write_model(folder, config.to_dict(), weights=wrapped)
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    transformers.Qwen2VLImageProcessorPil(size=size).save_pretrained(folder)
    add_tokens(folder, QWEN_TOKENS)
    change_tokenizer(folder, processor_class="Qwen2_5_VLProcessor")
    return str(folder)
