"""Every step without a prompt finds a full CUDA graph that fits, and few are captured.

vLLM's own code makes the candidates, with speculation on, and dispatches; no graph is captured.
"""

from __future__ import annotations

from itertools import product
from operator import attrgetter, ge

import pytest
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from tests.integration.engines import make_config
from vllm_recycle.core.curve import TREES, Load
from vllm_recycle.core.graph_curve import ROWS_OF_A_PROGRAM, GraphCurve, GraphShape, GraphTimes
from vllm_recycle.integration.cuda.graphs import (
    FILLED,
    SPREAD,
    plan_full_graphs,
    prefer_graphs,
    replace_full_graphs,
    shape_of,
)
from vllm_recycle.integration.draft_limits import (
    MAX_TREE_ROWS,
    halving_schedule,
    sizes_of_batches,
)

NODES = 80
LARGEST = 512
TABLE = halving_schedule(NODES, MAX_TREE_ROWS)
# As vLLM chooses them for a GPU, without speculation.
CAPTURE_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 16)]


def config_of(max_num_reqs: int, largest: int | None) -> VllmConfig:
    """vLLM's, as on a GPU, of a method with our table."""
    method = {"method": "ngram", "num_speculative_tokens": NODES}
    method["num_speculative_tokens_per_batch_size"] = TABLE
    given = {"max_num_seqs": max_num_reqs, "max_num_batched_tokens": 8192}
    config = make_config(method, enforce_eager=False, **given)
    # What the platform of a CPU has turned off.
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.max_cudagraph_capture_size = largest
    config.compilation_config.cudagraph_capture_sizes = None
    config.model_config.enforce_eager = False
    config._set_cudagraph_sizes()
    return config


def make_manager(max_num_reqs: int, largest: int | None = LARGEST, loras: tuple[int, ...] = (0,)):
    """vLLM's manager, with its own choice of graphs, as if they were captured."""
    config = config_of(max_num_reqs, largest)
    manager = object.__new__(CudaGraphManager)  # without a group of ranks
    manager.vllm_config, manager.compilation_config = config, config.compilation_config
    manager.cudagraph_mode = config.compilation_config.cudagraph_mode
    manager.max_num_reqs, manager.decode_query_len = max_num_reqs, NODES + 1
    manager.varlen_decode, manager.ubatch_runner = False, None
    manager.lora_capture_cases = list(loras)
    manager._lora_dispatch_map, manager._max_lora_case = manager._build_lora_dispatch_map()
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    manager._graphs_captured = True
    return manager


def grown(max_num_reqs: int) -> list[list[int]]:
    return sizes_of_batches(NODES, LARGEST, max_num_reqs)


def by_table(max_num_reqs: int) -> list[list[int]]:
    nodes_of_batch = build_dynamic_sd_schedule_lookup(TABLE, max_num_reqs, NODES)
    return [[nodes] if nodes else [] for nodes in nodes_of_batch]


def with_ours(
    sizes_of_batch: list[list[int]], *, among_others: bool = False, **given
) -> CudaGraphManager:
    manager = make_manager(len(sizes_of_batch) - 1, **given)
    sizes = manager.compilation_config.cudagraph_capture_sizes
    shapes = plan_full_graphs(sizes_of_batch, sizes, among_others=among_others)
    replace_full_graphs(manager, shapes)
    return manager


def dispatch(manager: CudaGraphManager, lengths: list[int]) -> BatchExecutionDescriptor:
    """Of a step of decoding requests with so many rows, as the runner asks."""
    uniform = lengths[0] if len(set(lengths)) == 1 else None
    return manager.dispatch(len(lengths), sum(lengths), uniform, 0, max_query_len=max(lengths))


def assert_fits(desc: BatchExecutionDescriptor, lengths: list[int]) -> None:
    assert desc.cg_mode == CUDAGraphMode.FULL
    step = GraphShape(sum(lengths), len(lengths), max(lengths))
    assert all(room >= need for room, need in zip(shape_of(desc), step, strict=True))


def rows_of(sizes_of_batch: list[list[int]]) -> list[tuple[int, int]]:
    """Numbers of requests, and the rows that each may have."""
    return [(n, nodes + 1) for n, sizes in enumerate(sizes_of_batch) for nodes in sizes]


