"""Every step of trees of one size, or of plain decoding, finds a full CUDA graph that fits.

vLLM's own dispatch decides; no graph is captured.
"""

from __future__ import annotations

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_recycle.integration.cuda.graph_sizes import plan_full_graphs, replace_full_graphs
from vllm_recycle.integration.row_budget import (
    MAX_TREE_ROWS,
    halving_schedule,
    sizes_of_batches,
)

NODES = 80
# As vLLM chooses them for a GPU, without speculation.
CAPTURE_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]


def make_manager(max_num_reqs: int) -> tuple[CudaGraphManager, list[int]]:
    """vLLM's manager with graphs of its own choice replaced, as if they were captured."""
    table = halving_schedule(NODES, MAX_TREE_ROWS)
    nodes_of_batch = build_dynamic_sd_schedule_lookup(table, max_num_reqs, NODES)
    manager = object.__new__(CudaGraphManager)
    manager._graphs_captured = True
    manager._lora_dispatch_map, manager._max_lora_case = {}, 0
    full = BatchExecutionDescriptor(CUDAGraphMode.FULL, 81, 1, 81)
    piecewise = [
        BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size, None) for size in CAPTURE_SIZES
    ]
    manager._capture_descs = {CUDAGraphMode.FULL: [full], CUDAGraphMode.PIECEWISE: piecewise}
    manager._candidates = {}
    for size in range(1, CAPTURE_SIZES[-1] + 1):
        fitting = next(desc for desc in piecewise if desc.num_tokens >= size)
        manager._candidates[size, 0] = [full, fitting]
    sizes_of_batch = [[nodes] if nodes else [] for nodes in nodes_of_batch]
    replace_full_graphs(manager, plan_full_graphs(sizes_of_batch, CAPTURE_SIZES))
    return manager, nodes_of_batch


@pytest.mark.parametrize("max_num_reqs", [1, 7, 64, 128, 256, 1024])
def test_every_uniform_step_has_a_full_graph(max_num_reqs):
    manager, nodes_of_batch = make_manager(max_num_reqs)
    for num_reqs in range(1, max_num_reqs + 1):
        for rows in {1, nodes_of_batch[num_reqs] + 1}:
            desc = manager.dispatch(num_reqs, num_reqs * rows, rows, 0)
            if rows == 1 and num_reqs > CAPTURE_SIZES[-1]:
                assert desc.cg_mode == CUDAGraphMode.NONE
                continue
            assert desc.cg_mode == CUDAGraphMode.FULL
            assert desc.uniform_token_count == rows
            assert num_reqs <= desc.num_reqs <= max(num_reqs * 1.25, num_reqs + 15)


def test_a_batch_that_shrinks_still_has_the_graph_of_its_drafts():
    manager, nodes_of_batch = make_manager(64)
    # Four requests got drafts of half the tree, and one of them has ended.
    rows = nodes_of_batch[4] + 1
    desc = manager.dispatch(3, 3 * rows, rows, 0)
    assert (desc.cg_mode, desc.uniform_token_count, desc.num_reqs) == (CUDAGraphMode.FULL, 41, 4)


def test_a_mixed_step_has_a_piecewise_graph():
    manager, _ = make_manager(64)
    desc = manager.dispatch(2, 82, None, 0)
    assert (desc.cg_mode, desc.num_tokens) == (CUDAGraphMode.PIECEWISE, 88)


def test_the_graphs_of_trees_are_no_more_than_those_of_plain_decoding():
    manager, _ = make_manager(256)
    rows = [desc.uniform_token_count for desc in manager._capture_descs[CUDAGraphMode.FULL]]
    plain = rows.count(1)
    assert (plain, len(rows) - plain) == (35, 30)  # as the README says
    tokens = [desc.num_tokens for desc in manager._capture_descs[CUDAGraphMode.FULL]]
    assert tokens == sorted(tokens, reverse=True)
    assert max(tokens) <= CAPTURE_SIZES[-1]


def test_sizes_that_are_chosen_step_by_step_have_graphs_too():
    sizes_of_batch = sizes_of_batches(NODES, CAPTURE_SIZES[-1], 256)
    assert sizes_of_batch[0] == []
    assert sizes_of_batch[1] == [80, 40, 20, 10, 5]
    assert sizes_of_batch[6] == [80, 40, 20, 10, 5, 2, 1]
    assert sizes_of_batch[7] == [40, 20, 10, 5, 2, 1]
    assert sizes_of_batch[256] == [1]
    graphs = plan_full_graphs(sizes_of_batch, CAPTURE_SIZES)
    assert len(graphs) == len(set(graphs)) < 120
    for num_reqs in range(1, 257):
        for nodes in sizes_of_batch[num_reqs]:
            filled = min(n for rows, n in graphs if rows == nodes + 1 and n >= num_reqs)
            assert filled * (nodes + 1) <= CAPTURE_SIZES[-1]
            assert filled <= num_reqs * 1.25 or (filled - num_reqs) * (nodes + 1) <= 64
