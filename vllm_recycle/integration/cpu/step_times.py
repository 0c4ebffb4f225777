"""What rows cost on this engine: steps of the real model, timed at start-up."""

from __future__ import annotations

import statistics
import time
from itertools import product
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_recycle.core import BatchTrees
from vllm_recycle.core.dynamic import StepTimes
from vllm_recycle.integration.cpu.tree_batch import TreeBatch

T = TypeVar("T")

# In the order of how much they tell; a matrix product may work in tiles of 16 rows.
ROWS = (16, 4, 48, 8, 2, 17, 32, 96, 192, 256)
CONTEXTS = (256, 2048)
ROUNDS = 5
MAX_SECONDS = 1.2  # for a length of context, but for the fewest rows and the most


def measure_step_times(runner: Any, max_rows: int) -> tuple[StepTimes, str]:
    """Time steps of one request with trees of several sizes behind contexts of several lengths.

    Args:
        runner: a `TreeCPUModelRunner` whose KV cache is there, and which has no requests.
        max_rows: the most rows that a time is needed for.

    Returns:
        The times, and a line that says what was found.

    """
    most = min(
        max_rows,
        runner.max_num_tokens,
        1 + runner.drafter.proposer.num_nodes,
        runner.max_model_len - 1,
    )
    sizes = [1, most, *(rows for rows in ROWS if rows < most)]
    longest = runner.max_model_len - most
    contexts = [context for context in CONTEXTS if context <= longest] or [longest]
    started = time.perf_counter()
    points = {context: _time_steps(runner, sizes, context) for context in contexts}
    first = contexts[0]
    shown = ", ".join(f"{rows}: {1e3 * points[first][rows]:.1f}" for rows in sorted(points[first]))
    return from_first_rank(StepTimes.measured(points, max_rows)), (
        f"a step by its rows, in ms, behind {first} tokens: {shown}; measured for contexts "
        f"{list(points)} in {time.perf_counter() - started:.1f} s"
    )


def _time_steps(runner: Any, sizes: list[int], context: int) -> dict[int, float]:
    """Seconds of a step by its rows; the sizes take turns, so that a disturbance hits all."""
    _time_step(runner, sizes[1], context)  # what is slow at the first time only
    times: dict[int, list[float]] = {}
    started = time.perf_counter()
    for _, rows in product(range(ROUNDS), sizes):
        if len(times) > 1 and not from_first_rank(time.perf_counter() - started < MAX_SECONDS):
            break
        times.setdefault(rows, []).append(_time_step(runner, rows, context))
    return {rows: statistics.median(seconds) for rows, seconds in times.items()}


def from_first_rank(value: T) -> T:
    """What the first of the tensor-parallel ranks has, which must all do and draft alike."""
    group = get_tp_group()
    return group.broadcast_object(value) if group.world_size > 1 else value


@torch.inference_mode()
def _time_step(runner: Any, rows: int, context: int) -> float:
    """Seconds of a forward of one request, with its logits and what is done with these."""
    parents = torch.arange(-1, rows - 1).clamp(min=0)[None]
    trees = TreeBatch.make(
        trees=BatchTrees.from_parents(parents),
        num_nodes=torch.tensor([rows - 1]),
        last_token_row=torch.tensor([rows - 1]),
        row_token_ids=torch.zeros(rows, dtype=torch.int64),
    )
    started = time.perf_counter()
    for groups in runner.attn_groups:
        for group in groups:
            group.get_metadata_builder().trees = trees
    # One request of all rows: a uniform one, which is at most as long as the largest draft.
    hidden, _ = runner._dummy_run(
        rows,
        force_attention=True,
        uniform_decode=True,
        skip_eplb=True,
        profile_seq_lens=context + rows,
    )
    logits = runner.model.compute_logits(hidden[:rows])
    runner.drafter.observe(torch.zeros(1, dtype=torch.int64), trees, logits)
    logits.argmax(dim=-1)
    return time.perf_counter() - started
