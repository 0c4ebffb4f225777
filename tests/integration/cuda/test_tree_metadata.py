"""What attention is told of a step's trees: the ranges of rows, padding, and graph capture."""

from __future__ import annotations

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.integration.engines import TARGET, TOKEN_RECYCLING
from vllm_recycle.core.tree import load_tree
from vllm_recycle.integration.cuda.backend import TreeFlashAttentionMetadataBuilder
from vllm_recycle.integration.plugin import register
from vllm_recycle.kernels.triton.trees import DeviceTrees

INDICES = torch.zeros(8, dtype=torch.int64)
TREES = DeviceTrees.of(load_tree("default").prefix(4), 8, "cpu")


@pytest.fixture
def builder() -> TreeFlashAttentionMetadataBuilder:
    register()
    method = {**TOKEN_RECYCLING, "tree": "default", "max_nodes": 4}
    config = EngineArgs(
        TARGET, speculative_config=method, dtype="float32", kv_cache_memory_bytes=1 << 24
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    builder = TreeFlashAttentionMetadataBuilder(spec, [], config, torch.device("cpu"))
    builder.take_trees(TREES, INDICES)
    return builder


def step(lengths: list[int], context: int = 20) -> CommonAttentionMetadata:
    """A step's requests with so many rows each; without rows one only fills up a graph."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([length + context if length else 0 for length in lengths])
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=seq_lens.to(torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(lengths),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=torch.arange(len(lengths) * 4, dtype=torch.int32).view(-1, 4),
        slot_mapping=torch.arange(int(starts[-1])),
    )


def test_a_step_without_trees_is_vllms_alone(builder):
    assert not hasattr(builder.build(0, step([1, 1, 7])), "tree_queries")


def test_a_step_of_trees_alone(builder):
    common = step([5, 5, 5])
    builder.num_trees = 3
    metadata = builder.build(0, common)
    trees = metadata.tree_queries
    assert (trees.max_rows, trees.batch, trees.num_rows) == (5, 3, 15)
    assert metadata.others is None
    # The buffers themselves, which a captured graph goes on reading.
    for name in ("query_start_loc", "seq_lens"):
        assert getattr(trees, name).data_ptr() == getattr(common, name).data_ptr()
    assert trees.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    assert trees.idx_mapping.data_ptr() == INDICES.data_ptr()
    assert trees.ancestor_bits is TREES.ancestor_bits
    # The next step has no trees unless told.
    assert not hasattr(builder.build(0, step([5])), "tree_queries")


def test_trees_of_several_sizes_before_a_prompt(builder):
    common = step([5, 3, 1, 9])
    builder.num_trees = 2
    metadata = builder.build(0, common)
    assert (metadata.tree_queries.max_rows, metadata.tree_queries.num_rows) == (5, 8)
    assert metadata.tree_queries.query_start_loc.tolist() == [0, 5, 8]
    others = metadata.others
    assert others.query_start_loc.tolist() == [0, 1, 10]
    assert (others.num_actual_tokens, others.max_query_len) == (10, 9)
    assert others.seq_lens.tolist() == [21, 29]
    assert others.block_table.tolist() == common.block_table_tensor[2:].tolist()
    assert others.slot_mapping.tolist() == list(range(8, 18))


@pytest.mark.parametrize(
    ("lengths", "starts", "seq_lens"),
    [
        # Plain requests are trees of their roots.
        ([5, 3, 1, 1], [0, 5, 8, 9, 10], [25, 23, 21, 21]),
        # Those that fill up a graph have no rows.
        ([5, 5, 0], [0, 5, 10, 10], [25, 25, 0]),
    ],
)
def test_all_requests_of_a_step_without_prompts_are_trees(builder, lengths, starts, seq_lens):
    builder.num_trees = len(lengths)
    metadata = builder.build(0, step(lengths))
    assert metadata.tree_queries.query_start_loc.tolist() == starts
    assert metadata.tree_queries.seq_lens.tolist() == seq_lens
    assert metadata.tree_queries.max_rows == 5
    assert metadata.others is None


def test_a_graph_is_captured_for_the_rows_that_requests_may_have(builder):
    common = step([2, 2, 1])
    common.max_query_len = 5
    captured = builder.build_for_cudagraph_capture(common)
    assert (captured.tree_queries.max_rows, captured.tree_queries.batch) == (5, 3)
    assert captured.others is None
    # Where no request has several rows, there are no trees.
    assert not hasattr(builder.build_for_cudagraph_capture(step([1, 1])), "tree_queries")
