"""vLLM's CPU attention backend with trees: its own kernel serves prompts, and steps without drafts.

It takes the place of `CPU_ATTN` (`attention_override`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.start.attention_override import refuse_layer
from vllm_recycle.kernels.cpu.cache_calls import TreeQueries, tree_attention


class TreeMetadata(NamedTuple):
    """Which rows of a step are trees, and which are not.

    Attributes:
        trees: the rows of trees.
        other_part: the other rows, int64 [n], or a slice where they follow each other, and vLLM's
            metadata for these alone; None for none.

    """

    trees: TreeQueries
    other_part: tuple[torch.Tensor | slice, CPUAttentionMetadata] | None


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's metadata, or those of a step with trees.

    Attributes:
        step: what is built next. vLLM's runner calls `build` with nothing of ours, so the step is
            put here before (`hand_over`) and taken there; None for steps without requests.
        is_idle: whether no layer attends by what is built, so that nothing need be.

    """

    step: StepLayout | None = None
    is_idle: bool = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, **_: Any
    ) -> CPUAttentionMetadata | TreeMetadata | None:
        if self.is_idle:
            return None
        step, self.step = self.step, None
        # Of chains attention need not know: vLLM's metadata say it all. But where rows of a request
        # share each load of a key or value in our kernel alone, ours takes less time.
        if step is not None and step.trees.are_chains and self.isa == "amx":
            step = None
        return self.build_step(common_attn_metadata, step)

    def build_step(
        self, common: CommonAttentionMetadata, step: StepLayout | None, *, are_cached: bool = True
    ) -> CPUAttentionMetadata | TreeMetadata:
        """Metadata of a step.

        Args:
            common: vLLM's, of all rows.
            step: the trees among these, if any.
            are_cached: whether the rows of trees have KV slots.

        """
        if step is None or not any(step.num_nodes):
            return super().build(0, common)
        # A few numbers, which Python adds up before a call of torch begins.
        starts, seq_lens = common.query_start_loc_cpu.tolist(), common.seq_lens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        sizes = [  # a root alone is a tree too
            nodes + 1 if nodes or (are_cached and length == 1) else 0
            for nodes, length in zip(step.num_nodes, lengths, strict=True)
        ]
        trees = TreeQueries(
            trees=step.trees,
            root_rows=torch.from_numpy(np.array(step.first_token_row)),
            num_rows=torch.from_numpy(np.array(sizes)),
            num_context=torch.from_numpy(np.array(seq_lens) - np.array(sizes)),
            block_table=common.block_table_tensor,
            are_cached=are_cached,
        )
        if not all(sizes):
            trees = trees.select(trees.num_rows > 0)
        # Rows before a root are no tree's.
        other_lengths = np.array(lengths) - np.array(sizes)
        other_part = None
        if other_lengths.any():
            [requests] = other_lengths.nonzero()
            first_rows = np.array(starts)[requests]  # before a root, if there is one
            rows, part = part_of(common, requests, first_rows, other_lengths[requests])
            start, end = int(rows[0]), int(rows[-1]) + 1
            follow_each_other = end - start == len(rows)
            other_part = slice(start, end) if follow_each_other else rows, super().build(0, part)
        return TreeMetadata(trees, other_part)


def hand_over(step: StepLayout, attn_groups: Iterable[Sequence[Any]]) -> None:
    """Let the metadata that vLLM's runner builds next know of a step's drafts.

    Args:
        step: that is prepared.
        attn_groups: vLLM's, of each KV cache group.

    """
    for groups in attn_groups:
        for group in groups:
            group.get_metadata_builder().step = step


def part_of(
    common: CommonAttentionMetadata, requests: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> tuple[torch.Tensor, CommonAttentionMetadata]:
    """Some rows of a step, and their metadata, as of a step of these alone.

    Args:
        common: vLLM's, of all rows.
        requests: int64 [n], which have such rows, in the order that they are to have.
        starts: integer [n], the first of these rows of each request.
        lengths: int64 [n], how many they are, one or more.

    Returns:
        The rows, int64 [rows], and vLLM's metadata.

    """
    ends = lengths.cumsum()
    rows = torch.from_numpy(np.arange(ends[-1]) + (starts - ends + lengths).repeat(lengths))
    num_rows_behind = common.query_start_loc_cpu.numpy()[requests + 1] - starts - lengths
    seq_lens = common.seq_lens[requests] - torch.from_numpy(num_rows_behind.astype(np.int32))
    query_start_loc = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))
    return rows, common.replace(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens,
        num_reqs=len(requests),
        num_actual_tokens=len(rows),
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=common.block_table_tensor[requests],
        slot_mapping=common.slot_mapping[rows],
    )


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    """Attention of a layer: roots and nodes by our kernel, all other rows by vLLM's.

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
        **_: Any,
    ) -> torch.Tensor:
        if not isinstance(attn_metadata, TreeMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        tree_attention(
            query,
            kv_cache,
            output,
            trees=attn_metadata.trees,
            scale=self.scale,
            isa=layer.isa,
            own=None if attn_metadata.trees.are_cached else (key, value),
            window=None if self.sliding_window == -1 else self.sliding_window,
            sinks=self.sinks,
        )
        if attn_metadata.other_part is not None:
            rows, metadata = attn_metadata.other_part
            other_output = output[rows]  # of a slice no copy, as the query is none
            super().forward(layer, query[rows], key, value, kv_cache, metadata, other_output)
            if not isinstance(rows, slice):
                output[rows] = other_output
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeCPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder
