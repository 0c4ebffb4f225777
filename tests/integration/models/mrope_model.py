"""A text model with M-RoPE, for vLLM's registry of models.

Those of vLLM that have it are multimodal, and need torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from tests.integration.engines import TARGET
from tests.integration.models.derived_models import as_qwen2, mrope_of, write_model

SHIFT = 3


class MRopeQwen2ForCausalLM(Qwen2ForCausalLM, SupportsMRoPE):
    """As if a picture were in the prompt: dimensions differ there, and are shifted behind it."""

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        token = torch.arange(len(input_tokens))
        return torch.stack((token, token // 2, token + SHIFT)), SHIFT


def with_mrope(folder: Path) -> str:
    """The target as such a model, which vLLM's registry then knows."""
    ModelRegistry.register_model(MRopeQwen2ForCausalLM.__name__, MRopeQwen2ForCausalLM)
    config, weights = as_qwen2(TARGET)
    changed = {"architectures": ["MRopeQwen2ForCausalLM"], "rope_parameters": mrope_of(config)}
    return write_model(folder, config | changed, weights=weights)
