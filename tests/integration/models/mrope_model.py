"""A text model with M-RoPE, for vLLM's registry of models.

Those of vLLM that have it are multimodal, and need torchvision.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

SHIFT = 3


class MRopeQwen2ForCausalLM(Qwen2ForCausalLM, SupportsMRoPE):
    """As if a picture were in the prompt: dimensions differ there, and are shifted behind it."""

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[Any]
    ) -> tuple[torch.Tensor, int]:
        token = torch.arange(len(input_tokens))
        return torch.stack((token, token // 2, token + SHIFT)), SHIFT


def register() -> None:
    ModelRegistry.register_model(MRopeQwen2ForCausalLM.__name__, MRopeQwen2ForCausalLM)
