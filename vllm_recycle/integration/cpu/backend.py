"""vLLM's CPU attention backend with trees: its own kernel for all rows that are none.

It takes the place of `CPU_ATTN` (`attention_override`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_recycle.integration.attention_override import refuse_layer
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.kernels.cpu.calls import tree_attention
from vllm_recycle.kernels.cpu.tree_attention import TreeQueries


@dataclass(frozen=True, slots=True)
class MixedRows:
    """A step's rows, split by who attends.

    Attributes:
        trees: the rows of trees.
        are_cached: whether their keys and values are in the cache.
        other_rows: int64 [n], the flat rows that are no tree; None where all are.
        other_metadata: vLLM's metadata for these alone.

    """

    trees: TreeQueries
    are_cached: bool
    other_rows: torch.Tensor | None
    other_metadata: CPUAttentionMetadata | None


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata, and `mixed_rows` for a step with trees.

    Attributes:
        trees: of the step that is built next, set by the runner (`tree_rows.prepare_trees`);
            None for steps that no request is in.
        trees_are_cached: whether the rows of trees have KV slots.
        is_idle: whether no layer attends by what is built, so that nothing need be.

    """

    trees: StepLayout | None = None
    trees_are_cached: bool = True
    is_idle: bool = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata | None:
        if self.is_idle:
            return None
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        prepared, self.trees = self.trees, None
        if prepared is not None and len(prepared.tree_rows):
            metadata.mixed_rows = self._split_rows(common_attn_metadata, prepared)
        return metadata

    def _split_rows(self, common: CommonAttentionMetadata, trees: StepLayout) -> MixedRows:
        # On a few numbers, where numpy's calls cost a third of torch's.
        nodes = trees.num_nodes.numpy()
        has_tree = nodes > 0
        tree_lengths = np.where(has_tree, nodes + 1, 0)
        num_rows = torch.from_numpy(tree_lengths)
        tree_rows = TreeQueries(
            trees=trees.trees,
            first=trees.first_token_row,
            num_rows=num_rows,
            num_context=common.seq_lens - num_rows,
            block_table=common.block_table_tensor,
            block_size=self.block_size,
        )
        if not has_tree.all():
            tree_rows = tree_rows.select(torch.from_numpy(has_tree))
        # Rows before a root are no tree's.
        other_lengths = np.diff(common.query_start_loc_cpu.numpy()) - tree_lengths
        if not other_lengths.any():
            return MixedRows(tree_rows, self.trees_are_cached, None, None)
        lengths = torch.from_numpy(other_lengths)
        others = lengths > 0
        is_other = torch.ones(common.num_actual_tokens, dtype=torch.bool)
        is_other[trees.tree_token_rows] = False
        rows = is_other.nonzero().flatten()
        lengths = lengths[others]
        query_start_loc = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        seq_lens = (common.seq_lens - num_rows)[others].to(torch.int32)
        alone = common.replace(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens,
            num_reqs=len(lengths),
            num_actual_tokens=len(rows),
            max_query_len=int(lengths.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=common.block_table_tensor[others],
            slot_mapping=common.slot_mapping[rows],
        )
        return MixedRows(tree_rows, self.trees_are_cached, rows, super().build(0, alone))


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention of a layer; the metadata of a step with trees carry `mixed_rows`.

    Raises:
        NotImplementedError: a kind of layer whose masks or scores the tree path does not have.

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_layer(self, **{"an fp8 KV cache": self.is_fp8_kv_cache})

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
            query,
            kv_cache,
            output,
            trees=mixed.trees,
            scale=self.scale,
            isa=layer.isa,
            own=None if mixed.are_cached else (key, value),
            window=None if self.sliding_window == -1 else self.sliding_window,
            sinks=self.sinks,
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

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder
