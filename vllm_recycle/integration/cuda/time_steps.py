"""What steps cost on this engine: each captured graph is replayed at start-up, and drafting run."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch, set_dummy_context

from vllm_recycle.core.curve import TREES, TRUNKS
from vllm_recycle.core.graph_curve import GraphShape, GraphTimes
from vllm_recycle.integration.cuda.graphs import shape_of
from vllm_recycle.integration.drafter import from_first_rank

ROUNDS = 5
# For which a GPU waits until all rounds of drafting are launched: some 10 ms.
QUEUING_CYCLES = 20_000_000
# Tokens of the context that each graph is replayed behind, beside none.
CONTEXT = 2048


def find_graph_times(runner: Any) -> GraphTimes:
    """The times of steps, as the first rank has measured them.

    Args:
        runner: a `TreeModelRunner` with its graphs, and without requests.

    """
    speculator = runner.speculator
    round_times, tree_times, plain_times = (
        {batch: _drafting_seconds(run, runner.device) for batch, run in runs.items()}
        for runs in (speculator.drafting_runs(), speculator.alone_runs(), speculator.plain_runs())
    )
    kinds = {TRUNKS: round_times, TREES: tree_times} if tree_times else {TREES: round_times}
    return from_first_rank(GraphTimes(time_graphs(runner), kinds, plain_times))


def describe_capture(manager: Any, seconds: float, num_bytes: int) -> str | None:
    """Of vLLM's graphs and ours in one, since they share memory; None without full ones."""
    if not (manager and manager.graphs):
        return None
    num_for_drafts = sum(shape_of(desc).max_query_len > 1 for desc in manager.graphs)
    return (
        f"captured graphs in {seconds:.1f} s and {num_bytes / 2**30:.2f} GiB, {num_for_drafts} of "
        f"the {len(manager.graphs)} full ones for drafts"
    )


def describe_times(times: GraphTimes, seconds: float) -> str:
    """What was found, and the seconds that it took."""
    if not times.graphs:
        return "sizes of trees follow the table of batch sizes: without full graphs none was timed"
    drafting = "; ".join(
        f"{kind} take " + ", ".join(f"{1e3 * s:.2f} for {batch}" for batch, s in runs.items())
        for kind, runs in times.drafting.items()
    )
    return (
        f"sizes of trees are chosen step by step; {len(times.graphs)} graphs and drafting timed in "
        f"{seconds:.1f} s; drafting, in ms for requests: {drafting}"
    )


def time_graphs(runner: Any) -> dict[GraphShape, tuple[float, float]]:
    """Seconds of each graph with the logits of its rows; see `GraphTimes`.

    What adapters add to a step is left out.
    """
    manager = runner.cudagraph_manager
    descs = [desc for desc in (manager.graphs if manager else ()) if not desc.num_active_loras]
    shapes = {shape_of(desc): desc for desc in descs}
    # As much for all: no request may be longer than the model takes.
    max_query_len = max((shape.max_query_len for shape in shapes), default=0)
    context = max(1, min(CONTEXT, runner.max_model_len - max_query_len))
    times = {}
    for shape, desc in shapes.items():
        step = partial(_run_step, runner, desc)
        seconds = []
        for length in (0, context):
            _prepare_step(runner, shape, length)
            seconds.append(_median_seconds(step, runner.device))
        times[shape] = (seconds[0], max(0.0, seconds[1] - seconds[0]) / context)
    return times


def _prepare_step(runner: Any, shape: GraphShape, context: int) -> None:
    """Fill the buffers that a graph reads, as vLLM does before it replays one."""
    # Rows that fill up a batch meet no experts, and tokens that are all the same the same ones.
    batch = InputBatch.make_dummy(
        shape.num_reqs,
        shape.num_tokens,
        runner.input_buffers,
        max_query_len=shape.max_query_len,
        is_padding=False,
    )
    batch.input_ids.random_(runner.model_config.get_vocab_size())
    tables, config = runner.block_tables, runner.kv_cache_config
    block_tables = tables.get_dummy_block_tables(shape.num_reqs)
    slots = tables.get_dummy_slot_mappings(shape.num_tokens)
    set_dummy_context(batch, tables, context, config.num_blocks, runner.max_model_len)
    state, groups = runner.model_state, runner.attn_groups
    state.prepare_attn(batch, CUDAGraphMode.FULL, block_tables, slots, groups, config)


def _run_step(runner: Any, desc: Any) -> None:
    hidden_states = runner.cudagraph_manager.run_fullgraph(desc)
    if isinstance(hidden_states, tuple):  # with those of other layers
        hidden_states = hidden_states[0]
    runner.model.compute_logits(hidden_states)


def _median_seconds(run: Callable[[], Any], device: torch.device) -> float:
    run()  # what is slow at the first time only
    times = []
    for _ in range(ROUNDS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _drafting_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of the device, where there is one: while it runs a step, the host is ahead with the next."""
    if device.type != "cuda":
        return _median_seconds(run, device)
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(QUEUING_CYCLES)
    start.record()
    for _ in range(ROUNDS):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / ROUNDS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
