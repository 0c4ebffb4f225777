"""vLLM's CPU worker with a model runner that verifies trees."""

from __future__ import annotations

import copy
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_recycle.integration.cpu.backend import TreeCPUAttentionBackend
from vllm_recycle.integration.cpu.recurrent import hide_drafts
from vllm_recycle.integration.cpu.runner import TreeCPUModelRunner
from vllm_recycle.integration.options import settings_of
from vllm_recycle.integration.start.refusals import refuse
from vllm_recycle.integration.worker import TreeWorker
from vllm_recycle.kernels.cpu.cache_calls import unsupported_attention


class TreeCPUWorker(TreeWorker, CPUWorker):
    """The V1 runner and vLLM's CPU attention, with trees."""

    runner_class = TreeCPUModelRunner
    replaced_backend = AttentionBackendEnum.CPU_ATTN
    tree_backend = TreeCPUAttentionBackend

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        recurrent_layers = get_layers_from_vllm_config(self.vllm_config, MambaBase)
        for name, layer in recurrent_layers.items():
            hide_drafts(name, layer)
        # Models (LFM2) and layers (MLA) whose queries have a dimension of heads.
        has_short_convs = any(isinstance(layer, ShortConv) for layer in recurrent_layers.values())
        for name, layer in self.model_runner.model.named_modules():
            has_heads = has_short_convs or isinstance(layer, MultiHeadLatentAttentionWrapper)
            rotary = getattr(layer, "rotary_emb", None) if has_heads else None
            if rotary is not None and not rotates_each_head(rotary):
                raise NotImplementedError(
                    f"layer {name}: vLLM's kernel rotates its first head alone, and tokens depend "
                    "on what else is in a step; leave out --enforce-eager, or apply patches/0008"
                )

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_from_config(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        for name, layer in layers.items() if self.verifies_trees else ():
            features = unsupported_attention(self.model_config.dtype, layer.head_size, layer.isa)
            method = settings_of(self.vllm_config).options.method
            refuse(method, {f"layer {name} with {kind}": has for kind, has in features.items()})


def rotates_each_head(rotary: Any) -> bool:
    """Whether a rotary embedding of vLLM gives all heads of all rows their positions."""
    rotary = copy.deepcopy(rotary)  # which may convert its table to what it is given

    def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # Parts of wider rows, as layers give them.
        query, key = torch.ones(2, 3, 2, 2 * rotary.rotary_dim)[..., : rotary.rotary_dim]
        return torch.arange(1, 4), query, key[:, :1]

    return all(map(torch.allclose, rotary(*inputs()), rotary.forward_native(*inputs())))
