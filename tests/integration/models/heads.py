"""Heads of random weights for the embedded target, in the formats of vLLM's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.integration.engines import TARGET
from tests.integration.models.adapters import layer_shapes
from tests.integration.models.derived_models import as_qwen2, config_of, write_model

CONFIG = config_of(TARGET)
HIDDEN, VOCAB = CONFIG["hidden_size"], CONFIG["vocab_size"]
# Outputs of the projections of attention.
SIZES = {
    name: CONFIG[f"num_{of}_heads"] * CONFIG["head_dim"]
    for name, of in (("q", "attention"), ("k", "key_value"), ("v", "key_value"))
}


def trunks(folder: Path, length: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name a target, and what of vLLM's drafts for it along a head, so many tokens."""
    tokens = {"num_speculative_tokens": length}
    return {
        "eagle": (TARGET, {"method": "eagle", "model": eagle(folder / "eagle"), **tokens}),
        "eagle3": (TARGET, {"method": "eagle3", "model": eagle3(folder / "e3"), **tokens}),
        "mtp": (with_mtp(folder / "mtp"), {"method": "mtp", **tokens}),
    }


def eagle(folder: Path) -> str:
    """An EAGLE head: a layer of the target's kind, behind the embedding and the hidden state."""
    layer = {f"layers.0.{name}": value for name, value in _layer(HIDDEN).items()}
    del layer["layers.0.input_layernorm.weight"]  # the first layer has none
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return _write(folder, config, layer | {"fc.weight": _random(HIDDEN, 2 * HIDDEN)})


def eagle3(folder: Path) -> str:
    """An EAGLE-3 head, which reads the hidden states of three layers."""
    layer = {f"midlayer.{name}": value for name, value in _layer(2 * HIDDEN).items()}
    rest = {
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": _random(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _random(VOCAB, HIDDEN),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "tie_word_embeddings": False,
    }
    return _write(folder, config, layer | rest)


def medusa(folder: Path) -> str:
    """Medusa heads, one for each of three places."""
    weights = {f"blocks.{head}.layers.0.weight": _random(HIDDEN, HIDDEN) for head in range(3)}
    weights |= {f"lm_heads.{head}.weight": _random(VOCAB, HIDDEN) for head in range(3)}
    config = {"architectures": ["MedusaModel"], "model_type": "medusa"}
    return _write(folder, config | {"num_hidden_layers": 1, "num_heads": 3}, weights)


def with_mtp(folder: Path) -> str:
    """The target as a MiMo model, whose biases are 0, with a layer that predicts the next token."""
    config, weights = as_qwen2(TARGET)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    layer = {
        **_layer(HIDDEN),
        **{f"self_attn.{name}_proj.bias": torch.zeros(size) for name, size in SIZES.items()},
        **{f"{name}.weight": torch.ones(HIDDEN) for name in norms},
        "input_proj.weight": _random(HIDDEN, 2 * HIDDEN),
    }
    weights |= {f"model.mtp_layers.0.{name}": value for name, value in layer.items()}
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    return _write(folder, config, weights)


def _layer(inputs: int) -> dict[str, torch.Tensor]:
    """A layer of the target's kind, whose attention has so many inputs."""
    shapes = layer_shapes(TARGET)
    shapes |= {f"self_attn.{name}_proj": (size, inputs) for name, size in SIZES.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return {
        **{f"{name}.weight": _random(*shape) for name, shape in shapes.items()},
        **{f"{name}.weight": torch.ones(HIDDEN) for name in norms},
    }


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    halves = {name: value.bfloat16().contiguous() for name, value in weights.items()}
    return write_model(folder, CONFIG | config, weights=halves)
