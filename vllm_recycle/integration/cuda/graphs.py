"""Which full CUDA graphs are captured for trees, and which graph a step gets.

vLLM captures full graphs for uniform batches, in which each request has as many rows. A batch of
trees is seldom uniform. Tree attention reads from the device how many rows a request has, so one of
our graphs serves every step without a prompt that is within its bounds: the rows of the step, its
requests, and the rows of one request. vLLM dispatches by such bounds (`max_query_len`), but would
capture the longest alone, and small steps would run with the grids of large ones.

Plain decoding has the graphs that it has without speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from vllm.config.compilation import CUDAGraphMode

from vllm_recycle.core.graph_curve import GraphShape, by_preference

# The bound of a graph is at most this many times the rows of a request. So the graph has room for
# this many times the requests that use up its rows at the bound. Grids are made for all of them:
# the programs of a request that is not there end at once.
SPREAD = 8
# For each step there is a graph with at most a quarter more rows, or this many; one with more rows
# and fewer programs may cost less.
PADDING_ROWS = 16
# Batches of so many requests have graphs of their own, without room for others.
EXACT_BATCHES = (1, 2, 4, 8)


def plan_full_graphs(
    sizes_of_batch: Sequence[Sequence[int]],
    capture_sizes: Sequence[int],
    *,
    has_plain_requests: bool = False,
) -> list[GraphShape]:
    """The full graphs to capture, by preference.

    Args:
        sizes_of_batch: nodes that trees may have, by batch size from 0 (unused) to the largest.
        capture_sizes: vLLM's token counts, of which the last is the largest to capture.
        has_plain_requests: whether the batch is that of the requests that draft, and any number of
            plain ones may be beside them.

    """
    max_num_reqs, max_capture_size = len(sizes_of_batch) - 1, max(capture_sizes)
    plain_sizes = {min(size, max_num_reqs) for size in capture_sizes}
    steps = {
        (nodes + 1, batch * (nodes + 1))
        for batch, sizes in enumerate(sizes_of_batch)
        for nodes in sizes
        if 0 < batch * (nodes + 1) <= max_capture_size
    }
    shapes = {GraphShape(size, size, 1) for size in plain_sizes}
    lengths = _thinned({rows for rows, _ in steps}, lambda rows: SPREAD * rows)
    for lower_bound, bound in pairwise([0, *reversed(lengths)]):
        totals = {total for rows, total in steps if lower_bound < rows <= bound}
        counts = _thinned(totals, lambda total: total + max(PADDING_ROWS, total // 4))
        for num_tokens in counts:
            num_reqs = min(SPREAD * num_tokens // bound, num_tokens, max_num_reqs)
            shapes.add(GraphShape(num_tokens, num_reqs, bound))
        for num_tokens in counts[::2] if has_plain_requests else ():
            shapes.add(GraphShape(num_tokens, min(num_tokens, max_num_reqs), bound))
    for rows, total in steps:
        if (batch := total // rows) in EXACT_BATCHES:
            shapes.add(GraphShape(total, batch, rows))
    return by_preference(shapes)


def _thinned(values: Iterable[int], bound: Callable[[int], int]) -> list[int]:
    """Some of these, descending: each value has one that is no less, and at most its bound."""
    selection: list[int] = []
    for value in sorted(values, reverse=True):
        if not selection or selection[-1] > bound(value):
            selection.append(value)
    return selection


def replace_full_graphs(manager: Any, shapes: Sequence[GraphShape]) -> None:
    """Make these the full graphs that vLLM captures and dispatches to, beside its piecewise ones.

    Args:
        manager: vLLM's `CudaGraphManager`, before it captures.
        shapes: of the graphs, by preference; nothing is done where the manager has no full ones.

    """
    old_descs = manager._capture_descs.get(CUDAGraphMode.FULL)
    if not old_descs:
        return
    descs = [
        replace(
            old_descs[0],
            num_tokens=shape.num_tokens,
            num_reqs=shape.num_reqs,
            # What vLLM calls a batch in which each request has one row.
            uniform_token_count=1 if shape.max_query_len == 1 else None,
            max_query_len=shape.max_query_len if shape.max_query_len > 1 else None,
            num_active_loras=num_active_loras,
        )
        for num_active_loras in manager.lora_capture_cases
        for shape in shapes
    ]
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(
        descs, key=lambda desc: desc.num_tokens, reverse=True
    )
    for candidates in manager._candidates.values():
        candidates[:] = [desc for desc in candidates if desc.cg_mode != CUDAGraphMode.FULL]
    for desc in reversed(descs):
        for num_tokens in range(desc.num_tokens + 1):
            key = (num_tokens, desc.num_active_loras)
            manager._candidates.setdefault(key, []).insert(0, desc)


def prefer_graphs(manager: Any, shapes: Sequence[GraphShape]) -> None:
    """Let steps try the graphs of `replace_full_graphs` in this order, piecewise ones behind."""
    ranks = {shape: index for index, shape in enumerate(shapes)}

    def rank(desc: Any) -> int:
        is_full = desc.cg_mode == CUDAGraphMode.FULL
        return ranks.get(shape_of(desc), len(ranks)) if is_full else len(ranks)

    for candidates in manager._candidates.values():
        candidates.sort(key=rank)


def shape_of(desc: Any) -> GraphShape:
    """Of a full graph of `replace_full_graphs`."""
    return GraphShape(desc.num_tokens, desc.num_reqs, desc.max_query_len or 1)
