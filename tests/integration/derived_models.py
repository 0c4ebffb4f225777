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
from transformers import AutoModelForCausalLM, Gemma3TextConfig

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
    with torch.device("meta"):
        shapes = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    generator = torch.Generator().manual_seed(0)
    weights = {
        # A norm multiplies by one more than this.
        name: torch.zeros(weight.shape)
        if weight.dim() == 1
        else torch.empty(weight.shape).normal_(std=0.05, generator=generator)
        for name, weight in shapes.items()
    }
    return write_model(folder, config.to_dict(), weights=weights)
