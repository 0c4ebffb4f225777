"""Which vLLM is supported, and in what the supported versions differ."""

from __future__ import annotations

import os
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED_VLLM = ">=0.30,<0.34"
ALLOW_UNTESTED = "VLLM_RECYCLE_ALLOW_UNTESTED_VLLM"


def check_vllm_version() -> None:
    """Raise RuntimeError where vLLM is of no supported version, and none was to be tried."""
    try:
        base = Version(vllm.__version__).base_version
        is_supported = SpecifierSet(SUPPORTED_VLLM).contains(base)
    except InvalidVersion:  # "dev": built from sources without tags
        is_supported = False
    if not is_supported and os.environ.get(ALLOW_UNTESTED) != "1":
        raise RuntimeError(
            f"vllm_recycle supports vllm {SUPPORTED_VLLM}, found {vllm.__version__}; set "
            f"{ALLOW_UNTESTED}=1 to try it, untested"
        )


class Features:
    """In what the supported versions of vLLM differ: read instead of a version, found out once."""

    @cached_property
    def trims_surplus_tokens(self) -> bool:
        """Outputs lose the tokens behind a stop string. Remove when vLLM 0.31 is dropped."""
        from vllm.v1.engine.output_processor import OutputProcessor

        return hasattr(OutputProcessor, "_trim_surplus_tokens")

    @cached_property
    def bounds_constraints(self) -> bool:
        """A grammar may take in a token that it does not bind. Remove when vLLM 0.31 is dropped."""
        from vllm.v1.structured_output import StructuredOutputManager

        return hasattr(StructuredOutputManager, "_get_constraint_bounds")

    @cached_property
    def v2_hosts(self) -> bool:
        """Model Runner V2 has a speculator by n-grams, and one by draft models that rounds can use.

        It then tells a speculator how many tokens to draft, too. Remove when vLLM 0.31 is dropped.
        """
        return _has_folder("v1/worker/gpu/spec_decode/standalone_ar")

    @cached_property
    def v2_runs_trees(self) -> bool:
        """Model Runner V2 gives a batch with a prompt no graph that was made for drafts.

        So it is since it has logits processors. Remove when 0.30 is dropped.
        """
        return _has_folder("v1/worker/gpu/sample/logits_processor")

    @cached_property
    def aux_outputs(self) -> bool:
        """What else is returned has its own configuration. Remove when vLLM 0.30 is dropped."""
        from vllm.config import VllmConfig

        return any(field.name == "aux_output_config" for field in fields(VllmConfig))

    @cached_property
    def cpu_runs_heads(self) -> bool:
        """Kernels of draft models have a form for CPUs. Remove when vLLM 0.30 is dropped."""
        from vllm.platforms.cpu import CpuPlatform

        return hasattr(CpuPlatform, "register_triton_kernel_overrides")

    @cached_property
    def queues_block_holders(self) -> bool:
        """Waiting requests with KV blocks have their queue. Remove when vLLM 0.30 is dropped."""
        from vllm.v1.core.sched.scheduler import Scheduler

        return hasattr(Scheduler, "_holds_kv_blocks")

    @cached_property
    def skips_rows_without_adapter(self) -> bool:
        """LoRA's torch kernels add nothing to such rows. Remove when vLLM 0.32 is dropped."""
        from vllm.lora.ops.torch_ops import bgmv_expand

        row, output_tensor = torch.ones(1, 1), torch.zeros(1, 1)
        bgmv_expand(row, row[None], output_tensor, torch.tensor([-1]))
        return not output_tensor.any()


FEATURES = Features()


def takes_images(model: Any) -> bool:
    """Whether a model, vLLM's `ModelConfig`, reads more than text as it is configured."""
    if hasattr(model, "supports_multimodal_inputs"):
        return bool(model.supports_multimodal_inputs)
    from vllm.multimodal import MULTIMODAL_REGISTRY  # remove when vLLM 0.30 is dropped

    return MULTIMODAL_REGISTRY.supports_multimodal_inputs(model)


def _has_folder(name: str) -> bool:
    assert vllm.__file__ is not None
    return (Path(vllm.__file__).parent / name).is_dir()
