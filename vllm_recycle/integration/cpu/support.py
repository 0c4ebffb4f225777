"""What the C++ kernels are there for; asked when an engine is configured."""

from __future__ import annotations

import platform
from typing import Any

from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_recycle.kernels.cpu.build import load_library
from vllm_recycle.kernels.cpu.cache_calls import unsupported_attention


def has_kernels() -> bool:
    """Whether there are kernels; they are compiled if need be, and a warning says why not."""
    return load_library() is not None


def unsupported_by_trees(vllm_config: Any, name: str, model: Any) -> dict[str, bool]:
    """What trees do not go with, and whether a model has it.

    Args:
        vllm_config: of the engine.
        name: of the model, in words.
        model: vLLM's `ModelConfig`.

    """
    if platform.machine() != "x86_64":
        return {f"a {name} on {platform.machine()}": True}
    head_size = model.get_head_size()
    isa = _get_attn_isa(model.dtype, vllm_config.cache_config.block_size, head_size)
    features = unsupported_attention(model.dtype, head_size, isa)
    return {f"a {name} with {feature} on a CPU": is_there for feature, is_there in features.items()}
