"""Trees on a CUDA attention backend of vLLM: one launch of ours per layer for the tree rows.

A request that decodes without a draft is a tree of its root alone. Where prompts are among the
requests of a step only those with a draft are trees: in V2's batch order they come first, so the
rows are a range of trees and a range of others, which stay with vLLM's kernels. In a batch of trees
alone, what attention reads (masks, offsets, lengths, block table) lies in buffers that never move,
so that the step can be captured into a CUDA graph, and replayed whatever rows its requests have.

A draft forward has no metadata of vLLM's: its rows are trees whose keys and values are its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from vllm_recycle.integration.start.attention_override import refuse_layer
from vllm_recycle.kernels.triton.attention.queries import TreeQueries
from vllm_recycle.kernels.triton.attention.tree_attention import rows_of_tiles, tree_attention
from vllm_recycle.kernels.triton.trees import DeviceTrees

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")
MAX_HEAD_SIZE = 256  # that the kernel is compiled and tested for


class TreeMetadataBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's metadata, and the trees.

    Of a step whose first requests are trees it sets two attributes on what it builds:
    `tree_queries`, of their rows, and `plain_metadata`, vLLM's of the requests behind them, None
    where there are none.

    Attributes:
        num_trees: how many requests of the step that is built next are trees, set by the runner.
        trees: of all requests, by `req_state_idx`.
        tree_indices: int64 [max_num_reqs], the `req_state_idx` of each request of a step; a buffer
            that never moves.

    """

    # A batch with a prompt has no graph. `graphs` knows that others need not be uniform.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # It would give another group's metadata a block table that ours do not follow.
    supports_update_block_table: bool = False

    num_trees: int = 0
    trees: DeviceTrees
    tree_indices: torch.Tensor

    def take_trees(self, trees: DeviceTrees, tree_indices: torch.Tensor) -> None:
        """Set what the rows of trees see, and where each request of a step has its tree."""
        self.trees, self.tree_indices = trees, tree_indices

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        common = common_attn_metadata
        num_trees, self.num_trees = self.num_trees, 0
        if not num_trees:
            return super().build(common_prefix_len, common, fast_build)
        ends = common.query_start_loc_cpu[: num_trees + 1]
        is_all = num_trees == common.num_reqs
        queries = TreeQueries(
            ancestor_bits=self.trees.ancestor_bits,
            depths=self.trees.depths,
            idx_mapping=self.tree_indices[:num_trees],
            query_start_loc=common.query_start_loc[: num_trees + 1],
            seq_lens=common.seq_lens[:num_trees],
            block_table=common.block_table_tensor[:num_trees],
            # Of a graph that is captured, more than the rows that it is captured with.
            max_rows=common.max_query_len if is_all else int(ends.diff().max()),
            num_rows=int(ends[-1]),
        )
        # Without vLLM's schedule for its own kernel, which does not run on these rows.
        metadata = super().build(0, common, fast_build=True)
        metadata.tree_queries, metadata.plain_metadata = queries, None
        if not is_all:
            plain_common = _requests_from(common, num_trees)
            metadata.plain_metadata = super().build(0, plain_common, fast_build)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        if common_attn_metadata.max_query_len > 1:
            self.num_trees = common_attn_metadata.num_reqs
        return super().build_for_cudagraph_capture(common_attn_metadata)


def _requests_from(common: CommonAttentionMetadata, first_request: int) -> CommonAttentionMetadata:
    """The metadata of the requests from this one on, as if they were a batch of their own."""
    start = int(common.query_start_loc_cpu[first_request])
    query_start_loc_cpu = common.query_start_loc_cpu[first_request:] - start
    upper_bound = common.seq_lens_cpu_upper_bound
    seq_lens_cpu_upper_bound = upper_bound[first_request:] if upper_bound is not None else None
    return common.replace(
        query_start_loc=common.query_start_loc[first_request:] - start,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=common.seq_lens[first_request:],
        seq_lens_cpu_upper_bound=seq_lens_cpu_upper_bound,
        num_reqs=common.num_reqs - first_request,
        num_actual_tokens=common.num_actual_tokens - start,
        max_query_len=int(query_start_loc_cpu.diff().max()),
        block_table_tensor=common.block_table_tensor[first_request:],
        slot_mapping=common.slot_mapping[start:],
    )


class TreeFlashAttentionImpl(FlashAttentionImpl):
    """FlashAttention for all rows that are no tree.

    Raises:
        NotImplementedError: a kind of layer whose masks or scores the tree path does not have.

    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        features = {
            f"a KV cache in {self.kv_cache_dtype}": self.kv_cache_dtype not in KV_CACHE_DTYPES,
            f"a head size of {self.head_size}": self.head_size > MAX_HEAD_SIZE,
        }
        refuse_layer(self, **features)
        # vLLM counts those before a row.
        left_window, _ = self.sliding_window
        self.window = None if left_window < 0 else left_window + 1

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **scales: torch.Tensor | None,
    ) -> torch.Tensor:
        attend = partial(
            tree_attention,
            query,
            kv_cache,
            output,
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
        )
        if isinstance(attn_metadata, TreeQueries):
            attend(rows=attn_metadata, own=(key, value))
            return output
        queries: TreeQueries | None = getattr(attn_metadata, "tree_queries", None)
        forward = super().forward
        if queries is None:
            return forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        attend(rows=queries)
        if attn_metadata.plain_metadata is not None:
            rows = slice(queries.num_rows, None)
            # A layer that reads another's KV cache has no keys and values of its own.
            tensors = [None if tensor is None else tensor[rows] for tensor in (query, key, value)]
            forward(layer, *tensors, kv_cache, attn_metadata.plain_metadata, output[rows], **scales)
        return output


def warm_up_tiles(
    layer: Any, block_table: torch.Tensor, trees: DeviceTrees, tree_indices: torch.Tensor
) -> None:
    """Compile tree attention of a layer for trees of any size, with contexts whole and split.

    Graphs have few sizes, but prompts have any beside them, in steps that have none. A request is
    launched for that has no rows.

    Args:
        layer: of vLLM's, with its KV cache.
        block_table: int32 [1 or more, blocks], as those of steps.
        trees: of all requests.
        tree_indices: int64 [max_num_reqs].

    """
    impl, kv_cache = layer.impl, layer.kv_cache
    query = kv_cache.new_zeros(1, impl.num_heads, impl.head_size)
    zeros = torch.zeros(2, dtype=torch.int32, device=kv_cache.device)
    group = impl.num_heads // impl.num_kv_heads
    for max_rows in rows_of_tiles(query, group, 1 + trees.num_nodes):
        rows = TreeQueries(
            ancestor_bits=trees.ancestor_bits,
            depths=trees.depths,
            idx_mapping=tree_indices[:1],
            query_start_loc=zeros,
            seq_lens=zeros[:1],
            block_table=block_table[:1],
            max_rows=max_rows,
            num_rows=0,
        )
        for num_splits in (1, 2):
            tree_attention(
                query,
                kv_cache,
                torch.empty_like(query),
                rows=rows,
                scale=impl.scale,
                window=impl.window,
                sinks=impl.sinks,
                num_splits=num_splits,
            )


class TreeFlashAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeFlashAttentionImpl]:
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMetadataBuilder]:
        return TreeMetadataBuilder