@pytest.fixture(scope="module", params=[grown, by_table])
def make_sizes(request):
    return request.param


@pytest.fixture(scope="module")
def sizes_of_batch(make_sizes):
    return make_sizes(256)


@pytest.fixture(scope="module")
def manager(make_sizes, sizes_of_batch):
    return with_ours(sizes_of_batch, among_others=make_sizes is grown)


def test_every_uniform_step_has_a_full_graph_and_is_filled_up_little(sizes_of_batch, manager):
    for num_reqs, length in rows_of(sizes_of_batch):
        rows = num_reqs * length
        desc = dispatch(manager, [length] * num_reqs)
        assert_fits(desc, [length] * num_reqs)
        assert desc.uniform_token_count is None
        assert desc.num_tokens - rows <= max(FILLED, rows // 4)
        # Of few requests no program of attention finds nothing to do, of others not many.
        room = 1 if num_reqs in (1, 2, 3, 4, 8) else 2 * SPREAD
        assert room > 1 or desc.num_tokens == rows
        assert programs(shape_of(desc)) <= room * programs((rows, num_reqs, length))


def programs(shape: tuple[int, int, int]) -> int:
    _, num_reqs, max_query_len = shape
    return num_reqs * -(-max_query_len // ROWS_OF_A_PROGRAM)


def test_every_mixture_of_trees_and_plain_requests_has_a_full_graph(sizes_of_batch, manager):
    for num_reqs, length in rows_of(sizes_of_batch):
        for drafting in {1, num_reqs // 2, num_reqs - 1} - {0}:
            lengths = [length] * drafting + [1] * (num_reqs - drafting)
            desc = dispatch(manager, lengths)
            assert_fits(desc, lengths)
            # Never more than its rows, or a part of those that all would have had.
            most = max(sum(lengths), num_reqs * length)
            assert desc.num_tokens - most <= max(FILLED, most // 4)


@pytest.mark.parametrize("max_num_reqs", [48, 256])
def test_a_few_trees_among_many_plain_requests_have_a_full_graph(max_num_reqs):
    sizes_of_batch = grown(max_num_reqs)
    manager, found = with_ours(sizes_of_batch, among_others=True), 0
    for num_reqs, drafting in product((2, 5, 20, 48, 100, 200, 256), (1, 2, 3, 8, 24)):
        for nodes in sizes_of_batch[drafting] if drafting < num_reqs <= max_num_reqs else ():
            lengths = [nodes + 1] * drafting + [1] * (num_reqs - drafting)
            # The largest graph has room for a multiple of a whole tree.
            if sum(lengths) <= LARGEST - NODES:
                desc, found = dispatch(manager, lengths), found + 1
                assert_fits(desc, lengths)
                assert desc.num_tokens <= 2 * sum(lengths) + FILLED
    assert found > 20


def test_a_tree_that_is_cut_among_others_has_a_full_graph(sizes_of_batch, manager):
    for num_reqs in (2, 3, 6, 24, 85):
        for nodes, cut in product(sizes_of_batch[num_reqs], (0, 1, 2, 7)):
            lengths = [nodes + 1] * (num_reqs - 1) + [max(1, nodes + 1 - cut)]
            assert_fits(dispatch(manager, lengths), lengths)
            assert_fits(dispatch(manager, lengths[-2:]), lengths[-2:])


@pytest.mark.parametrize("max_num_reqs", [1, 7, 64, 1024])
def test_any_number_of_requests_has_its_graphs(make_sizes, max_num_reqs):
    sizes_of_batch = make_sizes(max_num_reqs)
    manager = with_ours(sizes_of_batch)
    for num_reqs, length in rows_of(sizes_of_batch):
        for other in (length, 1):
            lengths = [length] + [other] * (num_reqs - 1)
            assert_fits(dispatch(manager, lengths), lengths)


def test_plain_steps_keep_the_graphs_that_they_have_without_speculation(manager):
    for num_reqs in range(1, 257):
        desc = dispatch(manager, [1] * num_reqs)
        assert (desc.cg_mode, desc.uniform_token_count) == (CUDAGraphMode.FULL, 1)
        assert desc.num_reqs == next(size for size in CAPTURE_SIZES if size >= num_reqs)


def test_a_step_with_a_prompt_has_a_piecewise_graph(manager):
    for num_reqs, num_tokens in ((2, 82), (1, 81), (3, 9)):
        # vLLM knows of no longest query there, or of one that does not decode.
        desc = manager.dispatch(num_reqs, num_tokens, None, 0, max_query_len=None)
        assert desc.cg_mode == CUDAGraphMode.PIECEWISE


def counts(manager: CudaGraphManager) -> tuple[int, int, int]:
    """Graphs of plain decoding, of trees, and piecewise ones."""
    full = manager._capture_descs[CUDAGraphMode.FULL]
    plain = sum(desc.uniform_token_count == 1 for desc in full)
    return plain, len(full) - plain, len(manager._capture_descs[CUDAGraphMode.PIECEWISE])


def test_few_graphs_are_captured():
    vllm_s = make_manager(256, largest=None)
    assert counts(vllm_s) == (54, 251, 70)
    assert counts(with_ours(grown(256), among_others=True)) == (35, 85, len(CAPTURE_SIZES))
    assert counts(with_ours(by_table(256))) == (35, 15, len(CAPTURE_SIZES))
    # Of vLLM's choice there is none for plain requests beside trees.
    assert dispatch(vllm_s, [81, 1]).cg_mode == CUDAGraphMode.PIECEWISE


def test_the_largest_graph_is_captured_first(manager):
    # Its output is the buffer of all the others'.
    tokens = [desc.num_tokens for desc in manager._capture_descs[CUDAGraphMode.FULL]]
    assert tokens == sorted(tokens, reverse=True)
    assert max(tokens) <= LARGEST
    descs = manager._capture_descs[CUDAGraphMode.FULL]
    assert len(descs) == len(set(descs))


def test_vllm_can_make_a_batch_of_each_graph(manager):
    buffers = InputBuffers(256, 8192, torch.device("cpu"))
    for desc in manager._capture_descs[CUDAGraphMode.FULL]:
        longest = desc.max_query_len or desc.uniform_token_count
        batch = InputBatch.make_dummy(
            desc.num_reqs, desc.num_tokens, buffers, max_query_len=longest
        )
        assert batch.num_scheduled_tokens.max() <= longest
        assert batch.max_query_len == longest


def test_adapters_have_graphs_of_their_own():
    manager = with_ours(by_table(8), loras=(0, 2))
    plain, lora = (manager.dispatch(2, 82, None, active, max_query_len=81) for active in (0, 1))
    assert (plain.num_active_loras, lora.num_active_loras) == (0, 2)
    assert shape_of(plain) == shape_of(lora)


@pytest.mark.parametrize("took", [attrgetter("cost"), attrgetter("num_tokens", "num_reqs"), hash])
def test_a_step_gets_the_graph_that_took_least_and_costs_that(sizes_of_batch, make_sizes, took):
    manager = with_ours(sizes_of_batch, among_others=make_sizes is grown)
    graphs = [shape_of(desc) for desc in manager._capture_descs[CUDAGraphMode.FULL]]
    seconds = {shape: float(at) for at, shape in enumerate(sorted(graphs, key=took))}
    graphs_take = {shape: (time, 0.0) for shape, time in seconds.items()}
    times = GraphTimes(graphs_take, {TREES: {1: 0.0}})
    prefer_graphs(manager, times.preference)
    curve = GraphCurve(times)
    for num_reqs in range(1, 257):
        for nodes, drafting in product([0, *sizes_of_batch[num_reqs]], {1, num_reqs}):
            lengths = [nodes + 1] * drafting + [1] * (num_reqs - drafting)
            found = seconds[shape_of(dispatch(manager, lengths))]
            load = Load(num_reqs, 0, drafting)
            assert curve.at(TREES, load, (sum(lengths),)) == [found]
            step = (sum(lengths), num_reqs, nodes + 1)
            fitting = [g for g in graphs if all(map(ge, g, step))]
            assert nodes == 0 or found == min(map(seconds.get, fitting))
