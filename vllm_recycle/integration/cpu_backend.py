"""vLLM's CPU attention backend with trees: its own kernel for all rows that are none.

Registered in the place of `CPU_ATTN` only while one of our workers loads its model, so that other
engines of the process keep vLLM's backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vllm_recycle.integration.options import TOKEN_RECYCLING
from vllm_recycle.kernels.cpu_tree_attention import TreeRows, tree_attention


@dataclass(frozen=True, slots=True)
class MixedRows:
    """A step's rows, split by who attends.

    Attributes:
        trees: the rows of trees.
        other_rows: int64 [n], the flat rows that are no tree; None where all are.
        other_metadata: vLLM's metadata for these alone.

    """

    trees: TreeRows
    other_rows: torch.Tensor | None
    other_metadata: CPUAttentionMetadata | None


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention of a layer; a step with trees carries `MixedRows` at its metadata.

    Raises:
        NotImplementedError: a kind of layer whose masks or scores the tree path does not have.

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refused = {
            "ALiBi": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != -1,
            "a logits soft cap": self.logits_soft_cap != 0,
            "attention sinks": self.sinks is not None,
            "an fp8 KV cache": self.is_fp8_kv_cache,
            f"attention of type {self.attn_type}": self.attn_type != AttentionType.DECODER,
        }
        for feature, present in refused.items():
            if present:
                raise NotImplementedError(
                    f"{TOKEN_RECYCLING} does not support {feature}; leave out --speculative-config"
                )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        mixed: MixedRows | None = getattr(attn_metadata, "mixed_rows", None)
        if mixed is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        tree_attention(
            query, kv_cache, output, trees=mixed.trees, scale=self.scale, isa=layer.isa
        )
        if mixed.other_rows is not None:
            others = torch.empty_like(output[mixed.other_rows])
            super().forward(
                layer,
                query[mixed.other_rows],
                key,
                value,
                kv_cache,
                mixed.other_metadata,
                others,
            )
            output[mixed.other_rows] = others
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl


@contextmanager
def tree_attention_backend() -> Iterator[None]:
    """Layers that are created meanwhile get `TreeCPUAttentionImpl`."""
    backend = AttentionBackendEnum.CPU_ATTN
    # The look-up is cached, so a change is not seen before the cache is cleared.
    register_backend(
        backend, f"{TreeCPUAttentionBackend.__module__}.{TreeCPUAttentionBackend.__qualname__}"
    )
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        backend.clear_override()
        _cached_get_attn_backend.cache_clear()
