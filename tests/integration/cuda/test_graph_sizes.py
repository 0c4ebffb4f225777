"""Every step without a prompt finds a full CUDA graph that fits, and few are captured.

vLLM's own code makes the candidates, with speculation on, and dispatches; no graph is captured.
"""

from __future__ import annotations

from itertools import product
from operator import attrgetter, ge
from types import SimpleNamespace

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from tests.integration.engines import make_config
from vllm_recycle.core.curve import TREES, Load
from vllm_recycle.core.graph_curve import ROWS_OF_A_PROGRAM, GraphCurve, GraphShape, GraphTimes
from vllm_recycle.integration.cuda.backend import TreeMetadataBuilder
from vllm_recycle.integration.cuda.graphs import (
    EXACT_BATCHES,
    PADDING_ROWS,
    SPREAD,
    plan_full_graphs,
    prefer_graphs,
    replace_full_graphs,
    shape_of,
)
from vllm_recycle.integration.options.limits import (
    MAX_TREE_ROWS,
    halving_schedule,
    sizes_of_batches,
)

NODES = 63  # that trees grow to by default
LARGEST = 512
TABLE = halving_schedule(NODES, MAX_TREE_ROWS)
# As vLLM chooses them for a GPU, without speculation.
CAPTURE_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 16)]


def make_manager(max_num_reqs: int, largest: int | None = LARGEST, loras: tuple[int, ...] = (0,)):
    """vLLM's manager as on a GPU, with its own choice of graphs, as if they were captured."""
    method = {"method": "ngram", "num_speculative_tokens": NODES}
    method["num_speculative_tokens_per_batch_size"] = TABLE
    given = {"max_num_seqs": max_num_reqs, "max_num_batched_tokens": 8192}
    config = make_config(method, enforce_eager=False, **given)
    # What the platform of a CPU has turned off.
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.max_cudagraph_capture_size, compilation.cudagraph_capture_sizes = largest, None
    config.model_config.enforce_eager = False
    config._set_cudagraph_sizes()
    manager = object.__new__(CudaGraphManager)  # without a group of ranks
    manager.vllm_config, manager.compilation_config = config, compilation
    manager.cudagraph_mode = compilation.cudagraph_mode
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


def with_ours(sizes_of_batch: list[list[int]], *, has_plain_requests: bool = False, **given):
    """The same, with our choice of graphs."""
    manager = make_manager(len(sizes_of_batch) - 1, **given)
    sizes = manager.compilation_config.cudagraph_capture_sizes
    shapes = plan_full_graphs(sizes_of_batch, sizes, has_plain_requests=has_plain_requests)
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
    return with_ours(sizes_of_batch, has_plain_requests=make_sizes is grown)


