"""Heads of random weights for the embedded target, in the formats of vLLM's checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from engines import TARGET
from safetensors.torch import load_file, save_file

CONFIG = json.loads((Path(TARGET) / "config.json").read_text())
HIDDEN, INNER, VOCAB = (CONFIG[f"{name}_size"] for name in ("hidden", "intermediate", "vocab"))
QUERIES = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
KEYS = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]


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


def with_mtp(folder: Path) -> str:
    """The target as a MiMo model, whose biases are 0, with a layer that predicts the next token."""
    weights = load_file(f"{TARGET}/model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for index in range(CONFIG["num_hidden_layers"]):
        weights |= {f"model.layers.{index}.self_attn.{name}": zeros for name, zeros in _biases()}
    layer = {**_layer(HIDDEN), **{f"self_attn.{name}": zeros for name, zeros in _biases()}}
    layer["input_proj.weight"] = _random(HIDDEN, 2 * HIDDEN)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    layer |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    weights |= {f"model.mtp_layers.0.{name}": value for name, value in layer.items()}
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }
    return _write(folder, config, weights)


def _layer(inputs: int) -> dict[str, torch.Tensor]:
    return {
        "self_attn.q_proj.weight": _random(QUERIES, inputs),
        "self_attn.k_proj.weight": _random(KEYS, inputs),
        "self_attn.v_proj.weight": _random(KEYS, inputs),
        "self_attn.o_proj.weight": _random(HIDDEN, QUERIES),
        "mlp.gate_proj.weight": _random(INNER, HIDDEN),
        "mlp.up_proj.weight": _random(INNER, HIDDEN),
        "mlp.down_proj.weight": _random(HIDDEN, INNER),
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _biases() -> list[tuple[str, torch.Tensor]]:
    sizes = {"q": QUERIES, "k": KEYS, "v": KEYS}
    return [(f"{name}_proj.bias", torch.zeros(size)) for name, size in sizes.items()]


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(TARGET) / name, folder)
    halves = {name: value.bfloat16().contiguous() for name, value in weights.items()}
    save_file(halves, folder / "model.safetensors")
    return str(folder)
