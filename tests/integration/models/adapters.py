"""LoRA adapters with random weights, in the form that PEFT saves."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

RANK, ALPHA = 4, 32
# Large enough that no two adapters write the same, small enough that texts repeat themselves.
STANDARD_DEVIATION = {"layers": 0.02, "lm_head": 0.1}


def write_adapter(folder: Path, model: str, *, seed: int, has_head: bool) -> str:
    """An adapter of all linear layers of an embedded model, and of its head if told."""
    config = AutoConfig.from_pretrained(model)
    shapes = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(config.num_hidden_layers)
        for name, shape in layer_shapes(model).items()
    }
    if has_head:
        shapes["lm_head"] = config.vocab_size, config.hidden_size
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (rows, columns) in shapes.items():
        deviation = STANDARD_DEVIATION["lm_head" if name == "lm_head" else "layers"]
        first = torch.randn(RANK, columns, generator=generator) / columns**0.5
        second = torch.randn(rows, RANK, generator=generator) * deviation
        tensors[f"base_model.model.{name}.lora_A.weight"] = first
        tensors[f"base_model.model.{name}.lora_B.weight"] = second
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.rsplit(".", 1)[-1] for name in shapes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def layer_shapes(model: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of a layer of a Llama, by their names."""
    config = AutoConfig.from_pretrained(model)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