def test_every_step_without_a_prompt_has_a_full_graph_that_is_filled_up_little(
    sizes_of_batch, manager
):
    """Of trees alone, one of them cut, and of trees beside plain requests."""
    for num_reqs, length in rows_of(sizes_of_batch):
        all_but_one = [length] * (num_reqs - 1)
        batches = [[*all_but_one, max(1, length - cut)] for cut in (0, 1, 2, 7)]
        batches += [
            [length] * n + [1] * (num_reqs - n) for n in {1, num_reqs // 2, num_reqs - 1} - {0}
        ]
        for lengths in batches:
            desc = dispatch(manager, lengths)
            assert_fits(desc, lengths)
            # A graph with more rows and fewer programs may cost less.
            most = max(sum(lengths), num_reqs * length)
            assert desc.num_tokens - most <= max(PADDING_ROWS, most // 3)
            # Where the others have ended.
            assert_fits(dispatch(manager, lengths[-2:]), lengths[-2:])
        uniform = dispatch(manager, batches[0])
        assert uniform.uniform_token_count is None
        # Of few requests no program of attention finds nothing to do, of others not many.
        room = 1 if num_reqs in EXACT_BATCHES else 2 * SPREAD
        assert room > 1 or uniform.num_tokens == num_reqs * length
        assert programs(shape_of(uniform)) <= room * programs((0, num_reqs, length))


def programs(shape: tuple[int, int, int]) -> int:
    _, num_reqs, max_query_len = shape
    return num_reqs * -(-max_query_len // ROWS_OF_A_PROGRAM)


@pytest.mark.parametrize("max_num_reqs", [48, 256])
def test_a_few_trees_among_many_plain_requests_have_a_full_graph(max_num_reqs):
    sizes_of_batch = grown(max_num_reqs)
    manager, found = with_ours(sizes_of_batch, has_plain_requests=True), 0
    for num_reqs, drafting in product((2, 5, 20, 48, 100, 200, 256), (1, 2, 3, 8, 24)):
        for nodes in sizes_of_batch[drafting] if drafting < num_reqs <= max_num_reqs else ():
            lengths = [nodes + 1] * drafting + [1] * (num_reqs - drafting)
            # The largest graph has room for a multiple of a whole tree.
            if sum(lengths) <= LARGEST - NODES:
                desc, found = dispatch(manager, lengths), found + 1
                assert_fits(desc, lengths)
                assert desc.num_tokens <= 2 * sum(lengths) + PADDING_ROWS
    assert found > 20


@pytest.mark.parametrize("max_num_reqs", [1, 7, 64, 1024])
def test_any_number_of_requests_has_its_graphs(make_sizes, max_num_reqs):
    sizes_of_batch = make_sizes(max_num_reqs)
    manager = with_ours(sizes_of_batch)
    for (num_reqs, length), is_alone in product(rows_of(sizes_of_batch), (False, True)):
        lengths = [length] + [1 if is_alone else length] * (num_reqs - 1)
        assert_fits(dispatch(manager, lengths), lengths)


def test_plain_steps_and_those_with_a_prompt_have_the_graphs_of_plain_decoding(manager):
    for num_reqs in range(1, 257):
        desc = dispatch(manager, [1] * num_reqs)
        assert (desc.cg_mode, desc.uniform_token_count) == (CUDAGraphMode.FULL, 1)
        assert desc.num_reqs == next(size for size in CAPTURE_SIZES if size >= num_reqs)
    for num_reqs, num_tokens in ((2, 65), (1, 64), (3, 9)):
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
    assert counts(vllm_s) == (35, 203, len(CAPTURE_SIZES))
    assert counts(with_ours(grown(256), has_plain_requests=True)) == (35, 51, len(CAPTURE_SIZES))
    assert counts(with_ours(by_table(256))) == (35, 11, len(CAPTURE_SIZES))
    # Of vLLM's choice there is none for plain requests beside trees.
    assert dispatch(vllm_s, [64, 1]).cg_mode == CUDAGraphMode.PIECEWISE


def test_the_largest_graph_is_captured_first_and_vllm_can_make_a_batch_of_each(manager):
    descs = manager._capture_descs[CUDAGraphMode.FULL]
    tokens = [desc.num_tokens for desc in descs]
    # Its output is the buffer of all the others'.
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] <= LARGEST
    assert len(descs) == len(set(descs))
    buffers = InputBuffers(256, 8192, torch.device("cpu"))
    for desc in descs:
        longest = desc.max_query_len or desc.uniform_token_count
        given = desc.num_reqs, desc.num_tokens, buffers
        batch = InputBatch.make_dummy(*given, max_query_len=longest)
        assert batch.num_scheduled_tokens.max() <= longest == batch.max_query_len


@pytest.mark.parametrize(("longest", "trees"), [(5, 3), (1, 0)])
def test_a_captured_graph_has_trees_where_requests_may_have_several_rows(
    longest, trees, monkeypatch
):
    capture = "build_for_cudagraph_capture"
    monkeypatch.setattr(FlashAttentionMetadataBuilder, capture, lambda self, _: self.num_trees)
    builder = object.__new__(TreeMetadataBuilder)
    step = SimpleNamespace(max_query_len=longest, num_reqs=3)
    assert builder.build_for_cudagraph_capture(step) == trees


def test_adapters_have_graphs_of_their_own():
    manager = with_ours(by_table(8), loras=(0, 2))
    plain, lora = (manager.dispatch(2, 65, None, active, max_query_len=64) for active in (0, 1))
    assert (plain.num_active_loras, lora.num_active_loras) == (0, 2)
    assert shape_of(plain) == shape_of(lora)


@pytest.mark.parametrize("took", [attrgetter("cost"), attrgetter("num_tokens", "num_reqs"), hash])
def test_a_step_gets_the_graph_that_took_least_and_costs_that(sizes_of_batch, make_sizes, took):
    manager = with_ours(sizes_of_batch, has_plain_requests=make_sizes is grown)
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
