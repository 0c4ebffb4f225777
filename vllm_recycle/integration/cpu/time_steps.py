"""What rows cost on this engine: steps of the real model, timed at start-up."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from vllm_recycle.core.curve import TREES, MeasuredCurve
from vllm_recycle.core.tree import Trees
from vllm_recycle.integration.cpu.backend import hand_over
from vllm_recycle.integration.cpu.lora import logits_of_an_adapter
from vllm_recycle.integration.cpu.step_layout import StepLayout
from vllm_recycle.integration.drafter import from_first_rank

Points = dict[tuple[int, int], dict[int, float]]  # by load, and then rows: seconds of a step

LOADS = ((1, 256), (1, 2048), (3, 512), (8, 512), (20, 512))
# Rows of each request, in the order of how much they tell; a matrix product may work in tiles of 16
# rows.
ROWS = (4, 16, 8, 2, 32, 48, 17, 96, 192, 256)
ROWS_OF_SEVERAL = (4, 2, 12, 8, 3)
ROUNDS = 5
MAX_SECONDS, SURE = 0.8, 3  # for a load; but so many sizes are timed, however long that takes


def find_curve(runner: Any) -> tuple[MeasuredCurve | None, str]:
    """Measure what steps take.

    Args:
        runner: a `TreeCPUModelRunner` whose KV cache is there, and which
            has no requests.

    Returns:
        The times, None where no step has room for more rows than one, and a line that says what
        was found.

    """
    max_rows = runner.tree_drafter.max_rows
    max_request_rows = min(
        max_rows,
        runner.max_num_tokens,
        1 + runner.tree_drafter.options.num_nodes,
        runner.max_model_len - 1,
    )
    if max_request_rows < 2:
        return None, "no step has room for a draft"
    started = time.perf_counter()
    measured = from_first_rank(_measure(runner, max_request_rows))
    seconds = time.perf_counter() - started
    requests, context = load = min(next(iter(measured.values())))
    lines = []
    for kind, points in measured.items():
        times = sorted(points[load].items())
        lines.append(f"{kind} " + ", ".join(f"{rows}: {1e3 * time:.1f}" for rows, time in times))
    return MeasuredCurve(measured, max_rows), (
        f"a step by its rows, in ms, of {requests} request behind {context} tokens: "
        f"{'; '.join(lines)}; measured in {seconds:.1f} s for {len(points)} loads"
    )


def _measure(runner: Any, max_request_rows: int) -> dict[str, Points]:
    """Time steps with drafts of several sizes, at several loads."""
    longest = runner.max_model_len - max_request_rows
    points: dict[str, Points] = {kind: {} for kind in runner.tree_drafter.options.kinds}
    with _steps_alone(runner):
        # No step has more requests: the largest one is timed in the place of larger loads.
        max_reqs = runner.max_num_reqs
        loads = [(min(n, max_reqs), min(c, longest)) for n, c in LOADS if n == 1 or max_reqs > 1]
        for requests, context in dict.fromkeys(loads):
            largest = min(max_request_rows, runner.max_num_tokens // requests)
            if requests == 1:
                sizes = [1, *dict.fromkeys(min(rows, max_request_rows) for rows in ROWS)]
            else:
                sizes = [1, *(rows for rows in ROWS_OF_SEVERAL if rows <= largest)]
            if len(sizes) > 1:
                for kind, times in _time_steps(runner, requests, sizes, context, points).items():
                    points[kind][requests, context] = times
    runner.maybe_remove_all_loras(runner.lora_config)
    return points


@contextmanager
def _steps_alone(runner: Any) -> Iterator[None]:
    """Let vLLM's steps that warm up be steps of requests, without its proposer, which they run too.

    Each place of the block tables has a block of its own, as requests have them. Times would be
    those of a cache that is always at hand otherwise.
    """
    tables = [
        table.get_device_tensor(runner.max_num_reqs)
        for table in runner.input_batch.block_table.block_tables
    ]
    for table in tables:
        blocks = torch.arange(table.numel(), dtype=table.dtype) % runner.kv_cache_config.num_blocks
        table.copy_(blocks.view_as(table))
    runner.drafter.dummy_run = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del runner.drafter.dummy_run
        for table in tables:
            table.zero_()


def _time_steps(
    runner: Any, requests: int, sizes: list[int], context: int, kinds: Collection[str]
) -> dict[str, dict[int, float]]:
    """Seconds of a step by what its drafts are and by its rows.

    They take turns, so that a disturbance hits all. Without drafts all kinds are one.

    Args:
        runner: see `find_curve`.
        requests: of the step.
        sizes: rows of each request; of the first ones there is always a time.
        context: tokens before these.
        kinds: what drafts may be.

    """
    plain, *_ = kinds  # of all kinds alike
    steps = [(kind, rows) for rows in sizes for kind in kinds if rows > 1 or kind == plain]
    sure = [step for step in steps if step[1] in sizes[:SURE]]
    # The first time may have what is slow only once; each of these is timed again below.
    times = {(kind, rows): _time_step(runner, requests, rows, context, kind) for kind, rows in sure}
    started, max_seconds = time.perf_counter(), MAX_SECONDS * len(kinds)
    for number, (kind, rows) in enumerate(steps * ROUNDS):
        if number >= len(sure) and not from_first_rank(time.perf_counter() - started < max_seconds):
            break
        seconds = _time_step(runner, requests, rows, context, kind)
        # What is beyond the shortest is somebody else's.
        times[kind, rows] = min(seconds, times.get((kind, rows), math.inf))
    return {
        kind: {requests: times[plain, 1]}
        | {requests * rows: seconds for (drafts, rows), seconds in times.items() if drafts == kind}
        for kind in kinds
    }


@torch.inference_mode()
def _time_step(runner: Any, requests: int, rows: int, context: int, kind: str) -> float:
    """Seconds of a forward, of an adapter with LoRA, its logits and what is done with these.

    A tree is a chain but for the second node, which is below the root as the first one is.
    """
    num_rows = requests * rows
    parents = [*range(rows - 1)]
    if kind == TREES:
        parents[1:2] = [0] * len(parents[1:2])
    step = StepLayout.make(
        trees=Trees.from_drafts([parents] * requests),
        num_nodes=[rows - 1] * requests,
        last_token_row=range(rows - 1, num_rows, rows),
        row_token_ids=np.zeros(num_rows, dtype=np.int64),
    )
    started = time.perf_counter()
    hand_over(step, runner.attn_groups)
    query_len, runner.uniform_decode_query_len = runner.uniform_decode_query_len, rows
    try:
        hidden, _ = runner._dummy_run(
            num_rows,
            force_attention=True,
            uniform_decode=True,
            skip_eplb=True,
            profile_seq_lens=context + rows,
            remove_lora=False,
            num_active_loras=0 if runner.lora_config is None else 1,
        )
    finally:
        runner.uniform_decode_query_len = query_len
    with logits_of_an_adapter(runner, requests, rows):
        logits = runner.model.compute_logits(hidden[:num_rows])
    runner.tree_drafter.observe(torch.arange(requests), step, logits)
    logits.argmax(dim=-1)
    return time.perf_counter() - started
