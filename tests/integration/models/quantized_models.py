"""The embedded target with weights in 8 and in 4 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.integration.engines import TARGET
from tests.integration.models.derived_models import WEIGHTS, config_of, write_model

GROUP = 64  # inputs that have a scale of weights in 4 bits


def quantized(folder: Path) -> str:
    """The target in W8A8: weights in 8 bits by channel, activations by token."""
    in_8_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": {**in_8_bits, "strategy": "channel"},
        "input_activations": {**in_8_bits, "strategy": "token", "dynamic": True},
    }
    config = config_of(TARGET)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    weights = load_file(Path(TARGET) / WEIGHTS)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        scales = weights[name].float().abs().amax(1, keepdim=True) / 127
        weights[f"{name}_scale"] = scales
        weights[name] = (weights[name].float() / scales).round().to(torch.int8)
    return write_model(folder, config, weights=weights)


def awq(folder: Path) -> str:
    """The target in 4 bits as AWQ has them: each group of weights has a scale and a zero."""

    def put(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        least, most = weight.amin(2, keepdim=True), weight.amax(2, keepdim=True)
        scales = (most - least) / 15
        zeros = (-least / scales).round().clamp(0, 15)
        values = ((weight / scales).round() + zeros).clamp(0, 15).flatten(1)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": packed(values.T, order),
            "qzeros": packed(zeros[..., 0].T, order),
            "scales": scales[..., 0].T.half(),
        }

    return in_4_bits(folder, {"quant_method": "awq", "zero_point": True, "version": "gemm"}, put)


def gptq(folder: Path) -> str:
    """The target in 4 bits as GPTQ has them: each group of weights has a scale, and zero is 8."""

    def put(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = weight.abs().amax(2, keepdim=True) / 7
        values = ((weight / scales).round() + 8).flatten(1)
        num_groups = weight.shape[1]
        return {
            "qweight": packed(values).T,
            "qzeros": packed(torch.full((num_groups, len(weight)), 7.0)),  # one less, by its format
            "scales": scales[..., 0].T.half(),
            "g_idx": torch.arange(num_groups).repeat_interleave(weight.shape[2]).int(),
        }

    return in_4_bits(folder, {"quant_method": "gptq", "sym": True, "desc_act": False}, put)


def in_4_bits(
    folder: Path,
    scheme: dict[str, Any],
    put: Callable[[torch.Tensor], dict[str, torch.Tensor]],
) -> str:
    """The target with tensors for each projection, made of its weight [outputs, groups, GROUP]."""
    config = config_of(TARGET)
    config["quantization_config"] = {"bits": 4, "group_size": GROUP, **scheme}
    weights = load_file(Path(TARGET) / WEIGHTS)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        tensors = put(weights.pop(name).float().unflatten(1, (-1, GROUP)))
        layer = name.removesuffix("weight")
        weights |= {f"{layer}{key}": tensor.contiguous() for key, tensor in tensors.items()}
    return write_model(folder, config, weights=weights)


def packed(values: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight numbers of 4 bits in each of 32, along the last dimension; the first is the lowest."""
    eights = values.long().unflatten(-1, (-1, 8))[..., list(order)]
    return (eights << 4 * torch.arange(8)).sum(-1).int()
