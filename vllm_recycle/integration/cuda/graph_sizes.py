"""Which full CUDA graphs are captured for trees, and which graph a step gets.

vLLM captures a full graph for uniform batches of every query length that its schedule names, at all
sizes of one list of token counts, and offers a step the graphs of the next larger count alone: a
graph of another query length at that count hides the one that fits. With half a dozen sizes of
trees that is hundreds of graphs, and most steps find none. Here each size of tree has graphs for
the batches that it is for, plain decoding has those that it has without speculation, and a step is
offered the next larger one of each query length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from vllm.config.compilation import CUDAGraphMode

# Batches of one size of tree are filled up by less than an eighth of the largest one.
STEPS = 8
# Who decodes for so few waits for each step.
SMALL = (1, 2, 4)


def batches_to_capture(first: int, last: int) -> list[int]:
    """Batch sizes from `first` to `last`, a dozen at most, the last and the smallest among them."""
    step = max(1, last // STEPS)
    small = [size for size in SMALL if first <= size <= last]
    return sorted({*range(last, first - 1, -step), *small})


def plan_full_graphs(
    sizes_of_batch: Sequence[Sequence[int]], capture_sizes: Sequence[int]
) -> list[tuple]:
    """The full graphs to capture.

    Args:
        sizes_of_batch: nodes that trees may have, by batch size from 0 (unused) to the largest; the
            batches of a size are without gaps.
        capture_sizes: vLLM's token counts, of which the last is the largest to capture.

    Returns:
        (rows of a request, requests) of each graph.

    """
    max_num_reqs, largest = len(sizes_of_batch) - 1, max(capture_sizes)
    graphs = [(1, size) for size in sorted({min(size, max_num_reqs) for size in capture_sizes})]
    batches = range(1, max_num_reqs + 1)
    for nodes in sorted({nodes for sizes in sizes_of_batch[1:] for nodes in sizes}, reverse=True):
        tier = [batch for batch in batches if nodes in sizes_of_batch[batch]]
        last = min(tier[-1], largest // (nodes + 1))
        graphs += [(nodes + 1, num_reqs) for num_reqs in batches_to_capture(tier[0], last)]
    return graphs


def replace_full_graphs(manager: Any, graphs: Sequence[tuple]) -> None:
    """Make these the full graphs that vLLM captures and dispatches to, beside its piecewise ones.

    Args:
        manager: vLLM's `CudaGraphManager`, before it captures.
        graphs: (rows of a request, requests) of each; nothing is done where it has no full ones.

    """
    old = manager._capture_descs.get(CUDAGraphMode.FULL)
    if not old:
        return
    descs = [
        replace(old[0], num_tokens=rows * reqs, num_reqs=reqs, uniform_token_count=rows)
        for rows, reqs in graphs
    ]
    manager._capture_descs[CUDAGraphMode.FULL] = sorted(
        descs, key=lambda desc: desc.num_tokens, reverse=True
    )
    by_rows = {
        rows: sorted(tier, key=lambda desc: desc.num_tokens)
        for rows, tier in groupby(
            sorted(descs, key=lambda desc: desc.uniform_token_count),
            key=lambda desc: desc.uniform_token_count,
        )
    }
    others = {
        key: [desc for desc in candidates if desc.cg_mode != CUDAGraphMode.FULL]
        for key, candidates in manager._candidates.items()
    }
    manager._candidates.clear()
    most = max([desc.num_tokens for desc in descs] + [num_tokens for num_tokens, _ in others])
    for num_tokens in range(most + 1):
        offered = []
        for tier in by_rows.values():
            index = bisect_left(tier, num_tokens, key=lambda desc: desc.num_tokens)
            offered += tier[index : index + 1]
        key = (num_tokens, 0)  # no LoRA
        manager._candidates[key] = [*offered, *others.get(key, ())]
