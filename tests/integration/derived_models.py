"""Models of other architectures, most with the weights of the embedded target.

Their text is natural enough that drafts are accepted, and a layer's kind matters to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from engines import TARGET
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Gemma4TextConfig, GptOssConfig

WEIGHTS = "model.safetensors"
NUM_LAYERS = 6
EXPERTS = 4


def write_model(
    folder: Path,
    config: dict[str, Any],
    *,
    weights: dict[str, torch.Tensor] | None = None,
    source: str = TARGET,
) -> str:
    """A model with the tokenizer of another, and its weights where none are given."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", WEIGHTS):
        if name != WEIGHTS or weights is None:
            (folder / name).symlink_to(Path(source) / name)
    if weights is not None:
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
    return str(folder)


def config_of(model: str) -> dict[str, Any]:
    return json.loads((Path(model) / "config.json").read_text())


def with_windows(folder: Path, window: int, windowed: str, *, source: str = TARGET) -> str:
    """A Llama with a sliding window in the layers that are `s` in a string such as `fss`."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    layers = {"layer_types": [kinds[letter] for letter in windowed], "sliding_window": window}
    return write_model(folder, config_of(source) | layers, source=source)


def mistral(folder: Path, window: int) -> str:
    """One sliding window for the whole model, as Mistral-7B-v0.1 has it."""
    architecture = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return write_model(folder, config_of(TARGET) | architecture | {"sliding_window": window})


def mixtral(folder: Path) -> str:
    """Experts that are the target's MLP, each with other noise, and a router."""
    architecture = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    sizes = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
    generator = torch.Generator().manual_seed(0)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        std = float(weight.float().std()) / 4
        noise = torch.empty(weight.shape).normal_(std=std, generator=generator)
        return (weight.float() + noise).bfloat16()

    weights = {}
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, weight in load_file(Path(TARGET) / WEIGHTS).items():
        if ".mlp." not in name:
            weights[name] = weight
            continue
        layer, projection = name.split(".mlp.")[0], name.split(".")[-2]
        moe = f"{layer}.block_sparse_moe"
        for expert in range(EXPERTS):
            weights[f"{moe}.experts.{expert}.{names[projection]}.weight"] = noisy(weight)
        router = torch.empty(EXPERTS, config_of(TARGET)["hidden_size"])
        weights[f"{moe}.gate.weight"] = router.normal_(generator=generator).bfloat16()
    return write_model(folder, config_of(TARGET) | architecture | sizes, weights=weights)


def gemma3(folder: Path, window: int) -> str:
    """A Gemma 3 of five windowed layers and a full one, with random weights."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": NUM_LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Gemma3TextConfig(
        **shape,
        **heads,
        **{key: config_of(TARGET)[key] for key in ("vocab_size", "max_position_embeddings")},
        architectures=["Gemma3ForCausalLM"],
        sliding_window=window,
        query_pre_attn_scalar=32,
        tie_word_embeddings=False,
    )
    # Its norms multiply by one more than this.
    return write_model(folder, config.to_dict(), weights=random_weights(config, norms=0.0))


def gemma4(folder: Path) -> str:
    """A Gemma 4 whose last two layers read the KV cache of the second, with random weights."""
    vocab_size = config_of(TARGET)["vocab_size"]
    config = Gemma4TextConfig(
        architectures=["Gemma4ForCausalLM"],
        vocab_size=vocab_size,
        vocab_size_per_layer_input=vocab_size,
        hidden_size=64,
        hidden_size_per_layer_input=8,
        intermediate_size=64,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["full_attention"] * 4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=32,
        max_position_embeddings=2048,
    )
    return write_model(folder, config.to_dict(), weights=random_weights(config, norms=1.0))


def gpt_oss(folder: Path, window: int, sinks: list[float]) -> str:
    """A GPT-OSS of windowed layers and full ones in turn, with random weights and these sinks."""
    shape = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": len(sinks), "num_key_value_heads": 2, "head_dim": 32}
    config = GptOssConfig(
        **shape,
        **heads,
        architectures=["GptOssForCausalLM"],
        vocab_size=config_of(TARGET)["vocab_size"],
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=window,
    )
    weights = random_weights(config, norms=1.0)
    of_layers = {name: torch.tensor(sinks) for name in weights if name.endswith(".sinks")}
    return write_model(folder, config.to_dict(), weights=weights | of_layers)


def qwen2_audio(folder: Path) -> str:
    """The target as the text part of a Qwen2-Audio, and no weights for what hears."""
    text, weights = as_qwen2(TARGET)
    sizes = {"d_model": 32, "encoder_ffn_dim": 64}
    layers = {"encoder_layers": 1, "encoder_attention_heads": 2}
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "text_config": text,
        "audio_config": {"model_type": "qwen2_audio_encoder", **sizes, **layers},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    wrapped = {f"language_model.{name}": weight for name, weight in weights.items()}
    return write_model(folder, config, weights=wrapped)


def with_mrope(folder: Path, *, source: str = TARGET) -> str:
    """A model as that of `mrope_model`."""
    config, weights = as_qwen2(source)
    eighth = config["head_dim"] // 8
    rope = {**config["rope_parameters"], "mrope_section": [eighth, eighth, 2 * eighth]}
    changed = {"architectures": ["MRopeQwen2ForCausalLM"], "rope_parameters": rope}
    return write_model(folder, config | changed, weights=weights, source=source)


def as_qwen2(source: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and weights of a Llama as those of a Qwen2, whose biases are 0."""
    config = config_of(source)
    architecture = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    weights = load_file(Path(source) / WEIGHTS)
    projections = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    biases = {
        name.replace("weight", "bias"): torch.zeros(len(weight))
        for name, weight in weights.items()
        if name.endswith(projections)
    }
    return config | architecture, weights | biases


def random_weights(config: Any, *, norms: float, std: float = 0.05) -> dict[str, torch.Tensor]:
    """Those of a model of `transformers`, of norms one number."""
    with torch.device("meta"):
        shapes = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.full(weight.shape, norms)
        if "norm" in name
        else torch.empty(weight.shape).normal_(std=std, generator=generator)
        for name, weight in shapes.items()
    }
